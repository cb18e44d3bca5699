// From logits to a token: makes the distribution of a request and draws from it.

#ifndef SPECOPS_SAMPLING_H
#define SPECOPS_SAMPLING_H

#include <stdint.h>

typedef struct {
    float temperature;  // above 0
    int64_t top_k;      // 0: all
    double top_p;       // 1: all
    float min_p;        // 0: all
} Filter;

// Penalties and biases for the logits of an answer's next token. Tokens are below the number of logits. `counts` is
// how often each of the `known` tokens occurs in the answer, `in_prompt` whether it occurs in the prompt.
typedef struct {
    float repetition, frequency, presence;  // 1, 0, 0: no penalty
    int64_t num_biased;
    const int32_t *biased;
    const float *biases;
    int64_t num_known;
    const int32_t *known;
    float *counts;
    const float *in_prompt;
} Adjustment;

// The kernel for one kind of processor. `weights` [count] are not negative and not all zero; they need not sum to 1.
typedef struct {
    // Writes the probabilities of [count] logits; 0 for those that the filter drops. Returns 0, -1 if
    // there is no memory, or -2 if a logit is NaN or INFINITY, or all are -INFINITY.
    int (*filter)(const float *logits, int64_t count, const Filter *filter, float *probs);
    // Sets logits [count] to -INFINITY where the bit in `mask` is 0; logit i has bit i % 32 of word i / 32.
    void (*mask)(float *logits, int64_t count, const uint32_t *mask);
    // The first index at which the sum of weights exceeds `uniform` (0 to 1) of the whole sum.
    int64_t (*draw)(const float *weights, int64_t count, double uniform);
    // The winner of the Gumbel-max trick, as an exponential race: index i arrives after a time with rate
    // weights[i], which depends only on `seed`, `position`, i and the weight.
    int64_t (*gumbel_argmax)(const float *weights, int64_t count, uint64_t seed, uint64_t position);
    // The logarithm of the sum of e^logit; NaN if a logit is NaN or all are -INFINITY. Writes the indices of
    // the `top` largest logits in descending order, lower indices first among equals; `top` <= `count`.
    double (*top)(const float *logits, int64_t count, int64_t top, int64_t *indices);
} SamplingKernel;

extern const SamplingKernel SAMPLING_AVX512, SAMPLING_AVX2, SAMPLING_PLAIN;

#endif
