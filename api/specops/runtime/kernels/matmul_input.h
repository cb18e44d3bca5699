// What a product multiplies with: its input as it is, normalized, or opened by a gate, rounded to codes
// of 8 bits. Norms and gates stand in front of a product in every decoder. Here they take no memory, and
// no operator of their own, whose call costs a small model more than its arithmetic.
//
// A row is its own: sums run over lanes of 16 numbers, in order.

#ifndef SPECOPS_MATMUL_INPUT_H
#define SPECOPS_MATMUL_INPUT_H

#include "matmul.h"
#include "vectors.h"

// Numbers that are made at a time.
enum { CHUNK = 4 * MOST_BLOCK };

// The first `count` numbers, at most 16.
INLINE Floats some(const float *from, int64_t count) {
    return count >= LANES ? load(from) : load_first(from, (int)count);
}

INLINE Floats summed(const Input *input, int64_t place, int64_t count) {
    const Floats x = some(input->x + place, count);
    return input->residual ? x + some(input->residual + place, count) : x;
}

// Of a row that is normalized: writes its sum, returns what its numbers are multiplied with.
static float scale_of_row(const Input *input, int64_t row, int64_t depth) {
    Floats squares = {0};
    for (int64_t k = 0; k < depth; k += LANES) {
        const int64_t place = row * depth + k, count = depth - k;
        const Floats x = summed(input, place, count);
        if (input->sum) store_first(input->sum + place, count < LANES ? (int)count : LANES, x);
        squares += x * x;
    }
    return inverse_rms(squares, depth, input->epsilon);
}

// Up to 16 of a row's numbers, from number k on.
INLINE Floats made_of(const int kind, const Input *input, int64_t row, int64_t depth, int64_t k,
                      int64_t count, float scale) {
    if (kind == NORM)
        return summed(input, row * depth + k, count) * scale * some(input->weight + k, count);
    const float *gate = input->x + 2 * row * depth + k;
    const Floats x = some(gate, count);
    return (kind == SILU_GATE ? silu(x) : gelu(x)) * some(gate + depth, count);
}

INLINE void make(const int kind, const Input *input, int64_t row, int64_t depth, int64_t start,
                 int64_t size, float scale, float *made) {
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES)
        store(made + k, made_of(kind, input, row, depth, start + k, LANES, scale));
    if (k < size)
        store_first(made + k, (int)(size - k),
                    made_of(kind, input, row, depth, start + k, size - k, scale));
}

// Round a block's numbers, of which the first `size` are there, to codes, four of them every
// `stride` bytes. Returns the scale; `sum` gets that of the codes.
INLINE float round_block(const float *x, int64_t size, int64_t block, int8_t *codes,
                         int64_t stride, int32_t *sum) {
    float filled[MOST_BLOCK];
    if (size < block) {
        memcpy(filled, x, size * sizeof(float));
        for (int64_t k = size; k < block; k++) filled[k] = 0;
        x = filled;
    }
    Floats most = {0}, odd = {0};
    for (int64_t k = 0; k < block; k += LANES) {
        most = larger(magnitude(load(x + k)), most);
        // 0, or NaN from the first infinity or NaN on: no such thing may get lost.
        odd += load(x + k) * 0.0f;
    }
    const float highest = largest(most) + total(odd);
    *sum = 0;
    if (!(highest > TINY)) return no_codes(codes, block, stride), highest / 127;
    Ints sums = {0};
    for (int64_t k = 0; k < block; k += LANES) {
        int8_t rounded[LANES];
        sums += to_codes(rounded, load(x + k) * (127 / highest));
        for (int word = 0; word < LANES; word += 4, codes += stride)
            memcpy(codes, rounded + word, 4);
    }
    for (int lane = 0; lane < LANES; lane++) *sum += sums[lane];
    return highest / 127;
}

// Make and round a row; see MatmulKernel.
static void quantize_row(const Input *input, int64_t row, const Shape *shape, int8_t *codes,
                         int64_t stride, float *scales, int32_t *sums, int64_t step) {
    const int64_t depth = shape->depth, block = shape->block;
    const float scale = input->kind == NORM ? scale_of_row(input, row, depth) : 1;
    const int64_t most = input->kind == AS_IT_IS ? depth : CHUNK / block * block;
    float chunk[CHUNK];
    for (int64_t start = 0; start < depth; start += most) {
        const int64_t size = depth - start < most ? depth - start : most;
        const float *x = input->x + row * depth;
        if (input->kind != AS_IT_IS) {
            float *made = input->made ? input->made + row * depth + start : chunk;
            if (input->kind == NORM) make(NORM, input, row, depth, start, size, scale, made);
            else if (input->kind == SILU_GATE)
                make(SILU_GATE, input, row, depth, start, size, scale, made);
            else make(GELU_GATE, input, row, depth, start, size, scale, made);
            x = made;
        }
        for (int64_t k = 0; k < size; k += block, scales += step, sums += step)
            *scales = round_block(x + k, size - k < block ? size - k : block, block,
                                  codes + (start + k) / 4 * stride, stride, sums);
    }
}

#endif
