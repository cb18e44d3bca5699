// The functions that Python calls; they use the chosen kernels.

#include "sampling.h"
#include "processor.h"

#include <math.h>

int specops_filter(const float *logits, int64_t rows, int64_t count, const Filter *filter, float *probs) {
    const SamplingKernel *kernel = choose_processor()->sampling;
    int status = 0;
    for (int64_t row = 0; !status && row < rows; row++, logits += count, probs += count)
        status = kernel->filter(logits, count, filter, probs);
    return status;
}

// Each of the rows has a mask of `words` words.
void specops_mask(float *logits, int64_t rows, int64_t count, const uint32_t *masks, int64_t words) {
    const SamplingKernel *kernel = choose_processor()->sampling;
    for (int64_t row = 0; row < rows; row++, logits += count, masks += words)
        kernel->mask(logits, count, masks);
}

int64_t specops_draw(const float *weights, int64_t count, double uniform) {
    return choose_processor()->sampling->draw(weights, count, uniform);
}

int64_t specops_gumbel_argmax(const float *weights, int64_t count, uint64_t seed, uint64_t position) {
    return choose_processor()->sampling->gumbel_argmax(weights, count, seed, position);
}

double specops_top(const float *logits, int64_t count, int64_t top, int64_t *indices) {
    return choose_processor()->sampling->top(logits, count, top, indices);
}

static void adjust(float *logits, const Adjustment *by) {
    for (int64_t i = 0; i < by->num_biased; i++) logits[by->biased[i]] += by->biases[i];
    for (int64_t i = 0; i < by->num_known; i++) {
        const float count = by->counts[i];
        float value = logits[by->known[i]];
        if (count > 0 || by->in_prompt[i] > 0)
            value = value > 0 ? value / by->repetition : value * by->repetition;
        value -= by->frequency * count;
        value -= count > 0 ? by->presence : 0;
        logits[by->known[i]] = value;
    }
}

// Adjusts [rows, count] logits: row r follows `drafted`[0] to [r - 1], indices of known tokens, which count from
// there on. `ends` has the end of each row's part of `banned`: forbidden tokens. The counts are restored at the end.
void specops_adjust(float *logits, int64_t rows, int64_t count, const int32_t *banned, const int64_t *ends,
                    const int64_t *drafted, const Adjustment *by) {
    for (int64_t row = 0, next = 0; row < rows; row++, logits += count) {
        for (; next < ends[row]; next++) logits[banned[next]] = -INFINITY;
        adjust(logits, by);
        if (row < rows - 1) by->counts[drafted[row]] += 1;
    }
    for (int64_t row = 0; row < rows - 1; row++) by->counts[drafted[row]] -= 1;
}
