// What there is for one kind of processor, and the choice among them.

#ifndef SPECOPS_PROCESSOR_H
#define SPECOPS_PROCESSOR_H

#include "attention.h"
#include "matmul.h"
#include "sampling.h"

typedef struct {
    const char *name;
    const MatmulKernel *matmul;
    const AttentionKernel *attention;
    const SamplingKernel *sampling;
} Processor;

// The best that this processor can compute with, or what is forced. Never NULL.
const Processor *choose_processor(void);

#endif
