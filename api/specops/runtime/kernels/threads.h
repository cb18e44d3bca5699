// Hands work to ONNX Runtime's threads; the kernels themselves do not know ONNX Runtime.

#ifndef SPECOPS_THREADS_H
#define SPECOPS_THREADS_H

#include <stddef.h>
#include <stdint.h>

// `run` calls work(argument, 0) to work(argument, count - 1), in any order and in parallel.
typedef struct {
    void (*run)(void *context, void (*work)(void *, size_t), size_t count, void *argument);
    void *context;
} Threads;

// Multiplications that take about as long as waking a thread: fewer are not shared.
enum { FEW_PRODUCTS = 200000 };

// A `run` on the calling thread alone.
static inline void run_in_turn(void *context, void (*work)(void *, size_t), size_t count, void *argument) {
    (void)context;
    for (size_t i = 0; i < count; i++) work(argument, i);
}

// Number of threads that share the work. It decides how work is cut, never what is computed.
extern _Atomic int64_t sharing;

#endif
