// Makes a norm that no product reads an operator: what parts of a layer give, before it is added to the
// residual (Gemma 3, OLMo 2), and all queries or keys of a token together (OLMo 2).
//
//   specops.Norm(x, norm, residual, shift) -> made [, sum]
//   x         float32 [..., K]
//   norm      float32 [K]
//   residual, shift  float32 as x and [K], optional, the latter of a layer norm
//   made, sum  float32 [..., K], the latter optional: x and residual added
//   attributes: input (1 or 2), epsilon; see matmul.h

#include "matmul.h"
#include "operators.h"
#include "processor.h"

#include <stdlib.h>

enum { X, WEIGHT, RESIDUAL, SHIFT, INPUTS };
enum { MADE, SUM, OUTPUTS };

typedef struct {
    const MatmulKernel *kernel;
    int64_t input;
    float epsilon;
} Operator;

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                         void **out) {
    (void)op, (void)given;
    Operator self = {.kernel = choose_processor()->matmul};
    OrtStatus *status = api->KernelInfoGetAttribute_int64(info, "input", &self.input);
    if (!status) status = api->KernelInfoGetAttribute_float(info, "epsilon", &self.epsilon);
    if (status) return status;
    const char *wrong = check_epsilon(self.epsilon);
    if (self.input != NORM && self.input != LAYER_NORM) wrong = "Norm: input is 1 or 2";
    if (wrong) return failure(wrong);
    Operator *created = malloc(sizeof *created);
    if (!created) return failure("Norm: out of memory");
    *created = self;
    *out = created;
    return NULL;
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
    const Operator *self = kernel;
    Tensor tensors[INPUTS];
    OrtStatus *status = NULL;
    for (size_t i = 0; !status && i < INPUTS; i++) status = read_input(context, i, tensors + i);
    if (status) return status;
    const Tensor *x = tensors + X;
    const int64_t depth = x->data ? x->dimensions[x->count - 1] : 0;
    if (depth < 1) return failure("Norm: the input is missing or its last dimension is 0");
    const char *wrong = check_norm(x, tensors + WEIGHT, tensors + RESIDUAL, tensors + SHIFT);
    if (wrong) return failure(wrong);
    Input input = {.kind = (int)self->input, .x = x->data, .residual = tensors[RESIDUAL].data,
                   .weight = tensors[WEIGHT].data, .shift = tensors[SHIFT].data,
                   .epsilon = self->epsilon};
    status = output_of(context, MADE, x, depth, &input.made);
    if (!status) status = output_of(context, SUM, x, depth, &input.sum);
    if (status || !input.made) return status;
    Call call = {context, NULL};
    make_rows(self->kernel, &input, rows_of_tensor(x), depth, threads_of(&call));
    return call.status;
}

static const char *name(const OrtCustomOp *op) { return (void)op, "Norm"; }
static size_t inputs(const OrtCustomOp *op) { return (void)op, INPUTS; }
static int input(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, ORT_FLOAT; }
static int optional(const OrtCustomOp *op, size_t index) { return (void)op, index >= RESIDUAL; }
static size_t outputs(const OrtCustomOp *op) { return (void)op, OUTPUTS; }
static int spare(const OrtCustomOp *op, size_t index) { return (void)op, index == SUM; }

const OrtCustomOp NORM_OPERATOR = OPERATOR;
