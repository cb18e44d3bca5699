// The operator of norms that no product reads: norms of a part's output before the residual is added (Gemma 3, OLMo
// 2), and norms over all queries or keys of a token (OLMo 2); also of the logits' soft cap (Gemma 4).
//
//   specops.Norm(x, norm, residual, shift) -> activated [, sum]
//   x         float32 [..., K]
//   norm      float32 [K]; of a soft cap [1]
//   residual, shift  float32 as x and [K], optional; `shift` belongs to a layer norm
//   activated, sum  float32 [..., K]; `sum` is optional and only for norms: the sum of x and residual
//   attributes: input (1, 2 or 7), epsilon; see matmul.h

#include "matmul.h"
#include "operators.h"
#include "processor.h"

enum { X, WEIGHT, RESIDUAL, SHIFT, INPUTS };
enum { ACTIVATED, SUM };

typedef struct {
    const MatmulKernel *kernel;
    int64_t input;
    float epsilon;
} Kernel;

OrtStatus *create_norm(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info, void **out) {
    (void)op, (void)given;
    Kernel self = {.kernel = choose_processor()->matmul};
    const AttributeTo attributes[] = {{"input", &self.input, NULL}, {"epsilon", NULL, &self.epsilon}};
    OrtStatus *status = read_attributes(info, attributes, 2);
    if (status) return status;
    const char *wrong = check_epsilon(self.epsilon);
    if (self.input != NORM && self.input != LAYER_NORM && self.input != SOFT_CAP)
        wrong = "Norm: input is 1, 2 or 7";
    return wrong ? failure(wrong) : keep(&self, sizeof self, out);
}

OrtStatus *compute_norm(void *kernel, OrtKernelContext *context) {
    const Kernel *self = kernel;
    Tensor tensors[INPUTS];
    OrtStatus *status = read_inputs(context, INPUTS, tensors);
    if (status) return status;
    const Tensor *x = tensors + X;
    const int64_t depth = x->data ? x->dimensions[x->count - 1] : 0;
    if (depth < 1) return failure("Norm: the input is missing or its last dimension is 0");
    const char *wrong = NULL;
    if (self->input != SOFT_CAP)
        wrong = check_norm(x, tensors + WEIGHT, tensors + RESIDUAL, tensors + SHIFT);
    else if (!has_shape(tensors + WEIGHT, 1, 1, 1)) wrong = "Norm: a soft cap is one number";
    if (wrong) return failure(wrong);
    Input input = {.kind = (int)self->input, .x = x->data, .residual = tensors[RESIDUAL].data,
                   .weight = tensors[WEIGHT].data, .shift = tensors[SHIFT].data,
                   .epsilon = self->epsilon};
    status = output_of(context, ACTIVATED, x, depth, &input.activated);
    if (!status && self->input != SOFT_CAP) status = output_of(context, SUM, x, depth, &input.sum);
    if (status || !input.activated) return status;
    Call call = {context, NULL};
    activate_rows(self->kernel, &input, rows_of_tensor(x), depth, threads_of(&call));
    return call.status;
}
