// Registers the operators of the domain "specops"; see matmul_operator.c, gather_operator.c,
// norm_operator.c, attention_operator.c, short_conv_operator.c and states_operator.c.

#include "operators.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const OrtApi *api;

static OrtStatus *read_input(const OrtKernelContext *context, size_t index, Tensor *tensor) {
    const OrtValue *value;
    const int64_t *dimensions;
    int type;
    tensor->data = NULL;
    tensor->count = 0;
    OrtStatus *status = api->KernelContext_GetInput(context, index, &value);
    if (status || !value) return status;
    status = api->GetTensorMutableData((OrtValue *)value, &tensor->data);
    if (!status)
        status = api->GetTensorElementTypeAndShapeDataReference(value, &type, &dimensions, &tensor->count);
    if (status) return status;
    if (tensor->count < 1 || tensor->count > MAX_DIMENSIONS)
        return failure("an input has no dimensions or too many");
    memcpy(tensor->dimensions, dimensions, tensor->count * sizeof *dimensions);
    static char nothing;
    if (!tensor->data) tensor->data = &nothing;  // a tensor without elements is not a missing one
    return NULL;
}

OrtStatus *read_inputs(const OrtKernelContext *context, size_t count, Tensor *tensors) {
    OrtStatus *status = NULL;
    for (size_t i = 0; !status && i < count; i++) status = read_input(context, i, tensors + i);
    return status;
}

OrtStatus *read_attributes(const OrtKernelInfo *info, const AttributeTo *attributes, size_t count) {
    OrtStatus *status = NULL;
    for (const AttributeTo *one = attributes; !status && one < attributes + count; one++)
        status = one->whole ? api->KernelInfoGetAttribute_int64(info, one->name, one->whole)
                            : api->KernelInfoGetAttribute_float(info, one->name, one->real);
    return status;
}

OrtStatus *read_list(const OrtKernelInfo *info, const char *name, int64_t most, int64_t *out,
                     int64_t *count) {
    size_t size = 0;
    OrtStatus *status = api->KernelInfoGetAttributeArray_int64(info, name, NULL, &size);
    *count = (int64_t)size;
    if (status || *count > most) return status;
    return api->KernelInfoGetAttributeArray_int64(info, name, out, &size);
}

OrtStatus *keep(const void *state, size_t size, void **out) {
    *out = malloc(size);
    if (!*out) return failure("out of memory");
    memcpy(*out, state, size);
    return NULL;
}

int64_t rows_of_tensor(const Tensor *tensor) {
    uint64_t rows = 1;  // unsigned: dimensions of a tensor without elements may overflow
    for (size_t i = 0; i + 1 < tensor->count; i++) rows *= (uint64_t)tensor->dimensions[i];
    return (int64_t)rows;
}

OrtStatus *output_of(OrtKernelContext *context, size_t index, const Tensor *x, int64_t last, float **out) {
    Tensor shape = *x;
    shape.dimensions[shape.count - 1] = last;
    OrtValue *value;
    OrtStatus *status = api->KernelContext_GetOutput(context, index, shape.dimensions, shape.count, &value);
    if (!status && value) status = api->GetTensorMutableData(value, (void **)out);
    return status;
}

const char *check_norm(const Tensor *x, const Tensor *weight, const Tensor *residual, const Tensor *shift) {
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

const char *read_spans(const Tensor *spans, int64_t slots, int64_t tokens, Span *out, int64_t *count) {
    enum { NUMBERS = 3 };
    static const char *const sum = "spans have another number of tokens than the input";
    if (!spans->data || spans->count != 2 || spans->dimensions[1] != NUMBERS) return "spans is [S, 3]";
    uint64_t seen[MAX_SLOTS / 64] = {0};
    int64_t first = *count = 0;
    const int64_t *numbers = spans->data;
    for (int64_t i = 0; i < spans->dimensions[0]; i++, numbers += NUMBERS) {
        const Span span = {.slot = numbers[0], .start = numbers[1], .tokens = numbers[2], .first = first};
        if (!span.tokens) continue;
        if (span.tokens < 0 || span.tokens > tokens - first) return sum;
        if (span.slot < 0 || span.slot >= slots) return "there is no such slot";
        if (seen[span.slot / 64] >> span.slot % 64 & 1) return "a slot has two spans in a pass";
        if (span.start < 0 || span.start > MAX_POSITIONS) return "a position is below 0 or too large";
        seen[span.slot / 64] |= (uint64_t)1 << span.slot % 64;
        out[(*count)++] = span;
        first += span.tokens;
    }
    return first == tokens ? NULL : sum;
}

const char *read_kept(const Tensor *tensor, int64_t total, RecurrentState *out) {
    enum { NUMBERS = 5, MAX_RING = 1 << 16 };
    if (!has_shape(tensor, 1, NUMBERS, NUMBERS)) return "kept_inputs has five numbers";
    const int64_t *numbers = tensor->data;
    if (!numbers[0] || numbers[0] % 4) return "the address of kept inputs is 0 or not aligned";
    if (numbers[1] < 0 || numbers[1] > MAX_SLOTS) return "at most 1024 slots keep inputs";
    if (numbers[2] < 1 || numbers[2] > MAX_RING) return "a slot keeps inputs of 1 to 65536 positions";
    if (numbers[3] != total) return "a position has another number of kept floats than the model's";
    if (numbers[4] < 0 || numbers[4] > MAX_STATES) return "a slot's states are too large or below 0";
    *out = (RecurrentState){(float *)(intptr_t)numbers[0], numbers[1], numbers[2], total, numbers[4]};
    return NULL;
}

static void run(void *context, void (*work)(void *, size_t), size_t count, void *argument) {
    Call *call = context;
    if (!call->status)  // one batch per piece, so that a thread that is done takes the next one
        call->status = api->KernelContext_ParallelFor(call->context, work, count, count, argument);
}

Threads threads_of(Call *call) { return (Threads){run, call}; }

static const Operator *of(const OrtCustomOp *op) { return (const Operator *)op; }
static int type_of(char letter) {
    return strchr("fF", letter) ? ORT_FLOAT : letter == 'b' ? ORT_UINT8 : ORT_INT64;
}

static const char *name(const OrtCustomOp *op) { return of(op)->name; }
static const char *provider(const OrtCustomOp *op) { return (void)op, "CPUExecutionProvider"; }
static int input(const OrtCustomOp *op, size_t i) { return type_of(of(op)->inputs[i]); }
static size_t inputs(const OrtCustomOp *op) { return strlen(of(op)->inputs); }
static int output(const OrtCustomOp *op, size_t i) { return type_of(of(op)->outputs[i]); }
static size_t outputs(const OrtCustomOp *op) { return strlen(of(op)->outputs); }
static int optional(const OrtCustomOp *op, size_t i) { return of(op)->inputs[i] < 'a'; }
static int spare(const OrtCustomOp *op, size_t i) { return of(op)->outputs[i] < 'a'; }
static int on_cpu(const OrtCustomOp *op, size_t i) { return (void)op, (void)i, 0; }
static int first_version(const OrtCustomOp *op) { return (void)op, 1; }
static int last_version(const OrtCustomOp *op) { return (void)op, INT32_MAX; }

#define TABLE(CREATE, COMPUTE)                                                                \
    {.version = ORT_VERSION, .GetName = name, .GetExecutionProviderType = provider,           \
     .GetInputType = input, .GetInputTypeCount = inputs, .GetOutputType = output,             \
     .GetOutputTypeCount = outputs, .KernelDestroy = free, .GetInputCharacteristic = optional, \
     .GetOutputCharacteristic = spare, .GetInputMemoryType = on_cpu, .CreateKernelV2 = CREATE, \
     .KernelComputeV2 = COMPUTE, .GetStartVersion = first_version, .GetEndVersion = last_version}

const Operator MATMUL_OPERATOR = {TABLE(create_matmul, compute_matmul), "QuantizedMatMul", "fbFFFF", "fFF"};
const Operator GATHER_OPERATOR = {TABLE(create_gather, compute_gather), "QuantizedGather", "ib", "f"};
const Operator NORM_OPERATOR = {TABLE(create_norm, compute_norm), "Norm", "ffFF", "fF"};
const Operator ATTENTION_OPERATOR = {TABLE(create_attention, compute_attention), "Attention",
                                     "fFFiiiFFFFFFF", "f"};
const Operator SHORT_CONV_OPERATOR = {TABLE(create_short_conv, compute_short_conv), "ShortConv", "ffFII",
                                      "f"};
const Operator GATED_DELTA_OPERATOR = {TABLE(create_gated_delta, compute_gated_delta), "GatedDelta",
                                       "fffffffIII", "f"};
const Operator STATE_SPACE_OPERATOR = {TABLE(create_state_space, compute_state_space), "StateSpace",
                                       "ffffffIII", "f"};

// ONNX Runtime calls it for each session's options. The domain lives as long as the process.
OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
    static const Operator *const ALL[] = {
        &MATMUL_OPERATOR, &GATHER_OPERATOR, &NORM_OPERATOR, &ATTENTION_OPERATOR, &SHORT_CONV_OPERATOR,
        &GATED_DELTA_OPERATOR, &STATE_SPACE_OPERATOR};
    static OrtDomain *domain;
    api = base->GetApi(ORT_VERSION);
    if (!api) return NULL;  // an older ONNX Runtime, which will not load graphs with the operators
    if (!domain) {
        OrtDomain *made;
        OrtStatus *status = api->CreateCustomOpDomain("specops", &made);
        for (size_t i = 0; !status && i < sizeof ALL / sizeof *ALL; i++)
            status = api->CustomOpDomain_Add(made, &ALL[i]->op);
        if (status) return status;
        domain = made;
    }
    return api->AddCustomOpDomain(options, domain);
}
