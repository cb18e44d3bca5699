// The kernels of each kind of processor, and the choice among them.

#ifndef SPECOPS_PROCESSOR_H
#define SPECOPS_PROCESSOR_H

#include "attention.h"
#include "matmul.h"
#include "sampling.h"

// Features that kernels need: the processor has them and the system allows them.
enum {
    HAS_AVX2 = 1,       // with F16C
    HAS_AVX512 = 2,     // F, BW, DQ and VL
    HAS_VNNI512 = 4,    // AVX512-VNNI
    HAS_VNNI256 = 8,    // AVX-VNNI
    HAS_DOTPROD = 16,   // NEON's dot products, Armv8.2
    HAS_I8MM = 32,      // NEON's products of matrices of 8 bits, Armv8.6
    HAS_AMX = 64,       // AMX's matrices of 8 bits; they have passed a test
};

typedef struct {
    const char *name;
    unsigned needs;
    const MatmulKernel *matmul;
    const AttentionKernel *attention;
    const SamplingKernel *sampling;
} Processor;

// The kernels for new sessions: the fastest for this processor, or the forced ones. Never NULL.
const Processor *choose_processor(void);

// Makes new sessions use these kernels; NULL: the fastest again. For tests.
void use_processor(const Processor *processor);

#endif
