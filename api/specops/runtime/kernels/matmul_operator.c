// The operator of products, for ONNX Runtime's graphs.
//
//   specops.QuantizedMatMul(x, weights, bias, norm, residual, shift) -> y [, sum, activated]
//   x         float32 [..., K], or [..., 2 K] for a gate
//   weights   uint8 [bytes]
//   bias      float32 [N], optional
//   norm, residual, shift  inputs of a norm: float32 [K], as x, [K]; the last two are optional
//   y         float32 [..., N]
//   sum, activated  float32 [..., K], optional: the sum of x and residual; what is multiplied
//   attributes: N, K, bits, block_size, zero_points (0 to 2), half_scales and bias (0 or 1), input (0
//   to 5), epsilon; see matmul.h

#include "matmul.h"
#include "operators.h"
#include "processor.h"

enum { X, WEIGHTS, BIAS, WEIGHT_OF_NORM, RESIDUAL, SHIFT, INPUTS };
enum { Y, SUM, ACTIVATED };

typedef struct {
    const MatmulKernel *kernel;
    Shape shape;
    int64_t bias, input;
    float epsilon;
} Kernel;

static const char *check_shape(const Shape *shape, int64_t bits, int64_t zero_points,
                               int64_t half_scales) {
    if (shape->block % 32 || shape->block <= 0 || shape->block > MOST_BLOCK)
        return "QuantizedMatMul: blocks are multiples of 32, up to 256";
    if (bits != 4 && bits != 8) return "QuantizedMatMul: codes have 4 or 8 bits";
    if (zero_points < MIDDLE || zero_points > FRACTIONS)
        return "QuantizedMatMul: zero_points is 0, 1 or 2";
    if (half_scales >> 1) return "QuantizedMatMul: half_scales is 0 or 1";
    if (shape->columns < 1 || shape->depth < 1) return "QuantizedMatMul: N and K are at least 1";
    if (shape->columns > MOST_SIDE || shape->depth > MOST_SIDE)
        return "QuantizedMatMul: N and K are at most 16777216";
    return NULL;
}

static const char *check_input(const Kernel *self) {
    if (self->bias >> 1) return "QuantizedMatMul: bias is 0 or 1";
    if (self->input < AS_IT_IS || self->input > GELU_GATE)
        return "QuantizedMatMul: input is 0 to 5";
    return check_epsilon(self->epsilon);
}

OrtStatus *create_matmul(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                         void **out) {
    (void)op, (void)given;
    int64_t bits, zero_points, half_scales;
    Kernel self = {.kernel = choose_processor()->matmul};
    Shape *shape = &self.shape;
    const AttributeTo attributes[] = {
        {"N", &shape->columns, NULL}, {"K", &shape->depth, NULL},
        {"block_size", &shape->block, NULL}, {"bits", &bits, NULL},
        {"zero_points", &zero_points, NULL}, {"half_scales", &half_scales, NULL},
        {"bias", &self.bias, NULL}, {"input", &self.input, NULL}, {"epsilon", NULL, &self.epsilon}};
    OrtStatus *status = read_attributes(info, attributes, sizeof attributes / sizeof *attributes);
    if (status) return status;
    const char *wrong = check_shape(shape, bits, zero_points, half_scales);
    if (!wrong) wrong = check_input(&self);
    if (wrong) return failure(wrong);
    shape->bits = (int)bits;
    shape->zero_points = (int)zero_points;
    shape->half_scales = (int)half_scales;
    return keep(&self, sizeof self, out);
}

static const char *check_inputs(const Kernel *self, const Tensor *inputs) {
    const Shape *shape = &self->shape;
    const int64_t bytes = tiles_of(shape) * tile_bytes(shape), depth = shape->depth;
    const Tensor *x = inputs + X;
    const int64_t width = self->input >= SILU_GATE ? 2 * depth : depth;
    if (!x->data || x->dimensions[x->count - 1] != width)
        return "QuantizedMatMul: the last dimension of the input is not K, or 2 K of a gate";
    if (self->input == NORM || self->input == LAYER_NORM) {
        const char *wrong = check_norm(x, inputs + WEIGHT_OF_NORM, inputs + RESIDUAL, inputs + SHIFT);
        if (wrong) return wrong;
    }
    if (!has_shape(inputs + WEIGHTS, 1, bytes, bytes))
        return "QuantizedMatMul: the weights have another size than their shape";
    if (self->bias && !has_shape(inputs + BIAS, 1, shape->columns, shape->columns))
        return "QuantizedMatMul: the bias is missing or has another size than N";
    return NULL;
}

OrtStatus *compute_matmul(void *kernel, OrtKernelContext *context) {
    const Kernel *self = kernel;
    const Shape *shape = &self->shape;
    Tensor tensors[INPUTS];
    OrtStatus *status = read_inputs(context, INPUTS, tensors);
    if (status) return status;
    const char *wrong = check_inputs(self, tensors);
    if (wrong) return failure(wrong);
    const Tensor *x = tensors + X;
    const int64_t rows = rows_of_tensor(x);
    Input input = {.kind = (int)self->input, .x = x->data, .epsilon = self->epsilon};
    float *y;
    status = output_of(context, Y, x, shape->columns, &y);
    if (input.kind == NORM || input.kind == LAYER_NORM) {
        input.weight = tensors[WEIGHT_OF_NORM].data, input.residual = tensors[RESIDUAL].data;
        input.shift = tensors[SHIFT].data;
        if (!status) status = output_of(context, SUM, x, shape->depth, &input.sum);
    }
    if (!status && input.kind != AS_IT_IS)
        status = output_of(context, ACTIVATED, x, shape->depth, &input.activated);
    if (status || !rows) return status;
    Call call = {context, NULL};
    if (multiply(self->kernel, shape, tensors[WEIGHTS].data, self->bias ? tensors[BIAS].data : NULL,
                 &input, rows, y, threads_of(&call)))
        return failure("QuantizedMatMul: out of memory");
    return call.status;
}
