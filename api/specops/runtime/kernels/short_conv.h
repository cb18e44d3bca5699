// The short convolution, over the spans of a pass: a gated layer (LFM2), or the input of a layer with a
// recurrent state (states.h).
//
// Each channel's inputs of the last `kernel_size` positions, times a weight each, are added to the bias
// from the oldest to the newest. So a result depends neither on other slots' tokens, nor on the chunks of a
// prompt, nor on threads. With gates a token has three vectors, B, C and x: the inputs are B * x, the output
// is the sum times C. Without gates the output is SiLU of the sum.
//
// The inputs of a slot's last positions are kept (spans.h). A span reads those before its first token. The memory
// needs no initialization: position 0 reads none. Liquid AI, "LFM2 Technical Report" (arXiv 2511.23404).

#ifndef SPECOPS_SHORT_CONV_H
#define SPECOPS_SHORT_CONV_H

#include "spans.h"
#include "threads.h"

enum { MAX_KERNEL_SIZE = 8 };

typedef struct {
    int64_t channels, kernel_size;  // channels are a multiple of 16
    int gated;
    const float *x;             // [tokens][3 * channels] with gates, else [tokens][channels]
    const float *weight, *bias; // [kernel_size][channels], [channels]; no bias: NULL
    float *out;                 // [tokens][channels]
    const Span *spans;          // NULL: sequences of `tokens` tokens from position 0 on
    int64_t count, tokens;
    RecurrentState kept;
    int64_t first;  // this layer's offset in a row of kept inputs
} ConvPass;

// The kernel for one kind of processor: the channels `from` up to below `to` of a span.
typedef void ShortConvKernel(const ConvPass *pass, const Span *span, int64_t from, int64_t to);
extern ShortConvKernel SHORT_CONV_AVX512, SHORT_CONV_AVX2, SHORT_CONV_PLAIN;

#endif
