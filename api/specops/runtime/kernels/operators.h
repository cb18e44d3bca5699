// What the operators need of ONNX Runtime: tensors, and its threads.

#ifndef SPECOPS_OPERATORS_H
#define SPECOPS_OPERATORS_H

#include "onnxruntime.h"
#include "threads.h"

enum { MOST_DIMENSIONS = 8 };

extern const OrtApi *api;
extern const OrtCustomOp MATMUL_OPERATOR, NORM_OPERATOR, ATTENTION_OPERATOR;

typedef struct {
    void *data;  // NULL: an optional input that is not there
    int64_t dimensions[MOST_DIMENSIONS];
    size_t count;
} Tensor;

static inline OrtStatus *failure(const char *message) {
    return api->CreateStatus(ORT_FAIL, message);
}

// The input of that number. An optional one may be missing.
OrtStatus *read_input(const OrtKernelContext *context, size_t index, Tensor *tensor);

// All but the last dimension, multiplied.
int64_t rows_of_tensor(const Tensor *tensor);

static inline int has_shape(const Tensor *tensor, size_t count, int64_t first, int64_t last) {
    return tensor->data && tensor->count == count && tensor->dimensions[0] == first &&
           tensor->dimensions[count - 1] == last;
}

// An output as `x` with another last dimension; NULL where the graph does not have it.
OrtStatus *output_of(OrtKernelContext *context, size_t index, const Tensor *x, int64_t last,
                     float **out);

// Why there can be no such norm of the last dimension of `x`; NULL: there can. `residual` and `shift`
// may be missing.
const char *check_norm(const Tensor *x, const Tensor *weight, const Tensor *residual,
                       const Tensor *shift);
const char *check_epsilon(float epsilon);

// ONNX Runtime's threads, during a call; the first error is kept.
typedef struct {
    const OrtKernelContext *context;
    OrtStatus *status;
} Call;

Threads threads_of(Call *call);

// What all operators say of themselves.
const char *cpu_provider(const OrtCustomOp *op);
int float_output(const OrtCustomOp *op, size_t index);
int on_cpu(const OrtCustomOp *op, size_t index);
int first_version(const OrtCustomOp *op);
int last_version(const OrtCustomOp *op);

// An operator's table: the above, and what each file of an operator calls by these names.
#define OPERATOR                                                                          \
    {.version = ORT_VERSION,                                                              \
     .GetName = name,                                                                     \
     .GetExecutionProviderType = cpu_provider,                                            \
     .GetInputType = input,                                                               \
     .GetInputTypeCount = inputs,                                                         \
     .GetOutputType = float_output,                                                       \
     .GetOutputTypeCount = outputs,                                                       \
     .KernelDestroy = free,                                                               \
     .GetInputCharacteristic = optional,                                                  \
     .GetOutputCharacteristic = spare,                                                    \
     .GetInputMemoryType = on_cpu,                                                        \
     .CreateKernelV2 = create,                                                            \
     .KernelComputeV2 = compute,                                                          \
     .GetStartVersion = first_version,                                                    \
     .GetEndVersion = last_version}

#endif
