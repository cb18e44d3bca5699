// The gated short convolution (LFM2), over the spans of a pass.
//
// A token has three vectors, B, C and x. Each channel's inputs B * x of the last `taps` positions, times a
// weight each, are added up from the oldest to the newest; the sum times C is the output. So a result
// depends neither on other slots' tokens, nor on the chunks of a prompt, nor on threads.
//
// The inputs of a slot's last `ring` positions stay in memory, by position, as the KV cache keeps keys:
// those of rejected tokens are overwritten later. A span reads the ones before its first token. Nothing in
// the memory needs to be initialized: position 0 reads none.
// Liquid AI, "LFM2 Technical Report" (arXiv 2511.23404).

#ifndef SPECOPS_SHORT_CONV_H
#define SPECOPS_SHORT_CONV_H

#include "spans.h"
#include "threads.h"

enum { MOST_TAPS = 8 };

typedef struct {
    int64_t channels, taps;  // channels are a multiple of 16
    const float *x;          // [tokens][3 * channels]
    const float *weight;     // [taps][channels]
    float *out;              // [tokens][channels]
    const Span *spans;       // NULL: sequences of `tokens` tokens from position 0 on
    int64_t count, tokens;
    float *kept;  // [slots][ring][total], of which this layer's are from `first` on; NULL: nothing stays
    int64_t ring, total, first;
} ConvPass;

// The kernel for one kind of processor: the channels `from` up to below `to` of a span.
typedef void ShortConvKernel(const ConvPass *pass, const Span *span, int64_t from, int64_t to);
extern ShortConvKernel SHORT_CONV_AVX512, SHORT_CONV_AVX2, SHORT_CONV_PLAIN;

#endif
