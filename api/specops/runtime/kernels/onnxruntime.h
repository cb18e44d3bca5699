// The part of ONNX Runtime's C interface that custom operators need; the Python package has no header.
// Both structs are tables of functions. New versions only append to them; the indices here are those of
// version 24 (onnxruntime 1.24), the first with all functions that are used here.
// https://onnxruntime.ai/docs/reference/operators/add-custom-op.html

#ifndef SPECOPS_ONNXRUNTIME_H
#define SPECOPS_ONNXRUNTIME_H

#include <stddef.h>
#include <stdint.h>

enum { ORT_VERSION = 24, ORT_FAIL = 1, ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_INT64 = 7 };

typedef struct OrtStatus OrtStatus;  // NULL: success
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtValue OrtValue;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtDomain OrtDomain;
typedef struct OrtCustomOp OrtCustomOp;
typedef struct OrtApi OrtApi;

#define UNUSED(FIRST, LAST) void (*unused_##FIRST[(LAST) - (FIRST) + 1])(void)

struct OrtApi {
    OrtStatus *(*CreateStatus)(int code, const char *message);  // 0
    UNUSED(1, 25);
    OrtStatus *(*CreateCustomOpDomain)(const char *name, OrtDomain **out);  // 26
    OrtStatus *(*CustomOpDomain_Add)(OrtDomain *domain, const OrtCustomOp *op);
    OrtStatus *(*AddCustomOpDomain)(OrtSessionOptions *options, OrtDomain *domain);
    UNUSED(29, 50);
    OrtStatus *(*GetTensorMutableData)(OrtValue *value, void **out);  // 51
    UNUSED(52, 84);
    OrtStatus *(*KernelInfoGetAttribute_float)(const OrtKernelInfo *info, const char *name,
                                               float *out);  // 85
    OrtStatus *(*KernelInfoGetAttribute_int64)(const OrtKernelInfo *info, const char *name,
                                               int64_t *out);  // 86
    UNUSED(87, 89);
    OrtStatus *(*KernelContext_GetInput)(const OrtKernelContext *context, size_t index,
                                         const OrtValue **out);  // 90
    OrtStatus *(*KernelContext_GetOutput)(OrtKernelContext *context, size_t index,
                                          const int64_t *shape, size_t count, OrtValue **out);
    UNUSED(92, 162);
    OrtStatus *(*KernelInfoGetAttributeArray_int64)(const OrtKernelInfo *info, const char *name,
                                                    int64_t *out, size_t *size);  // 163
    UNUSED(164, 273);
    OrtStatus *(*KernelContext_ParallelFor)(const OrtKernelContext *context,
                                            void (*work)(void *, size_t), size_t count,
                                            size_t batches, void *argument);  // 274
    UNUSED(275, 413);
    // Other functions allocate and free a description of the shape, which takes a third of a microsecond.
    OrtStatus *(*GetTensorElementTypeAndShapeDataReference)(const OrtValue *value, int *type,
                                                            const int64_t **dimensions, size_t *count);  // 414
};

#undef UNUSED

typedef struct {
    const OrtApi *(*GetApi)(uint32_t version);  // NULL: ONNX Runtime is older
    const char *(*GetVersionString)(void);
} OrtApiBase;

struct OrtCustomOp {
    uint32_t version;
    void *(*CreateKernel)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *);
    const char *(*GetName)(const OrtCustomOp *);
    const char *(*GetExecutionProviderType)(const OrtCustomOp *);
    int (*GetInputType)(const OrtCustomOp *, size_t index);
    size_t (*GetInputTypeCount)(const OrtCustomOp *);
    int (*GetOutputType)(const OrtCustomOp *, size_t index);
    size_t (*GetOutputTypeCount)(const OrtCustomOp *);
    void (*KernelCompute)(void *kernel, OrtKernelContext *);
    void (*KernelDestroy)(void *kernel);
    int (*GetInputCharacteristic)(const OrtCustomOp *, size_t index);
    int (*GetOutputCharacteristic)(const OrtCustomOp *, size_t index);
    int (*GetInputMemoryType)(const OrtCustomOp *, size_t index);
    int (*GetVariadicInputMinArity)(const OrtCustomOp *);
    int (*GetVariadicInputHomogeneity)(const OrtCustomOp *);
    int (*GetVariadicOutputMinArity)(const OrtCustomOp *);
    int (*GetVariadicOutputHomogeneity)(const OrtCustomOp *);
    OrtStatus *(*CreateKernelV2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **kernel);
    OrtStatus *(*KernelComputeV2)(void *kernel, OrtKernelContext *);
    OrtStatus *(*InferOutputShape)(const OrtCustomOp *, void *);
    int (*GetStartVersion)(const OrtCustomOp *);
    int (*GetEndVersion)(const OrtCustomOp *);
    size_t (*GetMayInplace)(int **inputs, int **outputs);
    void (*ReleaseMayInplace)(int *inputs, int *outputs);
    size_t (*GetAliasMap)(int **inputs, int **outputs);
    void (*ReleaseAliasMap)(int *inputs, int *outputs);
};

#endif
