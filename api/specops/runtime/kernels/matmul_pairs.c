// Kernel for processors with an instruction that multiplies pairs of bytes and adds them in 16 bits:
// AVX2, and AVX-512 without VNNI. Products are added in 16 bits as long as these hold the sum, then in 32.
// Numbers of 8 bits are signed here, and the instruction wants one side without signs: it multiplies their
// magnitudes by the activations, which take their signs. setup.py compiles this file once for each.

#if defined(__AVX512BW__)
#define REGISTER 64
#else
#define REGISTER 32
#endif

#include "matmul_kernel.h"

#if defined(SMALL_GROUPS)  // for tests' programs
enum { MOST = SMALL_GROUPS };
#else
enum { MOST = 9 };
#endif
enum { PARTS = LINE / REGISTER, BYTES = 1, LOWERED = 128, WORDS = UNIT / 4 };
// Few rows compute a whole tile at once, to share the activations. More rows compute it part by part,
// so that the sums of all rows stay in registers.
#define TOGETHER(COUNT) ((COUNT) <= 3 ? PARTS : 1)

typedef int16_t Shorts __attribute__((vector_size(REGISTER)));
typedef int32_t Sums __attribute__((vector_size(REGISTER)));

// The sums of each column's pairs: its four numbers times the four codes of activations.
INLINE Shorts pairs(Bytes numbers, Bytes x) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maddubs_epi16((__m512i)numbers, (__m512i)x);
#else
    return (Shorts)_mm256_maddubs_epi16((__m256i)numbers, (__m256i)x);
#endif
}

INLINE Bytes word_of(const int8_t *x) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_set1_epi32(word_at(x));
#else
    return (Bytes)_mm256_set1_epi32(word_at(x));
#endif
}

// Adds both sums of 16 bits to each column's sum.
INLINE Sums add_pairs(Sums sums, Shorts pairs) {
#if defined(__AVX512BW__)
    return sums + (Sums)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(0x00010001));
#else
    return sums + (Sums)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(0x00010001));
#endif
}

// Codes of activations with the signs of numbers, and the numbers' magnitudes. No code is -128.
typedef struct {
    Bytes magnitude, number;
#if defined(__AVX512BW__)
    __mmask64 negative;
#endif
} Signed;

INLINE Signed signed_of(Bytes number) {
#if defined(__AVX512BW__)
    return (Signed){(Bytes)_mm512_abs_epi8((__m512i)number), number, _mm512_movepi8_mask((__m512i)number)};
#else
    return (Signed){(Bytes)_mm256_abs_epi8((__m256i)number), number};
#endif
}

INLINE Bytes with_signs(Bytes x, const Signed *of) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_mask_sub_epi8((__m512i)x, of->negative, _mm512_setzero_si512(), (__m512i)x);
#else
    return (Bytes)_mm256_sign_epi8((__m256i)x, (__m256i)of->number);
#endif
}

// See matmul_groups.h.
INLINE void multiply_block(const Planes p, const int count, Bytes table, int64_t units, Cursor *at,
                           const Term *starts, Ints *dots) {
    const int large = p.low == 8 || p.table, bits = p.low + p.twos + p.ones;
    const int halves = p.twos ? 2 : 1, words = WORDS / halves, together = TOGETHER(count);
    // Words whose products a sum of 16 bits holds: a word adds at most 2 products of a number and 127.
    const int fit = large ? 1 : 32767 / (2 * ((1 << bits) - 1) * 127);
    const int each = fit >= words ? words : fit >= 4 ? 4 : 2;
    const uint8_t *unit = NULL;
    const int8_t *x = NULL;
    ROLLED
    for (int start = 0; start < PARTS; start += together) {
        x = at->codes;
        UNROLLED
        for (int half = 0; half < halves; half++) {
            Sums sums[MOST][PARTS];
            for (int row = 0; row < count; row++)
                for (int part = 0; part < together; part++)
                    sums[row][part] = (Sums){0} + (p.kind == STARTS ? starts[half * count + row].whole : 0);
            unit = at->weights;
            ROLLED
            for (int64_t number = 0; number < units; number++, unit += unit_bytes(p)) {
                Shorts shorts[MOST][PARTS];
                UNROLLED
                for (int word = 0; word < words; word += 2, x += 8 * count) {
                    const int step = (half * words + word) / 2;
                    if (!start) prefetch_lines(at, bits / 4 + (step < bits % 4));
                    for (int part = 0; part < together; part++) {
                        Numbers n = numbers_of(p, table, unit + (start + part) * REGISTER, step);
                        if (large) {
                            if (p.low == 8) n.before ^= LOWERED, n.after ^= LOWERED;
                            const Signed before = signed_of(n.before), after = signed_of(n.after);
                            for (int row = 0; row < count; row++) {
                                const Bytes one = with_signs(word_of(x + 4 * row), &before);
                                const Bytes other = with_signs(word_of(x + 4 * (count + row)), &after);
                                Sums *sum = &sums[row][part];
                                *sum = add_pairs(*sum, pairs(before.magnitude, one));
                                *sum = add_pairs(*sum, pairs(after.magnitude, other));
                            }
                            continue;
                        }
                        for (int row = 0; row < count; row++) {
                            Shorts *sum = &shorts[row][part];
                            const Shorts first = pairs(n.before, word_of(x + 4 * row));
                            *sum = (word % each ? *sum + first : first) +
                                   pairs(n.after, word_of(x + 4 * (count + row)));
                        }
                    }
                    for (int row = 0; !large && (word + 2) % each == 0 && row < count; row++)
                        for (int part = 0; part < together; part++)
                            sums[row][part] = add_pairs(sums[row][part], shorts[row][part]);
                }
            }
            for (int row = 0; row < count; row++)
                memcpy((char *)(dots + half * count + row) + start * REGISTER, sums[row],
                       (size_t)together * REGISTER);
        }
    }
    at->weights = unit, at->codes = x;
}

#include "matmul_groups.h"

const MatmulKernel MATMUL = {MOST, 8, BYTES, 1, activate_row, quantize_row, piece};
