// The operator of products, for ONNX Runtime's graphs.
//
//   specops.QuantizedMatMul(x, tiles, bias, norm, residual, shift) -> y [, sum, activated]
//   x         float32 [..., K], or [..., 2 K] for a gate
//   tiles     uint8 [bytes], the tiles of all segments one after the other
//   bias      float32 [sum of N], optional
//   norm, residual, shift  inputs of a norm: float32 [K], as x, [K]; the last two are optional. The
//             residual is also the gate of an output, as x
//   y         float32 [..., sum of N], the segments' columns one after the other
//   sum, activated  float32 [..., K], optional: the sum of x and residual; the multiplied numbers
//   attributes: N and types, a number for each segment; K, block_size, bias (0 or 1), input (0 to 6),
//   epsilon; see matmul.h and, for types, tiles.h

#include "matmul.h"
#include "operators.h"
#include "processor.h"

enum { X, TILES, BIAS, WEIGHT_OF_NORM, RESIDUAL, SHIFT, INPUTS };
enum { Y, SUM, ACTIVATED };

typedef struct {
    const MatmulKernel *kernel;
    Weights weights;
    int64_t bias, input;
    float epsilon;
} Kernel;

static const char *check_input(const Kernel *self) {
    if (self->bias >> 1) return "QuantizedMatMul: bias is 0 or 1";
    if (self->input < AS_IT_IS || self->input > OUTPUT_GATE)
        return "QuantizedMatMul: input is 0 to 6";
    return check_epsilon(self->epsilon);
}

OrtStatus *create_matmul(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info, void **out) {
    (void)op, (void)given;
    int64_t depth, block, columns[MAX_SEGMENTS], types[MAX_SEGMENTS], count, as_many;
    Kernel self = {.kernel = choose_processor()->matmul};
    const AttributeTo attributes[] = {
        {"K", &depth, NULL}, {"block_size", &block, NULL}, {"bias", &self.bias, NULL},
        {"input", &self.input, NULL}, {"epsilon", NULL, &self.epsilon}};
    OrtStatus *status = read_attributes(info, attributes, sizeof attributes / sizeof *attributes);
    if (!status) status = read_list(info, "N", MAX_SEGMENTS, columns, &count);
    if (!status) status = read_list(info, "types", MAX_SEGMENTS, types, &as_many);
    if (status) return status;
    if (count < 1 || count > MAX_SEGMENTS || count != as_many)
        return failure("QuantizedMatMul: N and types have as many numbers, 1 to 8");
    const char *wrong = describe_weights(&self.weights, depth, block, count, columns, types);
    if (!wrong) wrong = check_input(&self);
    if (wrong) return failure(wrong);
    return keep(&self, sizeof self, out);
}

static const char *check_inputs(const Kernel *self, const Tensor *inputs) {
    const Weights *weights = &self->weights;
    const int64_t depth = weights->depth;
    const Tensor *x = inputs + X;
    const int64_t width = self->input == SILU_GATE || self->input == GELU_GATE ? 2 * depth : depth;
    if (!x->data || x->dimensions[x->count - 1] != width)
        return "QuantizedMatMul: the last dimension of the input is not K, or 2 K of a gate";
    if (self->input == NORM || self->input == LAYER_NORM) {
        const char *wrong = check_norm(x, inputs + WEIGHT_OF_NORM, inputs + RESIDUAL, inputs + SHIFT);
        if (wrong) return wrong;
    }
    const Tensor *gate = inputs + RESIDUAL;
    if (self->input == OUTPUT_GATE && (!gate->data || rows_of_tensor(gate) != rows_of_tensor(x) ||
                                       gate->dimensions[gate->count - 1] != depth))
        return "QuantizedMatMul: the gate has another shape than its input";
    if (!has_shape(inputs + TILES, 1, weights->bytes, weights->bytes))
        return "QuantizedMatMul: the tiles have another size than N, K and types say";
    if (self->bias && !has_shape(inputs + BIAS, 1, weights->columns, weights->columns))
        return "QuantizedMatMul: the bias is missing or has another size than N";
    return NULL;
}

OrtStatus *compute_matmul(void *kernel, OrtKernelContext *context) {
    const Kernel *self = kernel;
    const Weights *weights = &self->weights;
    Tensor tensors[INPUTS];
    OrtStatus *status = read_inputs(context, INPUTS, tensors);
    if (status) return status;
    const char *wrong = check_inputs(self, tensors);
    if (wrong) return failure(wrong);
    const Tensor *x = tensors + X;
    const int64_t rows = rows_of_tensor(x);
    Input input = {.kind = (int)self->input, .x = x->data, .epsilon = self->epsilon};
    float *y;
    status = output_of(context, Y, x, weights->columns, &y);
    if (input.kind == OUTPUT_GATE) input.residual = tensors[RESIDUAL].data;
    if (input.kind == NORM || input.kind == LAYER_NORM) {
        input.weight = tensors[WEIGHT_OF_NORM].data, input.residual = tensors[RESIDUAL].data;
        input.shift = tensors[SHIFT].data;
        if (!status) status = output_of(context, SUM, x, weights->depth, &input.sum);
    }
    if (!status && input.kind != AS_IT_IS)
        status = output_of(context, ACTIVATED, x, weights->depth, &input.activated);
    if (status || !rows) return status;
    Call call = {context, NULL};
    if (multiply(self->kernel, weights, tensors[TILES].data, self->bias ? tensors[BIAS].data : NULL,
                 &input, rows, y, threads_of(&call)))
        return failure("QuantizedMatMul: out of memory");
    return call.status;
}
