// What all kernels of products share: adding a block's products to the totals of rows. It is written
// with the compiler's vectors, so each rounding is the same by construction.

#ifndef SPECOPS_MATMUL_KERNEL_H
#define SPECOPS_MATMUL_KERNEL_H

#include "matmul_input.h"

typedef uint8_t PointsAt __attribute__((vector_size(16), aligned(1), may_alias));

// Adds a block to the totals. `dots` are each row's sums of products, with the tile's columns in lanes.
// `lines` begin behind the block's codes. Returns the address of the next block.
INLINE const uint8_t *add_block(const Shape *shape, const int count, int64_t block,
                                const Ints *dots, const uint8_t *lines, Operands *at,
                                Floats *totals) {
    const int fractions = shape->zero_points == FRACTIONS, half = shape->half_scales;
    // Without offsets two blocks share a line, which stands before the second block's codes.
    const int shared = half && !fractions && block % 2;
    const uint8_t *line = shared ? lines - code_bytes(shape) - LINE / 2 : lines;
    const Floats scale = half ? from_halves((const uint16_t *)line) : load((const float *)line);
    // A loop for each kind: in a single one the compiler keeps the sums of 8 rows in memory, and 8 tokens
    // of the demo pair take 1.6 times as long. The middle of the range, as one number for all columns, is
    // cheaper to multiply: in one loop with zero points that are codes, 4 rows take 1.04 of the time (AVX2).
    if (fractions) {
        Floats zero;
        if (half) {
            const Floats offset = from_halves((const uint16_t *)(lines + LINE / 2));
            zero = choose(scale == 0.0f, (Floats){0}, -offset / scale);
        } else {
            lines += LINE;
            zero = load((const float *)lines);
        }
        for (int row = 0; row < count; row++) {
            const Floats dot = __builtin_convertvector(dots[row], Floats);
            const Floats shifted = dot - zero * (float)at->sums[row];
            totals[row] = shifted * (scale * at->scales[row]) + totals[row];
        }
    } else if (shape->zero_points == CODES) {
        const Ints zero = __builtin_convertvector(*(const PointsAt *)at->zero_points, Ints);
        at->zero_points += TILE;
        for (int row = 0; row < count; row++) {
            const Floats dot = __builtin_convertvector(dots[row] - zero * at->sums[row], Floats);
            totals[row] = dot * (scale * at->scales[row]) + totals[row];
        }
    } else {
        const int middle = 1 << (shape->bits - 1);
        for (int row = 0; row < count; row++) {
            const Floats dot = __builtin_convertvector(dots[row] - middle * at->sums[row], Floats);
            totals[row] = dot * (scale * at->scales[row]) + totals[row];
        }
    }
    at->scales += count, at->sums += count;
    return shared ? lines : lines + LINE;
}

// Stores the rows of a tile, up to `columns` columns, plus the bias if there is one.
INLINE void put_rows(const Shape *shape, const int count, const Floats *totals, const float *bias,
                     float *y, int columns) {
    const Floats added = bias ? load_first(bias, columns) : (Floats){0};
    for (int row = 0; row < count; row++)
        store_first(y + row * shape->columns, columns, bias ? totals[row] + added : totals[row]);
}

// Prefetches weights: a processor by itself reads ahead within a page only, and tiles are short. At the
// distance AHEAD, lines are in the first cache when they are needed, and activations have not yet
// evicted them. TinyLlama's shape takes 0.84 of the time for 4 tokens, and 0.93 for 16, of what it took
// with a quarter of the distance (2 cores, AMD EPYC).
INLINE void prefetch(const uint8_t *weights, const uint8_t *end) {
    const uint8_t *ahead = weights + AHEAD;
    __builtin_prefetch(ahead < end ? ahead : weights);
}

INLINE int32_t word_at(const int8_t *codes) {
    int32_t word;
    memcpy(&word, codes, 4);
    return word;
}

#endif
