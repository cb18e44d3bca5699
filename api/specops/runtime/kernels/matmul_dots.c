// Kernel that multiplies four bytes by four and adds the products to a sum of 32 bits: with one instruction
// of VNNI (512 or 256 bits), of NEON's dot products, or of its products of matrices (i8mm); on other
// processors, with plain C and products of 16 bits, by one instruction of every x86-64 or two of every arm64.
// setup.py compiles this file once for each; plain C is the reference for all other kernels.

#include <stdint.h>

// A register has 4, 8 or 16 columns, so a tile's 16 columns take PARTS registers. Each addition waits for the
// previous one, so few rows have several CHAINS of sums each. The sums of MOST rows fit into the registers;
// SMALL_GROUPS, a number for tests' programs, compiles less. TOGETHER: number of parts that rows compute at once.
#if defined(SMALL_GROUPS)
#define ROWS_UP_TO(COUNT) SMALL_GROUPS
#else
#define ROWS_UP_TO(COUNT) COUNT
#endif
#if defined(__AVX512VNNI__) && !defined(HALF_REGISTERS)
#define REGISTER 64
enum { MOST = ROWS_UP_TO(10) };
#define CHAINS(COUNT) ((COUNT) <= 3 ? 4 : (COUNT) <= 9 ? 2 : 1)
#else
enum { MOST = ROWS_UP_TO(5) };
#if defined(__AVXVNNI__) || defined(HALF_REGISTERS)
#define REGISTER 32
#else
#define REGISTER 16
#endif
#if REGISTER == 32 || defined(__ARM_FEATURE_DOTPROD)
#define CHAINS(COUNT) ((COUNT) <= 1 ? 4 : (COUNT) <= 2 ? 2 : 1)
#else
#define WITHOUT_DOTS
#define CHAINS(COUNT) 1
#endif
#endif
// NEON without i8mm multiplies signed numbers only.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
enum { LOWERED = 128 };
#else
enum { LOWERED = 0 };
#endif

#include "matmul_kernel.h"

enum { PARTS = LINE / REGISTER, MAX_CHAINS = 4 };

typedef int32_t Columns __attribute__((vector_size(REGISTER)));

#if defined(WITHOUT_DOTS)

#define TOGETHER(COUNT) ((COUNT) == 1 ? PARTS : 1)

typedef int16_t Pairs __attribute__((vector_size(REGISTER)));

// Four codes of activations, k to k + 3, in the form for multiplying registers: k and k + 2 for each column, then k
// + 1 and k + 3. They are stored in this form: converting them again for each tile took a quarter of the time.
typedef struct {
    Pairs even, odd;
} Word;

enum { BYTES = sizeof(Word) / 4 };

// On arm64 the two products of a pair have a lane each until `finished`: two columns in `first` and two in `last`.
#if defined(__aarch64__)
typedef struct { int32x4_t first, last; } Sums;
INLINE Sums sums_from(int32_t start) { return (Sums){{start, 0, start, 0}, {start, 0, start, 0}}; }
INLINE Columns finished(Sums sums) { return vpaddq_s32(sums.first, sums.last); }
INLINE Sums add(Sums sums, BytePairs numbers, Pairs x) {
    return (Sums){vmlal_s16(sums.first, vget_low_s16((int16x8_t)numbers), vget_low_s16(x)),
                  vmlal_high_s16(sums.last, (int16x8_t)numbers, x)};
}
#else
typedef Columns Sums;
INLINE Sums sums_from(int32_t start) { return (Sums){0} + start; }
INLINE Columns finished(Sums sums) { return sums; }
INLINE Sums add(Sums sums, BytePairs numbers, Pairs x) {
#if defined(__x86_64__)
    return sums + (Columns)_mm_madd_epi16((__m128i)numbers, (__m128i)x);
#else
    typedef uint32_t Unsigned __attribute__((vector_size(REGISTER)));
    const Columns n = (Columns)numbers, four = (Columns)x;
    return sums + ((Columns)((Unsigned)n << 16) >> 16) * ((Columns)((Unsigned)four << 16) >> 16) +
           (n >> 16) * (four >> 16);
#endif
}
#endif

INLINE Sums joined(Sums one, Sums other) { return (void)other, one; }  // there is one chain

// Adds to each column's sum its four numbers times the four of the word at `x`.
INLINE Sums dot(Sums sums, Bytes numbers, const int8_t *x) {
    const Word *word = (const Word *)x;
    const BytePairs pairs = (BytePairs)numbers;
    return add(add(sums, pairs & 255, word->even), pairs >> 8, word->odd);
}

static void quantize_words(const Input *input, const Activations *to, int64_t group, int place, int count,
                           int64_t start, int64_t stop) {
    quantize_row(input, to, group, place, count, start, stop);
    const int64_t word = sizeof(Word), first = start * to->block;
    int8_t *codes = to->codes + group * to->pitch + (first / 4 * count + place) * word;
    for (int64_t k = first; k < stop * to->block; k += 4, codes += count * word) {
        const BytePairs four = (BytePairs)((Columns){0} + word_at(codes));
        *(Word *)codes = (Word){(Pairs)(four << 8) >> 8, (Pairs)four >> 8};
    }
}
#define QUANTIZE quantize_words

#else

enum { BYTES = 1 };
#define QUANTIZE quantize_row
#define TOGETHER(COUNT) PARTS

typedef Columns Sums;
INLINE Sums sums_from(int32_t start) { return (Sums){0} + start; }
INLINE Columns finished(Sums sums) { return sums; }
INLINE Sums joined(Sums one, Sums other) { return one + other; }

INLINE Sums dot(Sums sums, Bytes numbers, const int8_t *x) {
    const int32_t word = word_at(x);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sums, numbers, vreinterpretq_s8_s32(vdupq_n_s32(word)));
#elif defined(__aarch64__)
    return vdotq_s32(sums, vreinterpretq_s8_u8(numbers), vreinterpretq_s8_s32(vdupq_n_s32(word)));
#elif defined(__AVXVNNI__)
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)numbers, _mm256_set1_epi32(word));
#elif defined(HALF_REGISTERS)  // the same by the instruction of AVX512-VNNI, for tests
    return (Sums)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)numbers, _mm256_set1_epi32(word));
#else
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)numbers, _mm512_set1_epi32(word));
#endif
}

#endif

// Eight numbers of K for two rows, as products of matrices: two columns by two rows a register. Until
// `untangle`, `one` has the first two columns of both rows and `other` the last two.
#if defined(__ARM_FEATURE_MATMUL_INT8)
enum { PAIRED = 1 };
INLINE void two_rows(Sums *one, Sums *other, Numbers n, const int8_t *codes, int64_t next) {
    const uint32x4_t b = vreinterpretq_u32_u8(n.before), a = vreinterpretq_u32_u8(n.after);
    const uint8x16_t first = vreinterpretq_u8_u32(vzip1q_u32(b, a));
    const uint8x16_t last = vreinterpretq_u8_u32(vzip2q_u32(b, a));
    const int32x2_t x = vreinterpret_s32_s8(vld1_s8(codes));
    const int32x2_t behind = vreinterpret_s32_s8(vld1_s8(codes + next));
    const int8x16_t rows = vreinterpretq_s8_s32(vcombine_s32(vzip1_s32(x, behind), vzip2_s32(x, behind)));
    *one = vusmmlaq_s32(*one, first, rows);
    *other = vusmmlaq_s32(*other, last, rows);
}

// Makes columns of rows of two rows' sums, or the reverse: it is its own inverse but for the order.
INLINE void untangle(Sums *one, Sums *other) {
    const Sums first = *one, last = *other;
    *one = vuzp1q_s32(first, last);
    *other = vuzp2q_s32(first, last);
}
INLINE void tangle(Sums *one, Sums *other) {
    const Sums first = *one, last = *other;
    *one = vzip1q_s32(first, last);
    *other = vzip2q_s32(first, last);
}
#else
enum { PAIRED = 0 };
INLINE void two_rows(Sums *one, Sums *other, Numbers n, const int8_t *codes, int64_t next) {
    (void)one, (void)other, (void)n, (void)codes, (void)next;
}
INLINE void untangle(Sums *one, Sums *other) { (void)one, (void)other; }
INLINE void tangle(Sums *one, Sums *other) { (void)one, (void)other; }
#endif

// See matmul_groups.h.
INLINE void multiply_block(const Planes p, const int count, Bytes table, int64_t units, Cursor *at,
                           const Term *starts, Ints *dots) {
    enum { WORD = 4 * BYTES };
    const int halves = p.twos ? 2 : 1, steps = 4 / halves;
    const int chains = CHAINS(count * halves), paired = PAIRED ? count / 2 * 2 : 0;
    const int together = TOGETHER(count), planes = p.low + p.twos + p.ones;
    const uint8_t *unit = NULL;
    const int8_t *x = NULL;
    ROLLED
    for (int start = 0; start < PARTS; start += together) {
        x = at->codes;
        UNROLLED
        for (int half = 0; half < halves; half++) {
            Sums sums[MOST][MAX_CHAINS][PARTS];
            for (int row = 0; row < count; row++)
                for (int chain = 0; chain < chains; chain++)
                    for (int part = 0; part < together; part++)
                        sums[row][chain][part] =
                            sums_from(chain || p.kind != STARTS ? 0 : starts[half * count + row].whole);
            for (int row = 0; p.kind == STARTS && row < paired; row += 2)
                for (int part = 0; part < together; part++)
                    tangle(&sums[row][0][part], &sums[row + 1][0][part]);
            unit = at->weights;
            ROLLED
            for (int64_t number = 0; number < units; number++, unit += unit_bytes(p)) {
                UNROLLED
                for (int step = 0; step < steps; step++, x += 2 * count * WORD) {
                    const int nth = half * steps + step;
                    Numbers n[PARTS];
                    for (int part = 0; part < together; part++)
                        n[part] = numbers_of(p, table, unit + (start + part) * REGISTER, nth);
                    if (!start) prefetch_lines(at, planes / 4 + (nth < planes % 4));
                    const int one = 2 * step % chains, other = (2 * step + 1) % chains;
                    for (int row = 0; row < paired; row += 2)
                        for (int part = 0; part < together; part++)
                            two_rows(&sums[row][one][part], &sums[row + 1][one][part], n[part],
                                     x + row * WORD, count * WORD);
                    // First all first products, then all second ones: a row's second waits for its first.
                    for (int row = paired; row < count; row++)
                        for (int part = 0; part < together; part++)
                            sums[row][one][part] = dot(sums[row][one][part], n[part].before, x + row * WORD);
                    for (int row = paired; row < count; row++)
                        for (int part = 0; part < together; part++)
                            sums[row][other][part] =
                                dot(sums[row][other][part], n[part].after, x + (count + row) * WORD);
                }
            }
            for (int row = 0; row < count; row++)
                for (int part = 0; part < together; part++)
                    for (int chain = 1; chain < chains; chain++)
                        sums[row][0][part] = joined(sums[row][0][part], sums[row][chain][part]);
            for (int row = 0; row < paired; row += 2)
                for (int part = 0; part < together; part++)
                    untangle(&sums[row][0][part], &sums[row + 1][0][part]);
            for (int row = 0; row < count; row++)
                for (int part = 0; part < together; part++) {
                    const Columns columns = finished(sums[row][0][part]);
                    memcpy((char *)(dots + half * count + row) + (start + part) * REGISTER, &columns,
                           sizeof columns);
                }
        }
    }
    at->weights = unit, at->codes = x;
}

#include "matmul_groups.h"

const MatmulKernel MATMUL = {INT64_MAX, 0, MOST, 2, BYTES, LOWERED != 0, activate_row, QUANTIZE, piece};
