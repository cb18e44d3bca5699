// The kernels of each kind of processor, and the choice among them.

#ifndef SPECOPS_PROCESSOR_H
#define SPECOPS_PROCESSOR_H

#include "attention.h"
#include "matmul.h"
#include "quantize.h"
#include "sampling.h"
#include "short_conv.h"
#include "states.h"

// Features that kernels need; the processor must have them and the system must allow them.
enum {
    HAS_AVX2 = 1,       // with F16C
    HAS_AVX512 = 2,     // F, BW, DQ and VL
    HAS_VNNI512 = 4,    // AVX512-VNNI
    HAS_VNNI256 = 8,    // AVX-VNNI
    HAS_DOTPROD = 16,   // NEON's dot products, Armv8.2
    HAS_I8MM = 32,      // NEON's products of matrices of 8 bits, Armv8.6
};

typedef struct {
    const char *name;
    unsigned needs;
    const MatmulKernel *matmul;
    const AttentionKernel *attention;
    const SamplingKernel *sampling;
    const QuantizeKernel *quantize;
    ShortConvKernel *short_conv;
    const StatesKernel *states;
} Processor;

// Kernels that do not gain from instructions for bytes.
#define AVX512 &SAMPLING_AVX512, &QUANTIZE_AVX512, SHORT_CONV_AVX512, &STATES_AVX512
#define AVX2 &SAMPLING_AVX2, &QUANTIZE_AVX2, SHORT_CONV_AVX2, &STATES_AVX2
#define PLAIN &SAMPLING_PLAIN, &QUANTIZE_PLAIN, SHORT_CONV_PLAIN, &STATES_PLAIN

// The kernels for new sessions: the fastest for this processor, or the forced ones. Never NULL.
const Processor *choose_processor(void);

// Makes new sessions use these kernels; NULL: the fastest again. For tests.
void use_processor(const Processor *processor);

#endif
