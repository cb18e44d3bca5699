// What all kernels of products share: unpacking the planes of codes, reading scales, and adding a block's
// products to the totals of rows. It is written with the compiler's vectors, so each rounding is the same
// by construction.
//
// A kernel that multiplies whole lines of 8 bits calls `unpack_unit` for any type: see its comment.

#ifndef SPECOPS_MATMUL_KERNEL_H
#define SPECOPS_MATMUL_KERNEL_H

#include "matmul_input.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

// -- codes -----------------------------------------------------------------------------------------

// The planes of a form, constants where a kernel's code depends on them; whether there is a table.
typedef struct {
    int low, twos, ones, table;
} Planes;

// DO(LOW, TWOS, ONES, TABLE) for each combination of planes and tables that a type has, and a key of it.
#define EACH_PLANES(DO)                                                                   \
    DO(4, 0, 0, 0) DO(4, 0, 0, 1) DO(4, 0, 1, 0) DO(4, 2, 0, 0) DO(8, 0, 0, 0) DO(0, 2, 0, 0) DO(0, 2, 1, 0)
#define PLANES_KEY(LOW, TWOS, ONES, TABLE) ((LOW) << 4 | (TWOS) << 2 | (ONES) << 1 | (TABLE))

static inline int planes_key(const Form *f) {
    return PLANES_KEY(f->low, f->twos, f->ones, f->table != NO_TABLE);
}

// A kernel defines REGISTER, the bytes of its registers, before it includes this file.
typedef uint8_t Bytes __attribute__((vector_size(REGISTER)));
typedef uint16_t BytePairs __attribute__((vector_size(REGISTER)));
typedef uint8_t BytesAt __attribute__((vector_size(REGISTER), aligned(1), may_alias));

INLINE Bytes bytes_at(const uint8_t *from) { return *(const BytesAt *)from; }

// The table's numbers in each 16 bytes of a register, less `lowered`.
INLINE Bytes table_of(const int table, int lowered) {
    static const uint8_t VALUES[][16] = {{0}, {IQ4_VALUES}, {E2M1_VALUES}};
    Bytes spread;
    for (int i = 0; i < REGISTER; i++) spread[i] = (uint8_t)(VALUES[table][i % 16] - lowered);
    return spread;
}

INLINE Bytes look_up(Bytes table, Bytes codes) {
#if defined(__aarch64__)
    return vqtbl1q_u8(table, codes);
#elif defined(__AVX512BW__) && REGISTER == 64
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__) && REGISTER == 32
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#else
    Bytes found;
    for (int i = 0; i < REGISTER; i++) found[i] = table[codes[i]];
    return found;
#endif
}

// `count` bits of each byte, from bit `from` on, moved to bit `to`.
INLINE Bytes moved(Bytes bytes, const int count, const int from, const int to) {
    const BytePairs pairs = (BytePairs)bytes;
    const Bytes shifted = (Bytes)(from < to ? pairs << (to - from) : pairs >> (from - to));
    return shifted & (uint8_t)(((1 << count) - 1) << to);
}

// Numbers 8 step to 8 step + 7 of K of a unit, for a register's columns: the first four and the others.
// `unit` begins at the register's part of the unit's first line.
typedef struct {
    Bytes before, after;
} Numbers;

INLINE Numbers numbers_of(const Planes p, Bytes table, const uint8_t *unit, const int step) {
    Numbers n = {{0}, {0}};
    const uint8_t *twos = unit + p.low * LINE, *ones = twos + p.twos * LINE;
    if (p.low == 8) return (Numbers){bytes_at(unit + 2 * step * LINE), bytes_at(unit + (2 * step + 1) * LINE)};
    if (p.low == 4) {
        const Bytes both = bytes_at(unit + step * LINE);
        n.before = both & 15, n.after = moved(both, 4, 4, 0);
    }
    if (p.table) n.before = look_up(table, n.before), n.after = look_up(table, n.after);
    if (p.twos) {
        const Bytes both = bytes_at(twos + step / 2 * LINE);
        n.before |= moved(both, 2, step % 2 * 4, p.low), n.after |= moved(both, 2, step % 2 * 4 + 2, p.low);
    }
    if (p.ones) {
        const Bytes all = bytes_at(ones);
        n.before |= moved(all, 1, 2 * step, p.low + p.twos);
        n.after |= moved(all, 1, 2 * step + 1, p.low + p.twos);
    }
    return n;
}

// Bytes of a unit, 32 of K.
INLINE int64_t unit_bytes(const Planes p) { return (int64_t)(p.low + p.twos + p.ones) * LINE; }

// Unpacks a unit of any type to 8 lines: byte 4 c + i of line l has the number of k = 4 l + i of column c,
// unsigned, a table's numbers included. A kernel multiplies them by activations' codes, adds the start
// of a row (see Terms) and passes the sums to `add_block`.
INLINE void unpack_unit(const Planes p, Bytes table, const uint8_t *unit, uint8_t *lines) {
    for (int part = 0; part < LINE / REGISTER; part++) {
        UNROLLED
        for (int step = 0; step < 4; step++) {
            const Numbers n = numbers_of(p, table, unit + part * REGISTER, step);
            *(BytesAt *)(lines + 2 * step * LINE + part * REGISTER) = n.before;
            *(BytesAt *)(lines + (2 * step + 1) * LINE + part * REGISTER) = n.after;
        }
    }
}

// -- scales ----------------------------------------------------------------------------------------

typedef uint8_t PointsAt __attribute__((vector_size(16), aligned(1), may_alias));

INLINE Floats from_points(const uint8_t *from) {
    return __builtin_convertvector(__builtin_convertvector(*(const PointsAt *)from, Ints), Floats);
}

INLINE Floats halves_at(const uint8_t *from) { return from_halves((const uint16_t *)from); }

INLINE Floats signed_at(const uint8_t *from) { return from_codes((const int8_t *)from); }

// 2^(e - 128) of 16 exponents; the two smallest are denormal.
INLINE Floats powers_at(const uint8_t *from) {
    const Ints e = __builtin_convertvector(*(const PointsAt *)from, Ints);
    const Words denormal = (Words)(e + 1) << 21, normal = (Words)(e - 1) << 23;
    return (Floats)choose_words(e < 2, denormal, normal);
}

// The header of a group of n blocks, and what its blocks add up to if weights have a scale for each 16.
typedef struct {
    const uint8_t *at;
    int64_t blocks, lines;
    Floats d, dmin;
} Header;

INLINE Header header_at(const Form *form, const uint8_t *at, int64_t blocks) {
    Header h = {at, blocks, header_bytes(*form, blocks) / LINE, {0}, {0}};
    if (form->scales >= BYTE) h.d = halves_at(at);
    if (form->scales == SIX_PAIR || form->scales == SIXTEEN_PAIR) h.dmin = halves_at(at + 32);
    return h;
}

// Adds block `b` of a group to the totals. `dots` [count] are each row's sums of products, with the tile's
// columns in lanes; `s` and `terms` [count] those of the activations.
//
// A loop for each kind of scales: in a single one the compiler keeps the sums of 8 rows in memory, and 8
// tokens of the demo pair take 1.6 times as long.
INLINE void add_block(const Planes p, const int lowered, const int count, const int form, const Header *h,
                      int64_t b, const Ints *dots, const float *s, const Term *terms, Floats *totals) {
    const uint8_t *const at = h->at, *const bytes = at + 16 * b;
    Floats scale, offset = {0}, zero = {0};
    int kind = STARTS;
    switch (form) {
        case HALF: scale = halves_at(at + 32 * b); break;
        case HALF_ZERO:
            kind = SUMS, scale = halves_at(at + 32 * b), zero = from_points(bytes + 32 * h->blocks);
            break;
        case FLOAT: scale = load((const float *)at + 16 * b); break;
        case FLOAT_ZERO:
            kind = SUMS, scale = load((const float *)at + 16 * b);
            zero = from_points(bytes + 64 * h->blocks);
            break;
        case HALF_PAIR:
            kind = SCALED, scale = halves_at(at + 64 * b), offset = halves_at(at + 64 * b + 32);
            break;
        case SIX_PAIR:
            kind = SCALED, scale = h->d * from_points(bytes + 64);
            offset = -(h->dmin * from_points(bytes + 64 + 16 * h->blocks));
            break;
        case BYTE: scale = h->d * signed_at(bytes + 32); break;
        default: scale = powers_at(bytes);
    }
    // Types of weights with a table have a scale only; those with a plane of ones have no zero points.
    if (!p.table && !p.ones && kind == SUMS) {
        if (lowered && p.low == 8) zero -= (float)lowered;
        for (int row = 0; row < count; row++) {
            const Floats dot = __builtin_convertvector(dots[row], Floats) - zero * terms[row].value;
            totals[row] = dot * (scale * s[row]) + totals[row];
        }
    } else if (!p.table && p.low == 4 && kind == SCALED) {
        for (int row = 0; row < count; row++) {
            const Floats dot = __builtin_convertvector(dots[row], Floats);
            totals[row] = (dot * (scale * s[row]) + offset * terms[row].value) + totals[row];
        }
    } else {
        for (int row = 0; row < count; row++) {
            const Floats dot = __builtin_convertvector(dots[row], Floats);
            totals[row] = dot * (scale * s[row]) + totals[row];
        }
    }
}

// The same for weights with a scale for each 16: `dots` [2][count], added to the group's `parts`, and
// their minima to `less`.
INLINE void add_sixteens(const int count, const int form, const Header *h, int64_t b, const Ints *dots,
                         const float *s, const Term *terms, Floats *parts, Floats *less) {
    const uint8_t *bytes = h->at + 64 + 32 * b;
    Floats scales[2], minima[2];
    for (int half = 0; half < 2; half++, bytes += 16) {
        const PointsAt both = *(const PointsAt *)bytes;
        const PointsAt low = both & 15, high = both >> 4;
        scales[half] = form == SIXTEEN ? signed_at(bytes) : from_points((const uint8_t *)&low);
        minima[half] = from_points((const uint8_t *)&high);
    }
    for (int row = 0; row < count; row++) {
        const Floats sum = __builtin_convertvector(dots[row], Floats) * scales[0] +
                           __builtin_convertvector(dots[count + row], Floats) * scales[1];
        parts[row] = sum * s[row] + parts[row];
    }
    for (int row = 0; form == SIXTEEN_PAIR && row < count; row++) {
        const Floats sum = minima[0] * terms[row].value + minima[1] * terms[count + row].value;
        less[row] = sum * s[row] + less[row];
    }
}

// Adds a whole group of them to the totals.
INLINE void add_group(const int count, const int form, const Header *h, const Floats *parts,
                      const Floats *less, Floats *totals) {
    for (int row = 0; row < count; row++) {
        const Floats part = parts[row] * h->d;
        totals[row] = (form == SIXTEEN ? part : part - less[row] * h->dmin) + totals[row];
    }
}

// Stores the rows of a tile, up to `columns` columns, plus the bias if there is one.
INLINE void put_rows(int64_t stride, const int count, const Floats *totals, const float *bias, float *y,
                     int columns) {
    const Floats added = bias ? load_first(bias, columns) : (Floats){0};
    for (int row = 0; row < count; row++)
        store_first(y + row * stride, columns, bias ? totals[row] + added : totals[row]);
}

// Prefetches weights: a processor by itself reads ahead within a page only, and tiles are short. At the
// distance AHEAD, lines are in the first cache when they are needed, and activations have not yet
// evicted them. TinyLlama's shape takes 0.84 of the time for 4 tokens, and 0.93 for 16, of what it took
// with a quarter of the distance (2 cores, AMD EPYC).
INLINE void prefetch(const uint8_t *weights, const uint8_t *end) {
    const uint8_t *ahead = weights + AHEAD;
    __builtin_prefetch(ahead < end ? ahead : weights);
}

// Prefetches a part of the group's header with each of its blocks: all at once they would wait.
INLINE void prefetch_header(const Header *h, int64_t b, const uint8_t *end) {
    for (int64_t line = b; line < h->lines; line += h->blocks) prefetch(h->at + line * LINE, end);
}

INLINE int32_t word_at(const int8_t *codes) {
    int32_t word;
    memcpy(&word, codes, 4);
    return word;
}

#endif
