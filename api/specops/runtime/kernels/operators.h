// What the operators share: reading inputs and attributes, ONNX Runtime's threads, their tables.

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

// A list of whole numbers, into `out` if they are at most `most`; `count` gets how many there are.
OrtStatus *read_list(const OrtKernelInfo *info, const char *name, int64_t most, int64_t *out, int64_t *count);

// Copies what a kernel keeps of its node, `size` bytes, for ONNX Runtime to hold.
OrtStatus *keep(const void *state, size_t size, void **out);

// The product of all dimensions but the last.
int64_t rows_of_tensor(const Tensor *tensor);

static inline int has_shape(const Tensor *tensor, size_t count, int64_t first, int64_t last) {
    return tensor->data && tensor->count == count && tensor->dimensions[0] == first &&
           tensor->dimensions[count - 1] == last;
}

// An output with the dimensions of `x`, but another last one; NULL if the graph does not use it.
OrtStatus *output_of(OrtKernelContext *context, size_t index, const Tensor *x, int64_t last, float **out);

// What is wrong with a norm of the last dimension of `x`; NULL: nothing. `residual` and `shift` may be
// missing.
const char *check_norm(const Tensor *x, const Tensor *weight, const Tensor *residual, const Tensor *shift);
const char *check_epsilon(float epsilon);

// The spans that are not empty: int64 [S, 3], one for a slot at most, of `tokens` tokens in all, into `out`
// of MAX_SLOTS. Returns what is wrong; NULL: nothing.
static const int64_t MAX_POSITIONS = 1 << 30;
const char *read_spans(const Tensor *spans, int64_t slots, int64_t tokens, Span *out, int64_t *count);

// What layers keep of each slot: int64 [5], address, slots, positions of a ring, floats of a position
// (`total` of them) and of the states. Returns what is wrong; NULL: nothing.
static const int64_t MAX_FLOATS = 1 << 24, MAX_STATES = (int64_t)1 << 34;  // of a position, a slot
const char *read_kept(const Tensor *numbers, int64_t total, RecurrentState *out);

// ONNX Runtime's threads during a call; the struct keeps the first error.
typedef struct {
    const OrtKernelContext *context;
    OrtStatus *status;
} Call;

Threads threads_of(Call *call);

// An operator: its function table, and what the functions of all operators read of it. Inputs and
// outputs have a letter each: float32 (f), uint8 (b), int64 (i); a graph may leave out capitals.
typedef struct {
    OrtCustomOp op;
    const char *name, *inputs, *outputs;
} Operator;

extern const Operator MATMUL_OPERATOR, GATHER_OPERATOR, NORM_OPERATOR, ATTENTION_OPERATOR,
    SHORT_CONV_OPERATOR, GATED_DELTA_OPERATOR, STATE_SPACE_OPERATOR;

// What each operator's file defines: making a kernel of a node, and running it.
typedef OrtStatus *Create(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **out);
typedef OrtStatus *Compute(void *kernel, OrtKernelContext *context);
Create create_matmul, create_gather, create_norm, create_attention, create_short_conv,
    create_gated_delta, create_state_space;
Compute compute_matmul, compute_gather, compute_norm, compute_attention, compute_short_conv,
    compute_gated_delta, compute_state_space;

#endif
