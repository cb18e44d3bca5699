// Kernel for processors with an instruction that multiplies pairs of bytes and adds them in 16 bits:
// AVX2, and AVX-512 without VNNI. Several products of 4-bit codes are added in 16 bits, then in 32.
// Codes of 8 bits are multiplied as two of 4. setup.py compiles this file once for each.

#include "matmul_kernel.h"

// A tile's 16 columns take PARTS registers. A sum of 16 bits holds LINES lines of 4-bit codes: a line
// adds at most 4 products of 15 and 127.
#if defined(__AVX512BW__)
enum { PARTS = 1, WIDTH = 8 };
#else
enum { PARTS = 2, WIDTH = 4 };
#endif
enum { LINES = 4, REGISTER = LINE / PARTS };

typedef int16_t Shorts __attribute__((vector_size(REGISTER)));
typedef int32_t Sums __attribute__((vector_size(REGISTER)));
typedef uint8_t Bytes __attribute__((vector_size(REGISTER)));
typedef Bytes BytesAt __attribute__((aligned(1), may_alias));

// Adds to each column's two sums its four codes of 4 bits, a byte each, times the four of `word`.
INLINE Shorts add_products(Shorts sums, Bytes codes, int32_t word) {
#if defined(__AVX512BW__)
    return sums + (Shorts)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(word));
#else
    return sums + (Shorts)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(word));
#endif
}

// Multiplies each number by `factor` and adds neighbours.
INLINE Sums add_neighbours(Shorts numbers, int16_t factor) {
#if defined(__AVX512BW__)
    return (Sums)_mm512_madd_epi16((__m512i)numbers, _mm512_set1_epi16(factor));
#else
    return (Sums)_mm256_madd_epi16((__m256i)numbers, _mm256_set1_epi16(factor));
#endif
}

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape), bytes = code_bytes(shape);
    Operands at = operands_of(shape, weights, x, first, 1);
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
                        // The halves of a byte are two weights of 4 bits, or one of 8.
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
            for (int row = 0; row < count; row++)
                for (int part = 0; part < PARTS; part++) {
                    sums[row][part] += add_neighbours(lows[row][part], 1);
                    if (bits == 8) sums[row][part] += add_neighbours(highs[row][part], 16);
                }
        }
        Ints dots[WIDTH + 1];
        memcpy(dots, sums, sizeof dots);
        weights = add_block(shape, count, block, dots, weights, &at, totals);
    }
    put_rows(shape, count, totals, bias, y, columns);
}

#include "matmul_groups.h"

const MatmulKernel MATMUL = {WIDTH, 0, 1, make_row, quantize_row, tile, NULL};
