// Kernel for processors with an instruction that multiplies pairs of bytes and adds them in 16 bits:
// AVX2, and AVX-512 without VNNI. Products are added in 16 bits as long as the sum fits, then in 32.
// Numbers of 8 bits are signed here, but the instruction needs one unsigned side: it multiplies their
// magnitudes by the activations, which take their signs. setup.py compiles this file once for each.

#include <immintrin.h>

enum { LOWERED = 128 };
#if defined(__AVX512BW__)
#define REGISTER 64
#define WIDE(NAME) _mm512_##NAME
typedef __m512i Wide;
#else
#define REGISTER 32
#define WIDE(NAME) _mm256_##NAME
typedef __m256i Wide;
#endif

#include "matmul_kernel.h"

// See matmul_groups.h. For fewer than ONCE rows, unpacking once gains nothing.
#define ONCE 16
#if defined(SMALL_GROUPS)  // for tests' programs
enum { MOST = SMALL_GROUPS, GROUP = MOST, PASS = 5 * GROUP };
#else
enum { MOST = 9, GROUP = REGISTER / 8, PASS = 128 };
#endif
enum { HELD = 256, PARTS = LINE / REGISTER, BYTES = 1, WORDS = UNIT / 4 };
// Few rows compute a whole tile at once, to share the activations. More rows compute it part by part,
// so that the sums of all rows stay in registers.
#define TOGETHER(PLANES, COUNT) ((COUNT) <= 3 || (PLANES).unpacked ? PARTS : 1)

typedef int16_t Shorts __attribute__((vector_size(REGISTER)));
typedef int32_t Sums __attribute__((vector_size(REGISTER)));

// Keeps the order of additions: clang would compute more products first than there are registers.
#if defined(__AVX2__)
#define KEPT(VALUE) __asm__("" : "+v"(VALUE))
#else
#define KEPT(VALUE) (void)(VALUE)
#endif

// The sums of each column's pairs: its four numbers times the four codes of activations.
INLINE Shorts pairs(Bytes numbers, Bytes x) { return (Shorts)WIDE(maddubs_epi16)((Wide)numbers, (Wide)x); }

INLINE Bytes four_codes(const int8_t *x) { return (Bytes)((Sums){0} + word_at(x)); }

// Adds both sums of 16 bits to each column's sum.
INLINE Sums add_pairs(Sums sums, Shorts pairs) {
    return sums + (Sums)WIDE(madd_epi16)((Wide)pairs, (Wide)((Shorts){0} + 1));
}

// Four numbers of each column in the form for multiplication: unchanged, or as magnitudes, with codes of
// activations that take their signs. No code is -128.
typedef struct {
    Bytes magnitude, number;
} Word;

INLINE Word word_of(const Planes p, Bytes table, const uint8_t *unit, const int word) {
    if (p.unpacked) {
        const uint8_t *line = unit + (word << has_signs(p)) * LINE;
        return (Word){bytes_at(line), bytes_at(line + has_signs(p) * LINE)};
    }
    const Numbers n = numbers_of(p, table, unit, word / 2);
    const Bytes number = word % 2 ? n.after : n.before;
    return (Word){has_signs(p) ? (Bytes)WIDE(abs_epi8)((Wide)number) : number, number};
}

INLINE Bytes with_signs(const Planes p, Bytes x, const Word *of) {
    if (!has_signs(p)) return x;
    if (p.unpacked) return x ^ of->number;
#if defined(__AVX512BW__)
    const __mmask64 negative = _mm512_movepi8_mask((Wide)of->number);
    return (Bytes)_mm512_mask_sub_epi8((Wide)x, negative, (Wide){0}, (Wide)x);
#else
    return (Bytes)_mm256_sign_epi8((Wide)x, (Wide)of->number);
#endif
}

// Unpacks a unit to lines of numbers, or of magnitudes and of signs, 0 or -1. Where a number is negative, codes
// of activations are inverted bit by bit, which more units of a processor can do than flip signs. This turns x
// into -x - 1, so the magnitudes of negative numbers are missing: a sum per column, the same for all rows.
INLINE void unpack_unit(const Planes p, Bytes table, const uint8_t *unit, uint8_t *lines, Ints *missing) {
    typedef int8_t Signed __attribute__((vector_size(REGISTER)));
    Sums lack[PARTS];
    memcpy(lack, missing, sizeof lack);
    for (int word = 0; word < WORDS; word++)
        for (int part = 0; part < PARTS; part++) {
            const Word w = word_of(p, table, unit + part * REGISTER, word);
            const Bytes negative = (Bytes)((Signed)w.number < 0);
            uint8_t *line = lines + (word << has_signs(p)) * LINE + part * REGISTER;
            *(BytesAt *)line = w.magnitude;
            if (!has_signs(p)) continue;
            *(BytesAt *)(line + LINE) = negative;
            lack[part] = add_pairs(lack[part], pairs(w.magnitude, -negative));
        }
    memcpy(missing, lack, sizeof lack);
}

// See matmul_groups.h.
INLINE void multiply_block(const Planes p, const int count, Bytes table, int64_t units, Cursor *at,
                           const Term *starts, Ints *dots) {
    const int large = has_signs(p), bits = p.low + p.twos + p.ones;
    const int halves = p.twos ? 2 : 1, words = WORDS / halves, together = TOGETHER(p, count);
    // Words whose products a sum of 16 bits holds: a word adds at most 2 products of a number and 127.
    const int highest = p.table ? 24 : (1 << bits) - 1, fit = large ? 1 : 32767 / (2 * highest * 127);
    const int each = fit >= words ? words : fit >= 4 ? 4 : 2;
    const uint8_t *unit = NULL;
    const int8_t *x = NULL;
    ROLLED
    for (int start = 0; start < PARTS; start += together) {
        x = at->codes;
        UNROLLED
        for (int half = 0; half < halves; half++) {
            Sums sums[MOST][PARTS];
            for (int row = 0; row < count; row++)  // starts of numbers with signs are 0
                for (int part = 0; part < together; part++)
                    sums[row][part] = p.unpacked && large ? ((const Sums *)at->missing)[part]
                                      : (Sums){0} + (p.kind == STARTS ? starts[half * count + row].whole : 0);
            unit = at->weights;
            ROLLED
            for (int64_t number = 0; number < units; number++, unit += unit_bytes(p)) {
                Shorts shorts[MOST][PARTS];
                UNROLLED
                for (int word = 0; word < words; word++, x += 4 * count) {
                    const int nth = half * words + word, lines = bits / 4 + (nth / 2 < bits % 4);
                    if (!start && !p.unpacked && word % 2 == 0) prefetch_lines(at, lines);
                    Word w[PARTS];
                    for (int part = 0; part < together; part++)
                        w[part] = word_of(p, table, unit + (start + part) * REGISTER, nth);
                    for (int row = 0; row < count; row++) {
                        const Bytes codes = four_codes(x + 4 * row);
                        for (int part = 0; part < together; part++) {
                            const Shorts one = pairs(w[part].magnitude, with_signs(p, codes, &w[part]));
                            Shorts *sum = &shorts[row][part];
                            if (large) sums[row][part] = add_pairs(sums[row][part], one);
                            else *sum = word % each ? *sum + one : one;
                            if (large) KEPT(sums[row][part]);
                            else KEPT(*sum);
                        }
                    }
                    for (int row = 0; !large && (word + 1) % each == 0 && row < count; row++)
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

const MatmulKernel MATMUL = {ONCE, GROUP, MOST, 8, BYTES, 1, activate_row, quantize_row, piece};
