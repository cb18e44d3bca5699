// Makes the product an operator that ONNX Runtime can put into a graph.
//
//   specops.QuantizedMatMul(x, weights, bias, norm, residual, shift) -> y [, sum, made]
//   x         float32 [..., K], of gates [..., 2 K]
//   weights   uint8 [bytes]
//   bias      float32 [N], optional
//   norm, residual, shift  float32 [K], as x and [K], the last two optional: of a norm
//   y         float32 [..., N]
//   sum, made  float32 [..., K], optional: x and residual added; what is multiplied
//   attributes: N, K, bits, block_size, zero_points (0 to 2), half_scales and bias (0 or 1), input (0
//   to 5), epsilon; see matmul.h

#include "matmul.h"
#include "operators.h"
#include "processor.h"

#include <stdlib.h>

enum { X, WEIGHTS, BIAS, WEIGHT_OF_NORM, RESIDUAL, SHIFT, INPUTS };
enum { Y, SUM, MADE, OUTPUTS };

typedef struct {
    const MatmulKernel *kernel;
    Shape shape;
    int64_t bias, input;
    float epsilon;
} Operator;

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

static const char *check_input(const Operator *self) {
    if (self->bias >> 1) return "QuantizedMatMul: bias is 0 or 1";
    if (self->input < AS_IT_IS || self->input > GELU_GATE)
        return "QuantizedMatMul: input is 0 to 5";
    return check_epsilon(self->epsilon);
}

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                         void **out) {
    (void)op, (void)given;
    int64_t bits, zero_points, half_scales;
    Operator self = {.kernel = choose_processor()->matmul};
    Shape *shape = &self.shape;
    const struct { const char *name; int64_t *to; } whole[] = {
        {"N", &shape->columns}, {"K", &shape->depth}, {"block_size", &shape->block},
        {"bits", &bits}, {"zero_points", &zero_points}, {"half_scales", &half_scales},
        {"bias", &self.bias}, {"input", &self.input}};
    OrtStatus *status = api->KernelInfoGetAttribute_float(info, "epsilon", &self.epsilon);
    for (size_t i = 0; !status && i < sizeof whole / sizeof *whole; i++)
        status = api->KernelInfoGetAttribute_int64(info, whole[i].name, whole[i].to);
    if (status) return status;
    const char *wrong = check_shape(shape, bits, zero_points, half_scales);
    if (!wrong) wrong = check_input(&self);
    if (wrong) return failure(wrong);
    shape->bits = (int)bits;
    shape->zero_points = (int)zero_points;
    shape->half_scales = (int)half_scales;
    Operator *created = malloc(sizeof *created);
    if (!created) return failure("QuantizedMatMul: out of memory");
    *created = self;
    *out = created;
    return NULL;
}

static const char *check_inputs(const Operator *self, const Tensor *inputs) {
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

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
    const Operator *self = kernel;
    const Shape *shape = &self->shape;
    Tensor tensors[INPUTS];
    OrtStatus *status = NULL;
    for (size_t i = 0; !status && i < INPUTS; i++) status = read_input(context, i, tensors + i);
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
        status = output_of(context, MADE, x, shape->depth, &input.made);
    if (status || !rows) return status;
    Call call = {context, NULL};
    if (multiply(self->kernel, shape, tensors[WEIGHTS].data, self->bias ? tensors[BIAS].data : NULL,
                 &input, rows, y, threads_of(&call)))
        return failure("QuantizedMatMul: out of memory");
    return call.status;
}

static const char *name(const OrtCustomOp *op) { return (void)op, "QuantizedMatMul"; }
static size_t inputs(const OrtCustomOp *op) { return (void)op, INPUTS; }
static int input(const OrtCustomOp *op, size_t index) {
    return (void)op, index == WEIGHTS ? ORT_UINT8 : ORT_FLOAT;
}
static int optional(const OrtCustomOp *op, size_t index) { return (void)op, index >= BIAS; }
static size_t outputs(const OrtCustomOp *op) { return (void)op, OUTPUTS; }
static int spare(const OrtCustomOp *op, size_t index) { return (void)op, index != Y; }

const OrtCustomOp MATMUL_OPERATOR = OPERATOR;
