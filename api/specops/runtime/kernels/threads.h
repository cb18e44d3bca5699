// Passes work to ONNX Runtime's threads, so that the kernels do not depend on ONNX Runtime.

#ifndef SPECOPS_THREADS_H
#define SPECOPS_THREADS_H

#include <stddef.h>
#include <stdint.h>

// `run` calls work(argument, 0) to work(argument, count - 1), in any order and in parallel.
typedef struct {
    void (*run)(void *context, void (*work)(void *, size_t), size_t count, void *argument);
    void *context;
} Threads;

// Number of multiplications that take about as long as waking a thread; less work is not shared.
enum { FEW_PRODUCTS = 200000 };

// A `run` on the calling thread only.
static inline void run_in_turn(void *context, void (*work)(void *, size_t), size_t count, void *argument) {
    (void)context;
    for (size_t i = 0; i < count; i++) work(argument, i);
}

// Number of threads that share the work. It affects how work is divided, never the results.
extern _Atomic int64_t sharing;

#endif
