// From logits to a token: the distribution that a request draws from, and drawing from it.

#ifndef SPECOPS_SAMPLING_H
#define SPECOPS_SAMPLING_H

#include <stdint.h>

typedef struct {
    float temperature;  // above 0
    int64_t top_k;      // 0: all
    double top_p;       // 1: all
    float min_p;        // 0: all
    float top_n_sigma;  // 0: all
} Filter;

// What there is for one kind of processor. `weights` [count] are not negative and not all zero;
// they need not sum to 1.
typedef struct {
    // Write the probabilities of [count] logits; those that the filter drops are 0. Returns 0, or
    // -1 where memory ran out.
    int (*filter)(const float *logits, int64_t count, const Filter *filter, float *probs);
    // Make the logits [count] -INFINITY whose bits in `mask` are 0; number i has bit i % 32 of word
    // i / 32.
    void (*mask)(float *logits, int64_t count, const uint32_t *mask);
    // The index at which the sum of weights passes `uniform` (0 to 1) of the whole.
    int64_t (*draw)(const float *weights, int64_t count, double uniform);
    // The index that wins a race: number i arrives after an exponential time of rate weights[i],
    // made of `seed`, `position` and i alone.
    int64_t (*race)(const float *weights, int64_t count, uint64_t seed, uint64_t position);
} SamplingKernel;

extern const SamplingKernel SAMPLING_AVX512, SAMPLING_AVX2, SAMPLING_PLAIN;

#endif
