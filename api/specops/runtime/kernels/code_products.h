// The products of attention over a cache of 8 bits, in integers:
//
//   out[row][column] = start[row] + sum over k of x[row][k] * bytes[k][column]
//
// Bytes are unsigned and in groups of four: [k / 4][column][4]. A row's numbers are in the form that the
// processor's instruction multiplies by four bytes: a word with four of 8 bits, or two with pairs of 16, the
// first and third number, and `odd` words after it the others. All sums fit into 32 bits, so they are the same
// in any order and on every processor. Tiles are as large as the registers allow.

#ifndef SPECOPS_CODE_PRODUCTS_H
#define SPECOPS_CODE_PRODUCTS_H

#include "attention.h"
#include "vectors.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// BYTEWISE: one instruction multiplies four signed numbers of 8 bits. Others multiply pairs of 16 bits.
#if defined(__AVX512VNNI__) && !defined(HALF_REGISTERS)
#define CODE_REGISTER 64
enum { BYTEWISE = 1, CODE_ROWS = 6, CODE_PARTS = 4 };
#elif defined(__AVX512BW__) && !defined(HALF_REGISTERS)
#define CODE_REGISTER 64
enum { BYTEWISE = 0, CODE_ROWS = 4, CODE_PARTS = 4 };
#elif defined(__AVXVNNI__) || defined(HALF_REGISTERS)
#define CODE_REGISTER 32
enum { BYTEWISE = 1, CODE_ROWS = 6, CODE_PARTS = 2 };
#elif defined(__AVX2__)
#define CODE_REGISTER 32
enum { BYTEWISE = 0, CODE_ROWS = 4, CODE_PARTS = 2 };
#elif defined(__ARM_FEATURE_DOTPROD)
#define CODE_REGISTER 16
enum { BYTEWISE = 1, CODE_ROWS = 6, CODE_PARTS = 4 };
#else
#define CODE_REGISTER 16
enum { BYTEWISE = 0, CODE_ROWS = 4, CODE_PARTS = 1 };
#endif

// Columns of a register, and words of 32 bits for four numbers of a row.
enum { PART = CODE_REGISTER / 4, WORDS = BYTEWISE ? 1 : 2 };
// The number added to codes of the cache, and the part of it that NEON's signed products see.
enum { RAISED = 128 };
#if defined(__ARM_FEATURE_DOTPROD)
enum { SEEN_RAISED = 0 };
#else
enum { SEEN_RAISED = RAISED };
#endif

typedef int32_t Part __attribute__((vector_size(CODE_REGISTER)));
typedef uint8_t PartBytes __attribute__((vector_size(CODE_REGISTER)));
typedef uint16_t PartPairs __attribute__((vector_size(CODE_REGISTER)));
typedef int32_t PartAt __attribute__((vector_size(CODE_REGISTER), aligned(1), may_alias));

// Four bytes of each column, in the form for multiplication: pairs have the even and the odd bytes.
typedef struct {
    Part even, odd;
} Fours;

INLINE Fours fours_at(const uint8_t *from) {
    const Part bytes = *(const PartAt *)from;
    if (!BYTEWISE) return (Fours){(Part)((PartPairs)bytes & 255), (Part)((PartPairs)bytes >> 8)};
    return (Fours){(Part)((PartBytes)bytes ^ (uint8_t)(RAISED - SEEN_RAISED)), (Part){0}};
}

INLINE Part multiply_pairs(Part pairs, Part x) {
#if CODE_REGISTER == 64
    return (Part)_mm512_madd_epi16((__m512i)pairs, (__m512i)x);
#elif CODE_REGISTER == 32
    return (Part)_mm256_madd_epi16((__m256i)pairs, (__m256i)x);
#elif defined(__x86_64__)
    return (Part)_mm_madd_epi16((__m128i)pairs, (__m128i)x);
#elif defined(__aarch64__)
    const int16x8_t a = (int16x8_t)pairs, b = (int16x8_t)x;
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
#else
    typedef uint32_t Unsigned __attribute__((vector_size(CODE_REGISTER)));
    return ((Part)((Unsigned)pairs << 16) >> 16) * ((Part)((Unsigned)x << 16) >> 16) +
           (pairs >> 16) * (x >> 16);
#endif
}

INLINE Part add_dots(Part sums, Fours fours, const int32_t *x, int64_t to_odd) {
    (void)to_odd;
    const Part even = (Part){0} + x[0];
#if defined(__AVXVNNI__)
    return (Part)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)fours.even, (__m256i)even);
#elif defined(HALF_REGISTERS)  // the same by the instruction of AVX512-VNNI, for tests
    return (Part)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)fours.even, (__m256i)even);
#elif defined(__AVX512VNNI__)
    return (Part)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)fours.even, (__m512i)even);
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, (int8x16_t)fours.even, (int8x16_t)even);
#else
    const Part odd = (Part){0} + x[to_odd];
    return sums + multiply_pairs(fours.even, even) + multiply_pairs(fours.odd, odd);
#endif
}

// `bytes` are those of some blocks, each with a number of fours of k; `step` bytes are between fours. Meanwhile
// the product prefetches as many bytes of `ahead`. Strides count words.
typedef struct {
    int32_t *out;
    const int32_t *starts, *x;
    const uint8_t *const *bytes, *const *ahead;
    int64_t out_stride, x_stride, odd, blocks, fours, step;
} CodeProduct;

// Prefetches `lines` lines ahead of each four, from number `line` on.
INLINE void code_tile(const int rows, const int parts, const CodeProduct *p, int64_t row, int64_t part,
                      int64_t line, int64_t lines) {
    Part sums[CODE_ROWS][CODE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < parts; i++) sums[r][i] = (Part){0} + p->starts[row + r];
    const int32_t *x = p->x + row * p->x_stride;
    for (int64_t block = 0; block < p->blocks; block++) {
        const uint8_t *bytes = p->bytes[block] + part * CODE_REGISTER;
        const uint8_t *ahead = p->ahead[block] + part * CODE_REGISTER * p->fours + line * 64;
        for (int64_t k = 0; k < p->fours; k++) {
            for (int64_t i = 0; i < lines; i++) prefetch(ahead + i * 64);
            Fours fours[CODE_PARTS];
            for (int i = 0; i < parts; i++) fours[i] = fours_at(bytes + i * CODE_REGISTER);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < parts; i++)
                    sums[r][i] = add_dots(sums[r][i], fours[i], x + r * p->x_stride, p->odd);
            x++, bytes += p->step, ahead += parts * CODE_REGISTER;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < parts; i++)
            *(PartAt *)(p->out + (row + r) * p->out_stride + (part + i) * PART) = sums[r][i];
}

#define CODE_TILE(ROWS, PARTS)                                                            \
    if (ROWS <= CODE_ROWS && rows == ROWS && parts == PARTS)                              \
        code_tile(ROWS <= CODE_ROWS ? ROWS : 1, PARTS, p, row, part, line, lines);

// Tiles have about as many rows as each other. They share the lines to prefetch, so that the memory works
// during all of them: 4 tokens behind 4,000 take 0.78 of the time (9 heads of 64 over 3, AMD EPYC, Zen 5).
static __attribute__((noinline)) void multiply_codes(const CodeProduct *p, int64_t all_rows,
                                                     int64_t columns) {
    const int64_t tiles = (all_rows + CODE_ROWS - 1) / CODE_ROWS;
    for (int64_t part = 0, parts; part < columns / PART; part += parts) {
        parts = columns / PART - part < CODE_PARTS ? 1 : CODE_PARTS;
        const int64_t all_lines = (parts * CODE_REGISTER + 63) / 64, each = (all_lines + tiles - 1) / tiles;
        for (int64_t row = 0, line = 0, rows; row < all_rows; row += rows, line += each) {
            const int64_t lines = line < all_lines ? each : 0, left = tiles - line / each;
            rows = (all_rows - row + left - 1) / left;
            CODE_TILE(6, CODE_PARTS) CODE_TILE(5, CODE_PARTS) CODE_TILE(4, CODE_PARTS)
            CODE_TILE(3, CODE_PARTS) CODE_TILE(2, CODE_PARTS) CODE_TILE(1, CODE_PARTS)
#if CODE_REGISTER == 64
            CODE_TILE(6, 1) CODE_TILE(5, 1) CODE_TILE(4, 1) CODE_TILE(3, 1) CODE_TILE(2, 1) CODE_TILE(1, 1)
#endif
        }
    }
}

// Writes sixteen numbers of a row, which the instruction can take, as its words.
INLINE void to_words(int32_t *words, int64_t to_odd, Ints numbers) {
    if (BYTEWISE) *(CodesAt *)words = __builtin_convertvector(numbers, Codes);
    else {
        typedef int16_t Shorts __attribute__((vector_size(32)));
        const Ints parted = LANES_OF(numbers, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        const Shorts shorts = __builtin_convertvector(parted, Shorts);
        memcpy(words, &shorts, 16), memcpy(words + to_odd, (const char *)&shorts + 16, 16);
    }
}

#endif
