// Makes the product an operator that ONNX Runtime can put into a graph.
//
//   specops.QuantizedMatMul(x float32 [..., K], weights uint8 [bytes], bias float32 [N], optional)
//       -> float32 [..., N]
//   attributes: N, K, bits, block_size, zero_points and bias (0 or 1), see matmul.h

#include "matmul.h"
#include "onnxruntime.h"

#include <stdlib.h>

enum { MOST_DIMENSIONS = 8 };

static const OrtApi *api;

typedef struct {
    const Kernel *kernel;
    Shape shape;
    int64_t bias;
} Operator;

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                         void **out) {
    (void)op, (void)given;
    const Kernel *kernel = choose_kernel();
    if (!kernel) return api->CreateStatus(ORT_FAIL, "no kernel for this processor");
    int64_t bits, zero_points, bias;
    Shape shape;
    OrtStatus *status = api->KernelInfoGetAttribute_int64(info, "N", &shape.columns);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "K", &shape.depth);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "block_size", &shape.block);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "bits", &bits);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "zero_points", &zero_points);
    if (!status) status = api->KernelInfoGetAttribute_int64(info, "bias", &bias);
    if (status) return status;
    if (shape.block % 32 || shape.block <= 0 || shape.block > MOST_BLOCK)
        return api->CreateStatus(ORT_FAIL, "blocks are multiples of 32, up to 256");
    if (bits != 4 && bits != 8) return api->CreateStatus(ORT_FAIL, "codes have 4 or 8 bits");
    if (shape.columns <= 0 || shape.depth <= 0)
        return api->CreateStatus(ORT_FAIL, "N and K are at least 1");
    shape.bits = (int)bits;
    shape.zero_points = (int)zero_points;
    Operator *created = malloc(sizeof *created);
    if (!created) return api->CreateStatus(ORT_FAIL, "out of memory");
    *created = (Operator){kernel, shape, bias};
    *out = created;
    return NULL;
}

static OrtStatus *data_of(const OrtKernelContext *context, size_t index, const void **data,
                          int64_t *dimensions, size_t *count) {
    const OrtValue *value;
    OrtShape *shape;
    OrtStatus *status = api->KernelContext_GetInput(context, index, &value);
    if (!status) status = api->GetTensorMutableData((OrtValue *)value, (void **)data);
    if (!status) status = api->GetTensorTypeAndShape(value, &shape);
    if (status) return status;
    status = api->GetDimensionsCount(shape, count);
    if (!status && (*count < 1 || *count > MOST_DIMENSIONS))
        status = api->CreateStatus(ORT_FAIL, "an input has no dimensions or too many");
    if (!status) status = api->GetDimensions(shape, dimensions, *count);
    api->ReleaseTensorTypeAndShapeInfo(shape);
    return status;
}

typedef struct {
    const OrtKernelContext *context;
    OrtStatus *status;  // what went wrong first
} Run;

static void run(void *context, void (*work)(void *, size_t), size_t count, void *argument) {
    Run *run = context;
    if (!run->status)
        run->status = api->KernelContext_ParallelFor(run->context, work, count, 0, argument);
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
    const Operator *self = kernel;
    const Shape *shape = &self->shape;
    const void *x, *weights, *bias = NULL;
    int64_t dimensions[MOST_DIMENSIONS], bytes[MOST_DIMENSIONS], columns[MOST_DIMENSIONS];
    size_t count, one, other = 1;
    OrtStatus *status = data_of(context, 1, &weights, bytes, &one);
    if (!status && self->bias)
        status = data_of(context, 2, &bias, columns, &other);
    if (!status) status = data_of(context, 0, &x, dimensions, &count);
    if (status) return status;
    if (dimensions[count - 1] != shape->depth)
        return api->CreateStatus(ORT_FAIL, "the last dimension of the input is not K");
    if (one != 1 || bytes[0] != tiles_of(shape) * tile_bytes(shape))
        return api->CreateStatus(ORT_FAIL, "the weights have another size than their shape");
    if (bias && (other != 1 || columns[0] != shape->columns))
        return api->CreateStatus(ORT_FAIL, "the bias has another size than N");
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < count; i++) rows *= dimensions[i];
    dimensions[count - 1] = shape->columns;
    OrtValue *output;
    void *y;
    status = api->KernelContext_GetOutput(context, 0, dimensions, count, &output);
    if (!status) status = api->GetTensorMutableData(output, &y);
    if (status || !rows) return status;
    Run threads = {context, NULL};
    if (multiply(self->kernel, shape, weights, bias, x, rows, y, (Threads){run, &threads}))
        return api->CreateStatus(ORT_FAIL, "out of memory");
    return threads.status;
}

static const char *name(const OrtCustomOp *op) { return (void)op, "QuantizedMatMul"; }
static const char *provider(const OrtCustomOp *op) { return (void)op, "CPUExecutionProvider"; }
static int input(const OrtCustomOp *op, size_t index) {
    return (void)op, index == 1 ? ORT_UINT8 : ORT_FLOAT;
}
static int output(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, ORT_FLOAT; }
static size_t inputs(const OrtCustomOp *op) { return (void)op, 3; }
static size_t outputs(const OrtCustomOp *op) { return (void)op, 1; }
static int optional(const OrtCustomOp *op, size_t index) { return (void)op, index == 2; }
static int required(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, 0; }
static int memory(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, 0; }
static int since(const OrtCustomOp *op) { return (void)op, 1; }
static int until(const OrtCustomOp *op) { return (void)op, INT32_MAX; }

static const OrtCustomOp OPERATOR = {
    .version = ORT_VERSION,
    .GetName = name,
    .GetExecutionProviderType = provider,
    .GetInputType = input,
    .GetInputTypeCount = inputs,
    .GetOutputType = output,
    .GetOutputTypeCount = outputs,
    .KernelDestroy = free,
    .GetInputCharacteristic = optional,
    .GetOutputCharacteristic = required,
    .GetInputMemoryType = memory,
    .CreateKernelV2 = create,
    .KernelComputeV2 = compute,
    .GetStartVersion = since,
    .GetEndVersion = until,
};

// Called for each session's options. The domain is made once and lives as long as the process.
OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
    static OrtDomain *domain;
    api = base->GetApi(ORT_VERSION);
    if (!api) return NULL;  // older than that: graphs with the operator will not load
    if (!domain) {
        OrtStatus *status = api->CreateCustomOpDomain("specops", &domain);
        if (!status) status = api->CustomOpDomain_Add(domain, &OPERATOR);
        if (status) return status;
    }
    return api->AddCustomOpDomain(options, domain);
}

// The kernel's name, for logs; NULL where this processor has none.
const char *specops_kernel(void) {
    const Kernel *kernel = choose_kernel();
    return kernel ? kernel->name : NULL;
}
