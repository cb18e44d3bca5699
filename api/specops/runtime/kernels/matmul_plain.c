// Kernel for every other processor, and what the special ones are compared with: plain C with
// vectors of the compiler's. Products of 8 bits are added in 16 bits before they are in 32.

#include "matmul.h"
#include "vectors.h"

typedef int16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t Pairs __attribute__((vector_size(64)));  // two of a column's four bytes each
typedef uint16_t PairsAt __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t BytesAt __attribute__((vector_size(16), aligned(1), may_alias));

// 16-bit sums hold 4 lines: a line adds at most 4 products of 15 and 127 where codes have 4 bits
// or are taken apart into halves of 4.
enum { WIDTH = 4, LINES = 4 };

static float round_block(const float *x, int64_t size, int64_t block, int8_t *codes,
                         int64_t stride, int32_t *sum) {
    float values[MOST_BLOCK];
    int8_t rounded[MOST_BLOCK];
    memcpy(values, x, size * sizeof(float));
    for (int64_t k = size; k < block; k++) values[k] = 0;
    Floats most = {0}, odd = {0};
    for (int64_t k = 0; k < block; k += LANES) {
        most = larger(magnitude(load(values + k)), most);
        // 0, or NaN from the first infinity or NaN on: no such thing may get lost.
        odd += load(values + k) * 0.0f;
    }
    const float highest = largest(most) + total(odd);
    *sum = 0;
    if (!(highest > TINY)) return no_codes(codes, block, stride), highest / 127;
    for (int64_t k = 0; k < block; k += LANES)
        to_codes(rounded + k, load(values + k) * (127 / highest));
    for (int64_t k = 0; k < block; k++) *sum += rounded[k];
    for (int64_t k = 0; k < block; k += 4) memcpy(codes + k / 4 * stride, rounded + k, 4);
    return highest / 127;
}

// One code for the first byte of each pair of all columns, the other for the second: as `line`
// has a column's bytes.
INLINE Shorts pair(int8_t first, int8_t second) {
    return (Shorts)((Words){0} + ((uint16_t)first | (uint32_t)(uint16_t)second << 16));
}

INLINE Ints sum_pairs(Shorts sums) {
    return ((Ints)((Words)sums << 16) >> 16) + ((Ints)sums >> 16);
}

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape), bytes = code_bytes(shape);
    Operands at = operands_of(shape, weights, x, first);
    Floats totals[WIDTH + 1];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    for (int64_t block = 0; block < blocks; block++) {
        Ints dots[WIDTH + 1];
        for (int row = 0; row < count; row++) dots[row] = (Ints){0};
        for (int64_t byte = 0; byte < bytes; byte += LINES * LINE) {
            Shorts lows[WIDTH + 1], highs[WIDTH + 1];
            for (int row = 0; row < count; row++) lows[row] = highs[row] = (Shorts){0};
            for (int line = 0; line < LINES; line++, weights += LINE) {
                __builtin_prefetch(weights + AHEAD < end ? weights + AHEAD : weights);
                const Pairs both = *(const PairsAt *)weights;
                const Shorts low[2] = {(Shorts)(both & 15), (Shorts)(both >> 8 & 15)};
                const Shorts high[2] = {(Shorts)(both >> 4 & 15), (Shorts)(both >> 12)};
                for (int row = 0; row < count; row++) {
                    // Halves of a byte are two weights of 4 bits, or parts of one of 8.
                    const int8_t *one = at.codes + row * 4;
                    const int8_t *other = bits == 4 ? one + count * 4 : one;
                    Shorts *sum = bits == 4 ? lows + row : highs + row;
                    lows[row] += low[0] * pair(one[0], one[2]) + low[1] * pair(one[1], one[3]);
                    *sum += high[0] * pair(other[0], other[2]) + high[1] * pair(other[1], other[3]);
                }
                at.codes += count * (32 / bits);
            }
            for (int row = 0; row < count; row++) {
                dots[row] += sum_pairs(lows[row]);
                if (bits == 8) dots[row] += sum_pairs(highs[row]) * 16;
            }
        }
        const Floats scale = load((const float *)weights);
        weights += LINE;
        Ints zero = (Ints){0} + (1 << (bits - 1));
        Floats fraction = {0};
        if (shape->zero_points == FRACTIONS) {
            fraction = load((const float *)weights);
            weights += LINE;
        } else if (shape->zero_points == CODES) {
            zero = __builtin_convertvector(*(const BytesAt *)at.zero_points, Ints);
            at.zero_points += TILE;
        }
        for (int row = 0; row < count; row++) {
            Floats shifted;
            if (shape->zero_points == FRACTIONS) {
                const Floats dot = __builtin_convertvector(dots[row], Floats);
                shifted = dot - fraction * (float)at.sums[row];
            } else {
                shifted = __builtin_convertvector(dots[row] - zero * at.sums[row], Floats);
            }
            totals[row] = shifted * (scale * at.scales[row]) + totals[row];
        }
        at.scales += count;
        at.sums += count;
    }
    for (int row = 0; row < count; row++) {
        float values[TILE];
        store(values, totals[row]);
        put_row(values, bias, y + row * shape->columns, columns);
    }
}

static void tile(const Shape *shape, const uint8_t *weights, const uint8_t *end,
                 const Activations *x, int64_t first, int count, const float *bias, float *y,
                 int columns) {
    switch (count) { GROUP(1) GROUP(2) GROUP(3) GROUP(4) GROUP(5) }
}

const MatmulKernel MATMUL_PLAIN = {"plain C", WIDTH, round_block, tile};
