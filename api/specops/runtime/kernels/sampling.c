// The functions that Python calls; they use the chosen kernels.

#include "sampling.h"
#include "processor.h"

int specops_filter(const float *logits, int64_t rows, int64_t count, const Filter *filter,
                   float *probs) {
    const SamplingKernel *kernel = choose_processor()->sampling;
    for (int64_t row = 0; row < rows; row++, logits += count, probs += count)
        if (kernel->filter(logits, count, filter, probs)) return -1;
    return 0;
}

// Each of the rows has a mask of `words` words.
void specops_mask(float *logits, int64_t rows, int64_t count, const uint32_t *masks,
                  int64_t words) {
    const SamplingKernel *kernel = choose_processor()->sampling;
    for (int64_t row = 0; row < rows; row++, logits += count, masks += words)
        kernel->mask(logits, count, masks);
}

int64_t specops_draw(const float *weights, int64_t count, double uniform) {
    return choose_processor()->sampling->draw(weights, count, uniform);
}

int64_t specops_race(const float *weights, int64_t count, uint64_t seed, uint64_t position) {
    return choose_processor()->sampling->race(weights, count, seed, position);
}
