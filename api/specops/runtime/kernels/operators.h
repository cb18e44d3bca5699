// Shared by all operators: reading inputs and attributes, ONNX Runtime's threads, their tables.

#ifndef SPECOPS_OPERATORS_H
#define SPECOPS_OPERATORS_H

#include "onnxruntime.h"
#include "spans.h"
#include "threads.h"

enum { MAX_DIMENSIONS = 8 };

extern const OrtApi *api;

typedef struct {
    void *data;  // NULL: a missing optional input
    int64_t dimensions[MAX_DIMENSIONS];
    size_t count;
} Tensor;

static inline OrtStatus *failure(const char *message) {
    return api->CreateStatus(ORT_FAIL, message);
}

OrtStatus *read_inputs(const OrtKernelContext *context, size_t count, Tensor *tensors);

// Attributes to read, `whole` or `real` numbers.
typedef struct {
    const char *name;
    int64_t *whole;
    float *real;
} AttributeTo;

OrtStatus *read_attributes(const OrtKernelInfo *info, const AttributeTo *attributes, size_t count);

// Reads a list of whole numbers into `out` if there are at most `most`; `count` gets their number.
OrtStatus *read_list(const OrtKernelInfo *info, const char *name, int64_t most, int64_t *out, int64_t *count);

// Copies a kernel's state, `size` bytes, for ONNX Runtime to hold.
OrtStatus *keep(const void *state, size_t size, void **out);

// The product of all dimensions but the last.
int64_t rows_of_tensor(const Tensor *tensor);

static inline int has_shape(const Tensor *tensor, size_t count, int64_t first, int64_t last) {
    return tensor->data && tensor->count == count && tensor->dimensions[0] == first &&
           tensor->dimensions[count - 1] == last;
}

// An output with the dimensions of `x` but another last one; NULL if the graph does not use it.
OrtStatus *output_of(OrtKernelContext *context, size_t index, const Tensor *x, int64_t last, float **out);

// Checks a norm of the last dimension of `x`; returns an error message, or NULL. `residual` and `shift`
// may be missing.
const char *check_norm(const Tensor *x, const Tensor *weight, const Tensor *residual, const Tensor *shift);
const char *check_epsilon(float epsilon);

// Reads the spans that are not empty, int64 [S, 3], at most one per slot, of `tokens` tokens in all, into
// `out` of MAX_SLOTS. Returns an error message, or NULL.
static const int64_t MAX_POSITIONS = 1 << 30;
const char *read_spans(const Tensor *spans, int64_t slots, int64_t tokens, Span *out, int64_t *count);

// Reads the layers' memory for all slots: int64 [5], address, slots, positions of a ring, floats of a position
// (`total` of them) and of the states. Returns an error message, or NULL.
static const int64_t MAX_FLOATS = 1 << 24, MAX_STATES = (int64_t)1 << 34;  // of a position, a slot
const char *read_kept(const Tensor *numbers, int64_t total, RecurrentState *out);

// ONNX Runtime's threads during a call; the struct keeps the first error.
typedef struct {
    const OrtKernelContext *context;
    OrtStatus *status;
} Call;

Threads threads_of(Call *call);

// An operator: its function table, and the description that the common functions read. Inputs and
// outputs have a letter each: float32 (f), uint8 (b), int64 (i); capitals are optional.
typedef struct {
    OrtCustomOp op;
    const char *name, *inputs, *outputs;
} Operator;

extern const Operator MATMUL_OPERATOR, GATHER_OPERATOR, NORM_OPERATOR, ATTENTION_OPERATOR,
    SHORT_CONV_OPERATOR, GATED_DELTA_OPERATOR, STATE_SPACE_OPERATOR;

// Each operator's file defines functions that create a kernel for a node and run it.
typedef OrtStatus *Create(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **out);
typedef OrtStatus *Compute(void *kernel, OrtKernelContext *context);
Create create_matmul, create_gather, create_norm, create_attention, create_short_conv,
    create_gated_delta, create_state_space;
Compute compute_matmul, compute_gather, compute_norm, compute_attention, compute_short_conv,
    compute_gated_delta, compute_state_space;

#endif
