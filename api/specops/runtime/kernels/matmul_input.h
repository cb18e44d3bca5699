// The input of a product: unchanged, normalized, activated or gated, then rounded to codes of 8 bits. In
// every decoder, norms and gates precede a product. Computed here, they need no memory and no separate
// operator, whose call costs a small model more than its arithmetic. A norm that no product reads is an
// operator (norm_operator.c), which uses this file, too.
//
// Each row is computed separately: sums run over lanes of 16 numbers, in order.

#ifndef SPECOPS_MATMUL_INPUT_H
#define SPECOPS_MATMUL_INPUT_H

#include "matmul.h"
#include "vectors.h"

// Number of values computed at a time.
enum { CHUNK = 4 * MAX_BLOCK };

INLINE Floats summed(const Input *input, int64_t at, int64_t count) {
    const Floats x = some(input->x + at, count);
    return input->residual ? x + some(input->residual + at, count) : x;
}

// A norm subtracts the mean from a row and multiplies it by the scale.
typedef struct {
    float mean, scale;
} Moments;

// The first `count` numbers of a vector; the others become 0.
INLINE Floats first_of(Floats values, int64_t count) {
    if (count >= LANES) return values;
    float held[LANES];
    store(held, values);
    return load_first(held, (int)count);
}

// The moments of a row; writes numbers `from` to `to` of the sum of x and residual.
INLINE Moments moments_of(const int kind, const Input *input, int64_t row, int64_t depth, int64_t from,
                          int64_t to) {
    Floats sums = {0}, squares = {0};
    float mean = 0;
    for (int64_t k = 0; k < depth; k += LANES) {
        const int64_t at = row * depth + k, count = depth - k;
        const Floats x = summed(input, at, count);
        if (input->sum && k >= from && k < to)
            store_first(input->sum + at, count < LANES ? (int)count : LANES, x);
        if (kind == NORM) squares += x * x;
        else sums += x;
    }
    if (kind == LAYER_NORM) {
        mean = total(sums) / (float)depth;
        for (int64_t k = 0; k < depth; k += LANES) {
            const int64_t count = depth - k;
            const Floats x = first_of(summed(input, row * depth + k, count) - mean, count);
            squares += x * x;
        }
    }
    return (Moments){mean, inverse_rms(squares, depth, input->epsilon)};
}

static Moments moments(const Input *input, int64_t row, int64_t depth, int64_t from, int64_t to) {
    if (input->kind == NORM) return moments_of(NORM, input, row, depth, from, to);
    if (input->kind == LAYER_NORM) return moments_of(LAYER_NORM, input, row, depth, from, to);
    return (Moments){0, 1};
}

// Up to 16 numbers of a row, from number k on.
INLINE Floats activated_of(const int kind, const Input *input, int64_t row, int64_t depth, int64_t k,
                           int64_t count, Moments by) {
    if (kind == NORM)
        return summed(input, row * depth + k, count) * by.scale * some(input->weight + k, count);
    if (kind == LAYER_NORM) {
        const Floats x = (summed(input, row * depth + k, count) - by.mean) * by.scale;
        const Floats y = x * some(input->weight + k, count);
        return input->shift ? y + some(input->shift + k, count) : y;
    }
    if (kind == GELU) return gelu(some(input->x + row * depth + k, count));
    if (kind == OUTPUT_GATE)
        return some(input->x + row * depth + k, count) * sigmoid(some(input->residual + row * depth + k, count));
    if (kind == SOFT_CAP) {
        const Floats cap = splat(input->weight[0]);
        return cap * hyperbolic_tangent(some(input->x + row * depth + k, count) / cap);
    }
    const float *gate = input->x + 2 * row * depth + k;
    const Floats x = some(gate, count);
    return (kind == SILU_GATE ? silu(x) : gelu(x)) * some(gate + depth, count);
}

INLINE void activate_of(const int kind, const Input *input, int64_t row, int64_t depth, int64_t start,
                        int64_t size, Moments by, float *activated) {
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES)
        store(activated + k, activated_of(kind, input, row, depth, start + k, LANES, by));
    if (k < size)
        store_first(activated + k, (int)(size - k),
                    activated_of(kind, input, row, depth, start + k, size - k, by));
}

// Computes numbers `start` to `start + size` of a row; not for AS_IT_IS.
static void activate(const Input *input, int64_t row, int64_t depth, int64_t start, int64_t size,
                     Moments by, float *activated) {
    switch (input->kind) {
        case NORM: activate_of(NORM, input, row, depth, start, size, by, activated); break;
        case LAYER_NORM: activate_of(LAYER_NORM, input, row, depth, start, size, by, activated); break;
        case GELU: activate_of(GELU, input, row, depth, start, size, by, activated); break;
        case OUTPUT_GATE: activate_of(OUTPUT_GATE, input, row, depth, start, size, by, activated); break;
        case SOFT_CAP: activate_of(SOFT_CAP, input, row, depth, start, size, by, activated); break;
        case SILU_GATE: activate_of(SILU_GATE, input, row, depth, start, size, by, activated); break;
        default: activate_of(GELU_GATE, input, row, depth, start, size, by, activated);
    }
}

// See MatmulKernel.
static void activate_row(const Input *input, int64_t row, int64_t depth) {
    activate(input, row, depth, 0, depth, moments(input, row, depth, 0, depth),
             input->activated + row * depth);
}

// A block's scale, and the sums of its codes: of all, and of the first 16.
typedef struct {
    float scale;
    Ints all, first;
} Rounded;

// Rounds a block of `size` numbers, padded with zeros, to codes, four of them every `stride` bytes.
INLINE Rounded round_block(const float *x, int64_t size, int64_t block, int8_t *codes, int64_t stride) {
    float padded[MAX_BLOCK];
    if (size < block) {
        memcpy(padded, x, size * sizeof(float));
        for (int64_t k = size; k < block; k++) padded[k] = 0;
        x = padded;
    }
    Floats most = {0}, not_finite = {0};
    for (int64_t k = 0; k < block; k += LANES) {
        most = larger(magnitude(load(x + k)), most);
        // 0, or NaN if a number is infinite or NaN, which must reach the result.
        not_finite += load(x + k) * 0.0f;
    }
    const float highest = largest(most) + total(not_finite);
    Rounded rounded = {highest / 127, {0}, {0}};
    if (!(highest > TINY)) {  // the scale is 0 or NaN
        for (int64_t k = 0; k < block; k += 4, codes += stride) memset(codes, 0, 4);
        return rounded;
    }
    for (int64_t k = 0; k < block; k += LANES) {
        int8_t sixteen[LANES];
        rounded.all += to_codes(sixteen, load(x + k) * (127 / highest));
        if (!k) rounded.first = rounded.all;
        for (int word = 0; word < LANES; word += 4, codes += stride)
            memcpy(codes, sixteen + word, 4);
    }
    return rounded;
}

// Writes the terms of a block of a row, in a group of `count` rows.
INLINE void put_terms(const Terms *terms, Term *at, int count, const Rounded *block) {
    const int32_t all = total_of(block->all), first = terms->halves == 2 ? total_of(block->first) : all;
    for (int half = 0; half < terms->halves; half++) {
        const int32_t sum = half ? all - first : first;
        if (terms->kind == SCALED) at[half * count].scaled = block->scale * (float)sum;
        else if (terms->kind == SUMS && terms->halves == 2) at[half * count].scaled = (float)sum;
        else at[half * count].whole = terms->kind == SUMS ? sum : -terms->middle * sum;
    }
}

// See MatmulKernel.
static void quantize_row(const Input *input, const Activations *to, int64_t group, int place, int count,
                         int64_t start, int64_t stop) {
    const int64_t depth = to->depth, block = to->block, row = group + place;
    const int64_t word = 4 * to->bytes, stride = word * count;
    int8_t *codes = to->codes + group * to->pitch + place * word;
    float *scales = to->scales + group * to->blocks + place;
    const int64_t end = stop * block < depth ? stop * block : depth;
    const Moments by = moments(input, row, depth, start * block, end);
    const int64_t most = input->kind == AS_IT_IS ? depth : CHUNK / block * block;
    float chunk[CHUNK];
    for (int64_t first = start * block, number = start; first < end; first += most) {
        const int64_t size = end - first < most ? end - first : most;
        const float *x = input->x + row * depth + first;
        if (input->kind != AS_IT_IS) {
            float *activated = input->activated ? input->activated + row * depth + first : chunk;
            activate(input, row, depth, first, size, by, activated);
            x = activated;
        }
        for (int64_t k = 0; k < size; k += block, number++) {
            const Rounded rounded = round_block(x + k, size - k < block ? size - k : block, block,
                                                codes + (first + k) / 4 * stride, stride);
            scales[number * count] = rounded.scale;
            for (const Terms *t = to->terms; t < to->terms + to->kinds; t++)
                put_terms(t, t->at + (group * to->blocks + number * count) * t->halves + place, count,
                          &rounded);
        }
    }
}

#endif
