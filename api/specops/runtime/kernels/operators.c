// Registers the operators of the domain "specops"; see matmul_operator.c, norm_operator.c and
// attention_operator.c.

#include "operators.h"

#include <math.h>

const OrtApi *api;

OrtStatus *read_input(const OrtKernelContext *context, size_t index, Tensor *tensor) {
    const OrtValue *value;
    OrtShape *shape;
    tensor->data = NULL;
    tensor->count = 0;
    OrtStatus *status = api->KernelContext_GetInput(context, index, &value);
    if (status || !value) return status;
    status = api->GetTensorMutableData((OrtValue *)value, &tensor->data);
    if (!status) status = api->GetTensorTypeAndShape(value, &shape);
    if (status) return status;
    status = api->GetDimensionsCount(shape, &tensor->count);
    if (!status && (tensor->count < 1 || tensor->count > MOST_DIMENSIONS))
        status = failure("an input has no dimensions or too many");
    if (!status) status = api->GetDimensions(shape, tensor->dimensions, tensor->count);
    api->ReleaseTensorTypeAndShapeInfo(shape);
    static char nothing;
    if (!tensor->data) tensor->data = &nothing;  // a tensor without elements is there nonetheless
    return status;
}

int64_t rows_of_tensor(const Tensor *tensor) {
    uint64_t rows = 1;  // of a tensor without elements there may be more than that: they wrap
    for (size_t i = 0; i + 1 < tensor->count; i++) rows *= (uint64_t)tensor->dimensions[i];
    return (int64_t)rows;
}

OrtStatus *output_of(OrtKernelContext *context, size_t index, const Tensor *x, int64_t last,
                     float **out) {
    Tensor shape = *x;
    shape.dimensions[shape.count - 1] = last;
    OrtValue *value;
    OrtStatus *status =
        api->KernelContext_GetOutput(context, index, shape.dimensions, shape.count, &value);
    if (!status && value) status = api->GetTensorMutableData(value, (void **)out);
    return status;
}

const char *check_norm(const Tensor *x, const Tensor *weight, const Tensor *residual,
                       const Tensor *shift) {
    const int64_t size = x->dimensions[x->count - 1];
    if (!has_shape(weight, 1, size, size))
        return "a norm is missing or has another size than the last dimension of its input";
    if (shift->data && !has_shape(shift, 1, size, size))
        return "a norm's shift has another size than the last dimension of its input";
    if (residual->data && (residual->dimensions[residual->count - 1] != size ||
                           rows_of_tensor(residual) != rows_of_tensor(x)))
        return "a norm's residual has another shape than its input";
    return NULL;
}

const char *check_epsilon(float epsilon) {
    return epsilon >= 0 && !isinf(epsilon) ? NULL : "epsilon is below 0 or not finite";
}

static void run(void *context, void (*work)(void *, size_t), size_t count, void *argument) {
    Call *call = context;
    if (!call->status)  // as many batches as there is work: a thread that is done takes the next
        call->status = api->KernelContext_ParallelFor(call->context, work, count, count, argument);
}

Threads threads_of(Call *call) { return (Threads){run, call}; }

const char *cpu_provider(const OrtCustomOp *op) { return (void)op, "CPUExecutionProvider"; }
int float_output(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, ORT_FLOAT; }
int on_cpu(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, 0; }
int first_version(const OrtCustomOp *op) { return (void)op, 1; }
int last_version(const OrtCustomOp *op) { return (void)op, INT32_MAX; }

// Called for each session's options. The domain is made once and lives as long as the process.
OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
    static OrtDomain *domain;
    api = base->GetApi(ORT_VERSION);
    if (!api) return NULL;  // older than that: graphs with the operators will not load
    if (!domain) {
        OrtDomain *made;
        OrtStatus *status = api->CreateCustomOpDomain("specops", &made);
        if (!status) status = api->CustomOpDomain_Add(made, &MATMUL_OPERATOR);
        if (!status) status = api->CustomOpDomain_Add(made, &NORM_OPERATOR);
        if (!status) status = api->CustomOpDomain_Add(made, &ATTENTION_OPERATOR);
        if (status) return status;
        domain = made;
    }
    return api->AddCustomOpDomain(options, domain);
}
