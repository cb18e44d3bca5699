// Kernel for processors with an instruction that multiplies pairs of bytes and adds them in 16 bits:
// AVX2, and AVX-512 without VNNI. Products of 4-bit codes are added in 16 bits, then in 32. Codes of 8
// bits are too large for that: they and their activations are multiplied as numbers of 16 bits, which
// takes 0.75 of the time of two products of 4 bits (8 rows, AMD EPYC, Zen 3).
// setup.py compiles this file once for each.

#include "matmul_kernel.h"

// A tile's 16 columns take PARTS registers. A sum of 16 bits holds LINES lines of 4-bit codes: a line
// adds at most 4 products of 15 and 127.
#if defined(__AVX512BW__)
enum { PARTS = 1 };
#else
enum { PARTS = 2 };
#endif
enum { MOST = 9, LINES = 4, REGISTER = LINE / PARTS };
// Few rows compute a whole tile at once, to share the activations. More rows compute it part by part,
// so that the sums of all rows stay in registers.
#define TOGETHER(COUNT) ((COUNT) <= 3 ? PARTS : 1)

typedef int16_t Shorts __attribute__((vector_size(REGISTER)));
typedef uint16_t Lines __attribute__((vector_size(REGISTER)));
typedef int32_t Sums __attribute__((vector_size(REGISTER)));
typedef uint8_t Bytes __attribute__((vector_size(REGISTER)));
typedef Bytes BytesAt __attribute__((aligned(1), may_alias));
typedef Lines LinesAt __attribute__((aligned(1), may_alias));

// Adds to each column's two sums its four codes of 4 bits, a byte each, times the four of `word`.
INLINE Shorts add_bytes(Shorts sums, Bytes codes, int32_t word) {
#if defined(__AVX512BW__)
    return sums + (Shorts)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(word));
#else
    return sums + (Shorts)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(word));
#endif
}

// Adds to each column's sum its two numbers times the two of `word`, of 16 bits each.
INLINE Sums add_shorts(Sums sums, Shorts numbers, int32_t word) {
#if defined(__AVX512BW__)
    return sums + (Sums)_mm512_madd_epi16((__m512i)numbers, _mm512_set1_epi32(word));
#else
    return sums + (Sums)_mm256_madd_epi16((__m256i)numbers, _mm256_set1_epi32(word));
#endif
}

// The two functions below add up a block's products for `together` parts of a tile. `weights` begin at
// the first of these parts, and `codes` are the rows' activations.

INLINE void add_4_bits(const int count, const int together, const uint8_t *weights,
                       const uint8_t *end, int64_t block, const int8_t *codes, int first_part,
                       Sums (*sums)[PARTS]) {
    const int32_t ones = 0x00010001;
    for (int64_t k = 0; k < block; k += 8 * LINES) {
        Shorts shorts[MOST][PARTS];
        for (int row = 0; row < count; row++)
            for (int part = 0; part < together; part++) shorts[row][part] = (Shorts){0};
        for (int line = 0; line < LINES; line++, weights += LINE, codes += 8 * count) {
            if (first_part) prefetch(weights, end);
            for (int part = 0; part < together; part++) {
                const Bytes both = *(const BytesAt *)(weights + part * REGISTER);
                const Bytes low = both & 15, high = both >> 4;
                for (int row = 0; row < count; row++) {
                    Shorts *sum = &shorts[row][part];
                    *sum = add_bytes(*sum, low, word_at(codes + row * 4));
                    *sum = add_bytes(*sum, high, word_at(codes + (count + row) * 4));
                }
            }
        }
        for (int row = 0; row < count; row++)
            for (int part = 0; part < together; part++)
                sums[row][part] = add_shorts(sums[row][part], shorts[row][part], ones);
    }
}

INLINE void add_8_bits(const int count, const int together, const uint8_t *weights,
                       const uint8_t *end, int64_t block, const int8_t *codes, int first_part,
                       Sums (*sums)[PARTS]) {
    for (int64_t k = 0; k < block; k += 4, weights += LINE, codes += 8 * count) {
        if (first_part) prefetch(weights, end);
        for (int part = 0; part < together; part++) {
            const Lines both = *(const LinesAt *)(weights + part * REGISTER);
            const Shorts even = (Shorts)(both & 255), odd = (Shorts)(both >> 8);
            for (int row = 0; row < count; row++) {
                Sums *sum = &sums[row][part];
                *sum = add_shorts(*sum, even, word_at(codes + row * 8));
                *sum = add_shorts(*sum, odd, word_at(codes + row * 8 + 4));
            }
        }
    }
}

// See MatmulKernel. A code takes a byte for weights of 4 bits, and two for weights of 8.
static void quantize_pairs(const Input *input, int64_t row, const Shape *shape, int8_t *codes,
                           int64_t stride, float *scales, int32_t *sums, int64_t step) {
    quantize_row(input, row, shape, codes, stride, scales, sums, step);
    if (shape->bits == 4) return;
    // Four codes, k to k + 3, become k and k + 2, then k + 1 and k + 3, as `even` and `odd` need them.
    for (int64_t k = 0; k < blocks_of(shape) * shape->block; k += 4, codes += stride) {
        const __m128i word = _mm_cvtsi32_si128(word_at(codes));
        const __m128i four = _mm_srai_epi16(_mm_unpacklo_epi8(word, word), 8);
        _mm_storeu_si64(codes, _mm_shufflelo_epi16(four, _MM_SHUFFLE(3, 1, 2, 0)));
    }
}

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape), block = shape->block;
    const int together = TOGETHER(count);
    const int64_t code = bits / 4;  // bytes of an activation's code
    Operands at = operands_of(shape, weights, x, first, code);
    Floats totals[MOST];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    for (int64_t number = 0; number < blocks; number++) {
        Ints dots[MOST];
        for (int part = 0; part < PARTS; part += together) {
            Sums sums[MOST][PARTS];
            for (int row = 0; row < count; row++)
                for (int other = 0; other < together; other++) sums[row][other] = (Sums){0};
            const uint8_t *from = weights + part * REGISTER;
            if (bits == 4) add_4_bits(count, together, from, end, block, at.codes, !part, sums);
            else add_8_bits(count, together, from, end, block, at.codes, !part, sums);
            for (int row = 0; row < count; row++)
                memcpy((char *)(dots + row) + part * REGISTER, sums[row],
                       (size_t)together * REGISTER);
        }
        at.codes += block * count * code;
        weights = add_block(shape, count, number, dots, weights + code_bytes(shape), &at, totals);
    }
    put_rows(shape, count, totals, bias, y, columns);
}

#include "matmul_groups.h"

const MatmulKernel MATMUL = {MOST, 8, 0, {1, 2}, activate_row, quantize_pairs, piece, NULL};
