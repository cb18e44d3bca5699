// Kernel for processors with an instruction that multiplies four bytes by four and adds the products to
// a sum of 32 bits: VNNI of 512 and of 256 bits, NEON's dot products and its products of matrices
// (i8mm). setup.py compiles this file once for each.

#include "matmul_kernel.h"

// A register has 4, 8 or 16 columns, so a tile's 16 columns take PARTS registers. Each addition waits
// for the one before it, so few rows have several CHAINS of sums each. The sums of MOST rows fit into the
// registers.
#if defined(__aarch64__)
#include <arm_neon.h>
enum { PARTS = 4, MOST = 5 };
#define CHAINS(COUNT) ((COUNT) <= 1 ? 4 : (COUNT) <= 2 ? 2 : 1)
#elif defined(__AVX512VNNI__) && !defined(HALF_REGISTERS)
enum { PARTS = 1, MOST = 10 };
#define CHAINS(COUNT) ((COUNT) <= 3 ? 4 : (COUNT) <= 9 ? 2 : 1)
#else
enum { PARTS = 2, MOST = 5 };
#define CHAINS(COUNT) ((COUNT) <= 1 ? 4 : (COUNT) <= 2 ? 2 : 1)
#endif

enum { MOST_CHAINS = 4, REGISTER = LINE / PARTS };

typedef int32_t Sums __attribute__((vector_size(REGISTER)));
typedef uint8_t Codes8 __attribute__((vector_size(REGISTER)));
typedef uint8_t CodesOf8At __attribute__((vector_size(REGISTER), aligned(1), may_alias));

// Adds to each column's sum its four codes times the four codes of `word`.
INLINE Sums dot(Sums sum, Codes8 weights, int32_t word) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum, weights, vreinterpretq_s8_s32(vdupq_n_s32(word)));
#elif defined(__aarch64__)
    return vdotq_s32(sum, vreinterpretq_s8_u8(weights), vreinterpretq_s8_s32(vdupq_n_s32(word)));
#elif defined(__AVXVNNI__)
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(word));
#elif defined(HALF_REGISTERS)  // the same by the instruction of AVX512-VNNI, for tests
    return (Sums)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(word));
#else
    return (Sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(word));
#endif
}

// NEON without i8mm multiplies signed numbers only. So codes of 8 bits are LOWERED by 128, and the sums
// are corrected by the sum of the activations.
#if defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
enum { LOWERED = 128 };
#else
enum { LOWERED = 0 };
#endif

// Eight numbers of K for two rows, as products of matrices: two columns by two rows a register. Until
// `untangle`, `one` has the first two columns of both rows and `other` the last two.
#if defined(__ARM_FEATURE_MATMUL_INT8)
enum { PAIRED = 1 };
INLINE void two_rows(Sums *one, Sums *other, Codes8 before, Codes8 after, const int8_t *codes,
                     int64_t next) {
    const uint32x4_t b = vreinterpretq_u32_u8(before), a = vreinterpretq_u32_u8(after);
    const uint8x16_t first = vreinterpretq_u8_u32(vzip1q_u32(b, a));
    const uint8x16_t last = vreinterpretq_u8_u32(vzip2q_u32(b, a));
    const int32x2_t x = vreinterpret_s32_s8(vld1_s8(codes));
    const int32x2_t behind = vreinterpret_s32_s8(vld1_s8(codes + next));
    const int8x16_t rows = vreinterpretq_s8_s32(
        vcombine_s32(vzip1_s32(x, behind), vzip2_s32(x, behind)));
    *one = vusmmlaq_s32(*one, first, rows);
    *other = vusmmlaq_s32(*other, last, rows);
}

INLINE void untangle(Sums *one, Sums *other) {
    const Sums first = *one, last = *other;
    *one = vuzp1q_s32(first, last);
    *other = vuzp2q_s32(first, last);
}
#else
enum { PAIRED = 0 };
INLINE void two_rows(Sums *one, Sums *other, Codes8 before, Codes8 after, const int8_t *codes,
                     int64_t next) {
    (void)one, (void)other, (void)before, (void)after, (void)codes, (void)next;
}
INLINE void untangle(Sums *one, Sums *other) { (void)one, (void)other; }
#endif

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape);
    const int chains = CHAINS(count), paired = PAIRED ? count / 2 * 2 : 0;
    Operands at = operands_of(shape, weights, x, first, 1);
    Floats totals[MOST];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    for (int64_t block = 0; block < blocks; block++) {
        Sums sums[MOST][MOST_CHAINS][PARTS];
        for (int row = 0; row < count; row++)
            for (int chain = 0; chain < chains; chain++)
                for (int part = 0; part < PARTS; part++) sums[row][chain][part] = (Sums){0};
        for (int64_t k = 0; k < shape->block; k += 32)
            for (int step = 0; step < 4; step++, at.codes += count * 8) {
                Codes8 before[PARTS], after[PARTS];
                for (int part = 0; part < PARTS; part++) {
                    const uint8_t *from = weights + part * REGISTER;
                    const Codes8 both = *(const CodesOf8At *)from;
                    before[part] = bits == 4 ? both & 15 : both;
                    after[part] = bits == 4 ? both >> 4 : (Codes8) * (const CodesOf8At *)(from + LINE);
                    if (bits == 8 && LOWERED) before[part] ^= LOWERED, after[part] ^= LOWERED;
                }
                prefetch(weights, end);
                if (bits == 8) prefetch(weights + LINE, end);
                weights += bits == 8 ? 2 * LINE : LINE;
                const int one = 2 * step % chains, other = (2 * step + 1) % chains;
                for (int row = 0; row < paired; row += 2)
                    for (int part = 0; part < PARTS; part++)
                        two_rows(&sums[row][one][part], &sums[row + 1][one][part], before[part],
                                 after[part], at.codes + row * 4, count * 4);
                // All first products, then all second ones: a row's second waits for its first.
                for (int row = paired; row < count; row++)
                    for (int part = 0; part < PARTS; part++)
                        sums[row][one][part] = dot(sums[row][one][part], before[part],
                                                   word_at(at.codes + row * 4));
                for (int row = paired; row < count; row++)
                    for (int part = 0; part < PARTS; part++)
                        sums[row][other][part] = dot(sums[row][other][part], after[part],
                                                     word_at(at.codes + (count + row) * 4));
            }
        Ints dots[MOST];
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PARTS; part++)
                for (int chain = 1; chain < chains; chain++)
                    sums[row][0][part] += sums[row][chain][part];
        for (int row = 0; row < paired; row += 2)
            for (int part = 0; part < PARTS; part++)
                untangle(&sums[row][0][part], &sums[row + 1][0][part]);
        for (int row = 0; row < count; row++) {
            memcpy(dots + row, sums[row][0], sizeof *dots);
            if (bits == 8 && LOWERED) dots[row] += at.sums[row] * LOWERED;
        }
        weights = add_block(shape, count, block, dots, weights, &at, totals);
    }
    put_rows(shape, count, totals, bias, y, columns);
}

#include "matmul_groups.h"

const MatmulKernel MATMUL = {MOST, 2, 0, {1, 1}, activate_row, quantize_row, piece, NULL};
