// Kernel for processors with AVX2 and no VNNI: a tile's 16 columns are two vectors of 8, and
// products of 8 bits are added in 16 before they are in 32.

#include "matmul.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

// 16-bit sums hold 4 lines: a line adds at most 4 products of 15 and 127 where codes have 4 bits
// or are taken apart into halves of 4.
enum { WIDTH = 4, HALVES = 2, HALF = 8, LINES = 4 };

INLINE float largest_of(__m256 values) {
    const __m128 high = _mm256_extractf128_ps(values, 1);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), high);
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE float sum_of(__m256 values) {
    const __m128 high = _mm256_extractf128_ps(values, 1);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), high);
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE __m256 some(const float *start, int64_t count) {
    if (count >= HALF) return _mm256_loadu_ps(start);
    float values[HALF] = {0};
    if (count > 0) memcpy(values, start, count * sizeof(float));
    return _mm256_loadu_ps(values);
}

static float round_block(const float *x, int64_t size, int64_t block, int8_t *codes,
                         int64_t stride, int32_t *sum) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    for (int64_t k = 0; k < size; k += HALF) {
        const __m256 values = some(x + k, size - k);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, values));
        // 0, or NaN from the first infinity or NaN on: no such thing may get lost.
        odd = _mm256_add_ps(_mm256_mul_ps(values, _mm256_setzero_ps()), odd);
    }
    const float largest = largest_of(most) + sum_of(odd);
    *sum = 0;
    if (!(largest > TINY)) return no_codes(codes, block, stride), largest / 127;
    const __m256 inverse = _mm256_set1_ps(127 / largest);
    for (int64_t k = 0; k < block; k += HALF) {
        int32_t values[HALF];
        _mm256_storeu_si256((__m256i *)values,
                            _mm256_cvtps_epi32(_mm256_mul_ps(some(x + k, size - k), inverse)));
        for (int i = 0; i < HALF; i++) {
            codes[i / 4 * stride + i % 4] = (int8_t)values[i];
            *sum += values[i];
        }
        codes += 2 * stride;
    }
    return largest / 127;
}

INLINE __m256i four(const int8_t *codes) {
    int32_t word;
    memcpy(&word, codes, 4);
    return _mm256_set1_epi32(word);
}

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape), bytes = code_bytes(shape);
    Operands at = operands_of(shape, weights, x, first);
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i sixteens = _mm256_set1_epi16(16), middle = _mm256_set1_epi32(1 << (bits - 1));
    __m256 totals[WIDTH + 1][HALVES];
    for (int row = 0; row < count; row++)
        for (int half = 0; half < HALVES; half++) totals[row][half] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        __m256i dots[WIDTH + 1][HALVES];
        for (int row = 0; row < count; row++)
            for (int half = 0; half < HALVES; half++) dots[row][half] = _mm256_setzero_si256();
        for (int64_t byte = 0; byte < bytes; byte += LINES * LINE) {
            __m256i lows[WIDTH + 1][HALVES], highs[WIDTH + 1][HALVES];
            for (int row = 0; row < count; row++)
                for (int half = 0; half < HALVES; half++)
                    lows[row][half] = highs[row][half] = _mm256_setzero_si256();
            for (int line = 0; line < LINES; line++, weights += LINE) {
                const uint8_t *ahead = weights + AHEAD;
                _mm_prefetch((const char *)(ahead < end ? ahead : weights), _MM_HINT_T0);
                for (int half = 0; half < HALVES; half++) {
                    const __m256i both = _mm256_loadu_si256((const __m256i *)weights + half);
                    const __m256i before = _mm256_and_si256(both, low);
                    const __m256i after = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                    for (int row = 0; row < count; row++) {
                        // Halves of a byte are two weights of 4 bits, or parts of one of 8.
                        const __m256i one = four(at.codes + row * 4);
                        const __m256i other = bits == 4 ? four(at.codes + (count + row) * 4) : one;
                        __m256i *sum = bits == 4 ? &lows[row][half] : &highs[row][half];
                        lows[row][half] = _mm256_add_epi16(lows[row][half],
                                                           _mm256_maddubs_epi16(before, one));
                        *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(after, other));
                    }
                }
                at.codes += count * (32 / bits);
            }
            for (int row = 0; row < count; row++)
                for (int half = 0; half < HALVES; half++) {
                    const __m256i part = _mm256_madd_epi16(lows[row][half], ones);
                    dots[row][half] = _mm256_add_epi32(dots[row][half], part);
                    if (bits == 8) {
                        const __m256i high = _mm256_madd_epi16(highs[row][half], sixteens);
                        dots[row][half] = _mm256_add_epi32(dots[row][half], high);
                    }
                }
        }
        const float *scales = (const float *)weights;
        weights += LINE;
        // Two loops, as for AVX-512: in one, passes of 4 tokens and more take 1.03 of the time.
        if (shape->zero_points == FRACTIONS) {
            for (int half = 0; half < HALVES; half++) {
                const __m256 scale = _mm256_loadu_ps(scales + half * HALF);
                const __m256 zero = _mm256_loadu_ps((const float *)weights + half * HALF);
                for (int row = 0; row < count; row++) {
                    const __m256 sum = _mm256_set1_ps((float)at.sums[row]);
                    const __m256 shifted = _mm256_sub_ps(_mm256_cvtepi32_ps(dots[row][half]),
                                                         _mm256_mul_ps(zero, sum));
                    const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(at.scales[row]));
                    totals[row][half] =
                        _mm256_add_ps(_mm256_mul_ps(shifted, factor), totals[row][half]);
                }
            }
            weights += LINE;
        } else {
            for (int half = 0; half < HALVES; half++) {
                const __m256 scale = _mm256_loadu_ps(scales + half * HALF);
                __m256i zero = middle;
                if (shape->zero_points == CODES)
                    zero = _mm256_cvtepu8_epi32(
                        _mm_loadl_epi64((const __m128i *)(at.zero_points + half * HALF)));
                for (int row = 0; row < count; row++) {
                    const __m256i shift = _mm256_mullo_epi32(zero, _mm256_set1_epi32(at.sums[row]));
                    const __m256i sum = _mm256_sub_epi32(dots[row][half], shift);
                    const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(at.scales[row]));
                    totals[row][half] = _mm256_add_ps(
                        _mm256_mul_ps(_mm256_cvtepi32_ps(sum), factor), totals[row][half]);
                }
            }
            at.zero_points += TILE;
        }
        at.scales += count;
        at.sums += count;
    }
    for (int row = 0; row < count; row++) {
        float values[TILE];
        for (int half = 0; half < HALVES; half++)
            _mm256_storeu_ps(values + half * HALF, totals[row][half]);
        put_row(values, bias, y + row * shape->columns, columns);
    }
}

static void tile(const Shape *shape, const uint8_t *weights, const uint8_t *end,
                 const Activations *x, int64_t first, int count, const float *bias, float *y,
                 int columns) {
    switch (count) { GROUP(1) GROUP(2) GROUP(3) GROUP(4) GROUP(5) }
}

const MatmulKernel MATMUL_AVX2 = {"AVX2", WIDTH, round_block, tile};
