// How computations are handed to ONNX Runtime's threads without knowing of ONNX Runtime.

#ifndef SPECOPS_THREADS_H
#define SPECOPS_THREADS_H

#include <stddef.h>

// Runs work(argument, 0) to work(argument, count - 1), in any order and side by side.
typedef struct {
    void (*run)(void *context, void (*work)(void *, size_t), size_t count, void *argument);
    void *context;
} Threads;

#endif
