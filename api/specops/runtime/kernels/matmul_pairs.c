// Kernel for processors that multiply no four bytes at once: plain C for any, the reference of all
// others, AVX2, and AVX-512 without VNNI. Products of 4 bits are added in pairs, in 16 bits, before they
// are in 32. This file is compiled once for each, see setup.py.

#include "matmul_kernel.h"

// A tile's 16 columns are PARTS registers; in plain C one, and a compiler makes several of it.
#if defined(__AVX512BW__)
enum { PARTS = 1, WIDTH = 8, HALVES = 1 };
#elif defined(__AVX2__)
enum { PARTS = 2, WIDTH = 4, HALVES = 1 };
#else
enum { PARTS = 1, WIDTH = 4, HALVES = 0 };
#endif

// HALVES: codes of 8 bits are multiplied as two of 4, for which these processors have an instruction.
// 16-bit sums hold 4 lines of codes of 4 bits: a line adds at most 4 products of 15 and 127.
enum { LINES = 4, REGISTER = LINE / PARTS };

typedef int16_t Shorts __attribute__((vector_size(REGISTER)));
typedef uint16_t Pairs __attribute__((vector_size(REGISTER)));  // two of a column's four bytes each
typedef int32_t Sums __attribute__((vector_size(REGISTER)));
typedef uint32_t Fours __attribute__((vector_size(REGISTER)));
typedef uint8_t Bytes __attribute__((vector_size(REGISTER)));
typedef Bytes BytesAt __attribute__((aligned(1), may_alias));

// Adds four codes of 4 bits, a byte each, times the four of `word` to a column's two sums.
INLINE Shorts add_products(Shorts sums, Bytes codes, int32_t word) {
#if defined(__AVX512BW__)
    return sums + (Shorts)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(word));
#elif defined(__AVX2__)
    return sums + (Shorts)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(word));
#else
    const Pairs c = (Pairs)codes, x = (Pairs)((Fours){0} + (uint32_t)word);
    return (Shorts)((Pairs)sums + (c & 255) * (Pairs)((Shorts)(x << 8) >> 8) +
                    (c >> 8) * (Pairs)((Shorts)x >> 8));
#endif
}

// Products of 16 bits in 32, those of two neighbours added.
INLINE Sums multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
    return (Sums)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Sums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)  // every x86-64
    __m128i parts[4], others[4];
    memcpy(parts, &a, sizeof parts), memcpy(others, &b, sizeof others);
    for (int i = 0; i < 4; i++) parts[i] = _mm_madd_epi16(parts[i], others[i]);
    Sums sums;
    memcpy(&sums, parts, sizeof sums);
    return sums;
#else
    return ((Sums)((Fours)a << 16) >> 16) * ((Sums)((Fours)b << 16) >> 16) +
           ((Sums)a >> 16) * ((Sums)b >> 16);
#endif
}

// Adds four codes of 8 bits times the four of `word` to a column's sum.
INLINE Sums add_bytes(Sums sums, Bytes codes, int32_t word) {
    const Pairs x = (Pairs)((Fours){0} + (uint32_t)word);
    return sums + multiply_pairs((Shorts)((Pairs)codes & 255), (Shorts)(x << 8) >> 8) +
           multiply_pairs((Shorts)((Pairs)codes >> 8), (Shorts)x >> 8);
}

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape), bytes = code_bytes(shape);
    Operands at = operands_of(shape, weights, x, first);
    Floats totals[WIDTH + 1];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    for (int64_t block = 0; block < blocks; block++) {
        Sums sums[WIDTH + 1][PARTS];
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PARTS; part++) sums[row][part] = (Sums){0};
        for (int64_t byte = 0; byte < bytes; byte += LINES * LINE) {
            Shorts lows[WIDTH + 1][PARTS], highs[WIDTH + 1][PARTS];
            for (int row = 0; row < count; row++)
                for (int part = 0; part < PARTS; part++)
                    lows[row][part] = highs[row][part] = (Shorts){0};
            for (int line = 0; line < LINES; line++, weights += LINE) {
                ask_ahead(weights, end);
                for (int part = 0; part < PARTS; part++) {
                    const Bytes both = *(const BytesAt *)(weights + part * REGISTER);
                    for (int row = 0; row < count; row++) {
                        const int32_t one = word_at(at.codes + row * 4);
                        if (bits == 8 && !HALVES) {
                            sums[row][part] = add_bytes(sums[row][part], both, one);
                            continue;
                        }
                        // Halves of a byte are two weights of 4 bits, or parts of one of 8.
                        const int32_t other =
                            bits == 4 ? word_at(at.codes + (count + row) * 4) : one;
                        Shorts *low = &lows[row][part];
                        Shorts *high = bits == 4 ? low : &highs[row][part];
                        *low = add_products(*low, both & 15, one);
                        *high = add_products(*high, both >> 4, other);
                    }
                }
                at.codes += count * (32 / bits);
            }
            for (int row = 0; (bits == 4 || HALVES) && row < count; row++)
                for (int part = 0; part < PARTS; part++) {
                    sums[row][part] += multiply_pairs(lows[row][part], (Shorts){0} + 1);
                    if (bits == 8)
                        sums[row][part] += multiply_pairs(highs[row][part], (Shorts){0} + 16);
                }
        }
        Ints dots[WIDTH + 1];
        memcpy(dots, sums, sizeof dots);
        weights = add_block(shape, count, block, dots, weights, &at, totals);
    }
    put_rows(shape, count, totals, bias, y, columns);
}

#include "matmul_groups.h"

const MatmulKernel MATMUL = {WIDTH, 0, make_row, quantize_row, tile, NULL};
