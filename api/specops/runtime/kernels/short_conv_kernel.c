// The short convolution for one kind of processor; setup.py compiles this file once for each, with another
// name for SHORT_CONV. A vector's lanes are channels, so no sum goes across lanes.

#include "short_conv.h"
#include "vectors.h"

// The inputs of sixteen channels.
INLINE Floats input_of(const ConvPass *pass, const int gated, int64_t row, int64_t channel) {
    if (!gated) return load(pass->x + row * pass->channels + channel);
    const float *b = pass->x + row * 3 * pass->channels + channel;
    return load(b) * load(b + 2 * pass->channels);
}

static inline float *kept_at(const ConvPass *pass, const Span *span, int64_t position) {
    return kept_inputs(&pass->kept, span->slot, position) + pass->first;
}

INLINE void convolve(const ConvPass *pass, const int gated, const Span *span, int64_t from, int64_t to) {
    const int64_t before = pass->kernel_size - 1, end = span->start + span->tokens;
    for (int64_t position = span->start; position < end; position++) {
        const int64_t row = span->first + position - span->start;
        const float *c = pass->x + (row * 3 + 1) * pass->channels;
        for (int64_t channel = from; channel < to; channel += LANES) {
            Floats sum = pass->bias ? load(pass->bias + channel) : (Floats){0};
            for (int64_t tap = 0; tap < pass->kernel_size; tap++) {
                const int64_t at = position - before + tap;
                if (at < 0) continue;
                const Floats input = at < span->start ? load(kept_at(pass, span, at) + channel)
                                                      : input_of(pass, gated, row - before + tap, channel);
                sum += load(pass->weight + tap * pass->channels + channel) * input;
            }
            store(pass->out + row * pass->channels + channel, gated ? load(c + channel) * sum : silu(sum));
        }
    }
    // Only after the last read: a long span overwrites the inputs that its first tokens read.
    const int64_t ring = pass->kept.ring, stay = span->tokens < ring ? span->start : end - ring;
    for (int64_t position = stay; pass->kept.memory && position < end; position++)
        for (int64_t channel = from; channel < to; channel += LANES)
            store(kept_at(pass, span, position) + channel,
                  input_of(pass, gated, span->first + position - span->start, channel));
}

void SHORT_CONV(const ConvPass *pass, const Span *span, int64_t from, int64_t to) {
    if (pass->gated) convolve(pass, 1, span, from, to);
    else convolve(pass, 0, span, from, to);
}
