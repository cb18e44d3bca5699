// Makes the product an operator that ONNX Runtime can put into a graph.
//
//   specops.QuantizedMatMul(x float32 [..., K], weights uint8 [bytes], bias float32 [N], optional)
//       -> float32 [..., N]
//   attributes: N, K, bits, block_size, zero_points (0 to 2), half_scales and bias (0 or 1), see
//   matmul.h

#include "matmul.h"
#include "operators.h"
#include "processor.h"

#include <stdlib.h>

enum { X, WEIGHTS, BIAS, INPUTS };

typedef struct {
    const MatmulKernel *kernel;
    Shape shape;
    int64_t bias;
} Operator;

static const char *check_shape(const Shape *shape, int64_t bits, int64_t zero_points,
                               int64_t half_scales, int64_t bias) {
    if (shape->block % 32 || shape->block <= 0 || shape->block > MOST_BLOCK)
        return "QuantizedMatMul: blocks are multiples of 32, up to 256";
    if (bits != 4 && bits != 8) return "QuantizedMatMul: codes have 4 or 8 bits";
    if (zero_points < MIDDLE || zero_points > FRACTIONS)
        return "QuantizedMatMul: zero_points is 0, 1 or 2";
    if (half_scales >> 1) return "QuantizedMatMul: half_scales is 0 or 1";
    if (bias >> 1) return "QuantizedMatMul: bias is 0 or 1";
    if (shape->columns < 1 || shape->depth < 1) return "QuantizedMatMul: N and K are at least 1";
    if (shape->columns > MOST_SIDE || shape->depth > MOST_SIDE)
        return "QuantizedMatMul: N and K are at most 16777216";
    return NULL;
}

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                         void **out) {
    (void)op, (void)given;
    int64_t bits, zero_points, half_scales, bias;
    Shape shape;
    OrtStatus *status = api->KernelInfoGetAttribute_int64(info, "N", &shape.columns);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "K", &shape.depth);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "block_size", &shape.block);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "bits", &bits);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "zero_points", &zero_points);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "half_scales", &half_scales);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "bias", &bias);
    if (status) return status;
    const char *wrong = check_shape(&shape, bits, zero_points, half_scales, bias);
    if (wrong) return failure(wrong);
    shape.bits = (int)bits;
    shape.zero_points = (int)zero_points;
    shape.half_scales = (int)half_scales;
    Operator *created = malloc(sizeof *created);
    if (!created) return failure("QuantizedMatMul: out of memory");
    *created = (Operator){choose_processor()->matmul, shape, bias};
    *out = created;
    return NULL;
}

static const char *check_inputs(const Operator *self, const Tensor *inputs) {
    const Shape *shape = &self->shape;
    const int64_t bytes = tiles_of(shape) * tile_bytes(shape);
    if (!inputs[X].data || inputs[X].dimensions[inputs[X].count - 1] != shape->depth)
        return "QuantizedMatMul: the last dimension of the input is not K";
    if (!has_shape(inputs + WEIGHTS, 1, bytes, bytes))
        return "QuantizedMatMul: the weights have another size than their shape";
    if (self->bias && !has_shape(inputs + BIAS, 1, shape->columns, shape->columns))
        return "QuantizedMatMul: the bias is missing or has another size than N";
    return NULL;
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
    const Operator *self = kernel;
    Tensor tensors[INPUTS];
    OrtStatus *status = NULL;
    for (size_t i = 0; !status && i < INPUTS; i++) status = read_input(context, i, tensors + i);
    if (status) return status;
    const char *wrong = check_inputs(self, tensors);
    if (wrong) return failure(wrong);
    Tensor *x = tensors + X;
    const int64_t rows = rows_of_tensor(x);
    x->dimensions[x->count - 1] = self->shape.columns;
    OrtValue *output;
    void *y;
    status = api->KernelContext_GetOutput(context, 0, x->dimensions, x->count, &output);
    if (!status) status = api->GetTensorMutableData(output, &y);
    if (status || !rows) return status;
    Call call = {context, NULL};
    if (multiply(self->kernel, &self->shape, tensors[WEIGHTS].data,
                 self->bias ? tensors[BIAS].data : NULL, x->data, rows, y, threads_of(&call)))
        return failure("QuantizedMatMul: out of memory");
    return call.status;
}

static const char *name(const OrtCustomOp *op) { return (void)op, "QuantizedMatMul"; }
static size_t inputs(const OrtCustomOp *op) { return (void)op, INPUTS; }
static int input(const OrtCustomOp *op, size_t index) {
    return (void)op, index == WEIGHTS ? ORT_UINT8 : ORT_FLOAT;
}
static int optional(const OrtCustomOp *op, size_t index) { return (void)op, index == BIAS; }

const OrtCustomOp MATMUL_OPERATOR = OPERATOR;
