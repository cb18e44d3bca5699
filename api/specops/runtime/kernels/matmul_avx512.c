// Kernel for processors with AVX512-VNNI: a tile's 16 columns are one vector of 32-bit sums.

#include "matmul.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

static float round_block(const float *x, int64_t size, int64_t block, int8_t *codes,
                         int64_t stride, int32_t *sum) {
    __m512 most = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += 16) {
        const __mmask16 there = size - k < 16 ? (1u << (size - k)) - 1 : 0xffff;
        const __m512 values = _mm512_maskz_loadu_ps(there, x + k);
        most = _mm512_max_ps(most, _mm512_abs_ps(values));
        // 0, or NaN from the first infinity or NaN on: no such thing may get lost.
        odd = _mm512_add_ps(_mm512_mul_ps(values, _mm512_setzero_ps()), odd);
    }
    const float largest = _mm512_reduce_max_ps(most) + _mm512_reduce_add_ps(odd);
    *sum = 0;
    if (!(largest > TINY)) return no_codes(codes, block, stride), largest / 127;
    const __m512 inverse = _mm512_set1_ps(127 / largest);
    __m512i sums = _mm512_setzero_si512();
    for (int64_t k = 0; k < block; k += 16) {
        const int64_t left = size - k;
        const __mmask16 there = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        const __m512i values = _mm512_cvtps_epi32(
            _mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + k), inverse));
        sums = _mm512_add_epi32(sums, values);
        int8_t group[16];
        _mm_storeu_si128((__m128i *)group, _mm512_cvtepi32_epi8(values));
        for (int word = 0; word < 4; word++, codes += stride) memcpy(codes, group + word * 4, 4);
    }
    *sum = _mm512_reduce_add_epi32(sums);
    return largest / 127;
}

// A verification of 8 draft tokens has 9 rows. LINES: as many as a block has at least.
enum { WIDTH = 8, LINES = 4 };

INLINE __m512i four(const int8_t *codes) {
    int32_t word;
    memcpy(&word, codes, 4);
    return _mm512_set1_epi32(word);
}

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape), bytes = code_bytes(shape);
    Operands at = operands_of(shape, weights, x, first);
    const __m512i low = _mm512_set1_epi8(15), middle = _mm512_set1_epi32(1 << (bits - 1));
    // A sum waits for the one before it: few rows have several each, so that there are enough.
    const int chains = count <= 3 ? 4 : count <= 6 ? 2 : 1;
    __m512 totals[WIDTH + 1];
    for (int row = 0; row < count; row++) totals[row] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        __m512i sum[WIDTH + 1][4];
        for (int row = 0; row < count; row++)
            for (int chain = 0; chain < chains; chain++) sum[row][chain] = _mm512_setzero_si512();
        for (int64_t byte = 0; byte < bytes; byte += LINES * LINE) {
            for (int line = 0; line < LINES; line++, weights += LINE) {
                // A processor reads ahead by itself within a page only, and tiles are short.
                const uint8_t *ahead = weights + AHEAD;
                _mm_prefetch((const char *)(ahead < end ? ahead : weights), _MM_HINT_T0);
                const __m512i both = _mm512_loadu_si512(weights);
                if (bits == 4) {
                    const __m512i before = _mm512_and_si512(both, low);
                    const __m512i after = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                    for (int row = 0; row < count; row++) {
                        __m512i *one = &sum[row][2 * line % chains];
                        __m512i *other = &sum[row][(2 * line + 1) % chains];
                        *one = _mm512_dpbusd_epi32(*one, before, four(at.codes + row * 4));
                        const int8_t *next = at.codes + (count + row) * 4;
                        *other = _mm512_dpbusd_epi32(*other, after, four(next));
                    }
                } else {
                    for (int row = 0; row < count; row++) {
                        __m512i *one = &sum[row][line % chains];
                        *one = _mm512_dpbusd_epi32(*one, both, four(at.codes + row * 4));
                    }
                }
                at.codes += count * (32 / bits);
            }
        }
        const __m512 scale = _mm512_loadu_ps(weights);
        weights += LINE;
        // Two loops: in one the compiler keeps the sums of 8 rows in memory, and 8 tokens of the demo
        // pair take 1.6 times as long.
        if (shape->zero_points == FRACTIONS) {
            const __m512 zero = _mm512_loadu_ps(weights);
            weights += LINE;
            for (int row = 0; row < count; row++) {
                __m512i dot = sum[row][0];
                for (int chain = 1; chain < chains; chain++)
                    dot = _mm512_add_epi32(dot, sum[row][chain]);
                const __m512 shift = _mm512_mul_ps(zero, _mm512_set1_ps((float)*at.sums++));
                const __m512 shifted = _mm512_sub_ps(_mm512_cvtepi32_ps(dot), shift);
                const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(*at.scales++));
                totals[row] = _mm512_add_ps(_mm512_mul_ps(shifted, factor), totals[row]);
            }
            continue;
        }
        __m512i zero = middle;
        if (shape->zero_points == CODES) {
            zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at.zero_points));
            at.zero_points += TILE;
        }
        for (int row = 0; row < count; row++) {
            const __m512i shift = _mm512_mullo_epi32(zero, _mm512_set1_epi32(*at.sums++));
            __m512i dot = _mm512_sub_epi32(sum[row][0], shift);
            for (int chain = 1; chain < chains; chain++)
                dot = _mm512_add_epi32(dot, sum[row][chain]);
            const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(*at.scales++));
            const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), factor);
            totals[row] = _mm512_add_ps(product, totals[row]);
        }
    }
    const __mmask16 there = (1u << columns) - 1;
    if (bias) {
        const __m512 values = _mm512_maskz_loadu_ps(there, bias);
        for (int row = 0; row < count; row++) totals[row] = _mm512_add_ps(totals[row], values);
    }
    for (int row = 0; row < count; row++)
        _mm512_mask_storeu_ps(y + row * shape->columns, there, totals[row]);
}

static void tile(const Shape *shape, const uint8_t *weights, const uint8_t *end,
                 const Activations *x, int64_t first, int count, const float *bias, float *y,
                 int columns) {
    switch (count) {
        GROUP(1) GROUP(2) GROUP(3) GROUP(4) GROUP(5) GROUP(6) GROUP(7) GROUP(8) GROUP(9)
    }
}

const MatmulKernel MATMUL_AVX512 = {"AVX512-VNNI", WIDTH, round_block, tile};
