// Shared by all product kernels: unpacks the planes of codes, reads scales, and adds a block's products to the
// totals of rows. It is written with the compiler's vectors, so each rounding is the same by construction.

#ifndef SPECOPS_MATMUL_KERNEL_H
#define SPECOPS_MATMUL_KERNEL_H

#include "matmul_input.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#define ROLLED _Pragma("GCC unroll 1")
#endif

// -- codes -----------------------------------------------------------------------------------------

// The constants on which a kernel's code depends: the planes of a form, its table, the kind of its terms, and
// whether the codes have been unpacked: a line for each 4 of K. Weights with a plane of twos have a scale for
// each 16 of K, and blocks of 32.
typedef struct {
    int low, twos, ones, table, kind, unpacked;
} Planes;

// DO(LOW, TWOS, ONES, TABLE, KIND) for each combination that a type has, and its key. Kinds as constants save
// the kernels a tenth of the time of one token from the cache; forms of scales would save nothing more.
#define EACH_PLANES(DO)                                                                   \
    DO(4, 0, 0, 0, STARTS) DO(4, 0, 0, 0, SUMS) DO(4, 0, 0, 0, SCALED) DO(8, 0, 0, 0, STARTS) \
    DO(8, 0, 0, 0, SUMS) DO(4, 0, 0, IQ4, STARTS) DO(4, 0, 0, E2M1, STARTS)               \
    DO(4, 0, 1, 0, STARTS) DO(4, 0, 1, 0, SCALED)                                         \
    DO(4, 2, 0, 0, STARTS) DO(0, 2, 0, 0, SUMS) DO(0, 2, 1, 0, STARTS)
#define PLANES_KEY(LOW, TWOS, ONES, TABLE, KIND) \
    ((KIND) << 10 | (TABLE) << 8 | (LOW) << 4 | (TWOS) << 2 | (ONES) << 1)

static inline int planes_key(const Form *f, int kind) {
    return PLANES_KEY(f->low, f->twos, f->ones, f->table, kind);
}

// Before it includes this file, a kernel defines REGISTER, the bytes of its registers, and LOWERED, the number
// that it subtracts from numbers of 8 bits.
typedef uint8_t Bytes __attribute__((vector_size(REGISTER)));
typedef uint16_t BytePairs __attribute__((vector_size(REGISTER)));
typedef uint8_t BytesAt __attribute__((vector_size(REGISTER), aligned(1), may_alias));

INLINE Bytes bytes_at(const uint8_t *from) { return *(const BytesAt *)from; }

// The table's numbers in each 16 bytes of a register, as the kernel multiplies them.
INLINE Bytes table_of(const Form f) {
    const uint8_t *numbers = numbers_of_table(f.table);
    Bytes spread;
    for (int i = 0; i < REGISTER; i++) spread[i] = (uint8_t)(numbers[i % 16] - (LOWERED ? lowered_by(f) : 0));
    return spread;
}

#if defined(__aarch64__)
INLINE Bytes look_up(Bytes table, Bytes codes) { return vqtbl1q_u8(table, codes); }
#elif defined(__AVX512BW__) && REGISTER == 64
INLINE Bytes look_up(Bytes table, Bytes codes) {
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
}
#elif defined(__AVX2__) && REGISTER == 32
INLINE Bytes look_up(Bytes table, Bytes codes) {
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
}
#else
static __attribute__((noinline)) Bytes look_up(Bytes table, Bytes codes) {
    uint8_t numbers[REGISTER], found[REGISTER];
    memcpy(numbers, &table, REGISTER), memcpy(found, &codes, REGISTER);
    for (int i = 0; i < REGISTER; i++) found[i] = numbers[found[i]];
    return bytes_at(found);
}
#endif

// `count` bits of each byte, from bit `from` on, moved to bit `to`.
INLINE Bytes moved(Bytes bytes, const int count, const int from, const int to) {
    const BytePairs pairs = (BytePairs)bytes;
    const Bytes shifted = (Bytes)(from < to ? pairs << (to - from) : pairs >> (from - to));
    return shifted & (uint8_t)(((1 << count) - 1) << to);
}

// Numbers 8 step to 8 step + 7 of K of a unit, for a register's columns: the first four and the others.
// `unit` points to the register's part of the unit's first line.
typedef struct {
    Bytes before, after;
} Numbers;

INLINE Numbers numbers_of(const Planes p, Bytes table, const uint8_t *unit, const int step) {
    Numbers n = {{0}, {0}};
    const uint8_t *twos = unit + p.low * LINE, *ones = twos + p.twos * LINE;
    if (p.low == 8)
        return (Numbers){bytes_at(unit + 2 * step * LINE) ^ LOWERED,
                         bytes_at(unit + (2 * step + 1) * LINE) ^ LOWERED};
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

// Whether a kernel without unsigned numbers of 8 bits multiplies magnitudes by codes with the numbers' signs.
INLINE int has_signs(const Planes p) { return p.low == 8 || p.table == IQ4; }

// Bytes of a unit, 32 of K. Unpacked numbers with signs have two lines each.
INLINE int64_t unit_bytes(const Planes p) {
    return (int64_t)(p.unpacked ? 8 << has_signs(p) : p.low + p.twos + p.ones) * LINE;
}

// -- scales ----------------------------------------------------------------------------------------

typedef uint8_t PointsAt __attribute__((vector_size(16), aligned(1), may_alias));

INLINE Ints points_at(const uint8_t *from) {
    return __builtin_convertvector(*(const PointsAt *)from, Ints);
}

INLINE Floats unsigned_at(const uint8_t *from) {
    return __builtin_convertvector(points_at(from), Floats);
}

#if defined(__F16C__) || defined(__AVX512F__) || defined(__aarch64__)
INLINE
#else
static __attribute__((noinline))
#endif
Floats halves_at(const uint8_t *from) { return from_halves((const uint16_t *)from); }

INLINE Floats signed_at(const uint8_t *from) { return from_codes((const int8_t *)from); }

// 2^(e - 128) of 16 exponents; the two smallest are denormal.
INLINE Floats powers_at(const uint8_t *from) {
    const Ints e = points_at(from);
    const Words denormal = (Words)(e + 1) << 21, normal = (Words)(e - 1) << 23;
    return (Floats)choose_words(e < 2, denormal, normal);
}

// The header of a group of blocks.
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

// The factors of a block's columns: scales and offsets or minima, two of each if there is one for each 16 of K;
// zero points; and the part that the products of unpacked numbers lack.
typedef struct {
    Floats scales[2], offsets[2];
    Ints zero, missing;
} Factors;

// The factors of block `b` of a group.
INLINE Factors factors_of(const Planes p, const int form, const Header *h, int64_t b) {
    const uint8_t *const at = h->at, *bytes = at + (p.twos ? 64 + 32 * b : 16 * b);
    const int kind = p.kind;
    Factors f = {0};
    if (p.twos) {
        for (int half = 0; half < 2; half++, bytes += 16) {
            const PointsAt both = *(const PointsAt *)bytes;
            const PointsAt low = both & 15, high = both >> 4;
            f.scales[half] = kind == STARTS ? signed_at(bytes) : unsigned_at((const uint8_t *)&low);
            f.offsets[half] = unsigned_at((const uint8_t *)&high);
        }
    } else if (kind == SUMS) {
        const int half = form == HALF_ZERO;
        f.scales[0] = half ? halves_at(at + 32 * b) : load((const float *)at + 16 * b);
        f.zero = points_at(bytes + (half ? 32 : 64) * h->blocks) - (p.low == 8 ? LOWERED : 0);
    } else if (kind == SCALED && form == SIX_PAIR) {
        f.scales[0] = h->d * unsigned_at(bytes + 64);
        f.offsets[0] = -(h->dmin * unsigned_at(bytes + 64 + 16 * h->blocks));
    } else if (kind == SCALED) {
        f.scales[0] = halves_at(at + 64 * b), f.offsets[0] = halves_at(at + 64 * b + 32);
    } else {
        f.scales[0] = form == HALF    ? halves_at(at + 32 * b)
                      : form == BYTE  ? h->d * signed_at(bytes + 32)
                      : form == FLOAT ? load((const float *)at + 16 * b)
                                      : powers_at(bytes);
    }
    return f;
}

// Adds a block to the totals. `dots` [count] are each row's sums of products, with the tile's columns in lanes;
// `s` and `terms` [count] those of the activations.
INLINE void add_block(const int kind, const int count, const Factors *f, const Ints *dots, const float *s,
                      const Term *terms, Floats *totals) {
    for (int row = 0; row < count; row++) {
        const Ints shifted = kind == SUMS ? dots[row] - f->zero * terms[row].whole : dots[row];
        Floats dot = __builtin_convertvector(shifted, Floats);
        dot *= f->scales[0] * s[row];
        if (kind == SCALED) dot += f->offsets[0] * terms[row].scaled;
        totals[row] = dot + totals[row];
    }
}

// The same for weights with a scale for each 16: `dots` [2][count], added to the group's `parts`, and
// minima, whose terms are SUMS, to `less`.
INLINE void add_sixteens(const int kind, const int count, const Factors *f, const Ints *dots, const float *s,
                         const Term *terms, Floats *parts, Floats *less) {
    for (int row = 0; row < count; row++) {
        const Floats sum = __builtin_convertvector(dots[row], Floats) * f->scales[0] +
                           __builtin_convertvector(dots[count + row], Floats) * f->scales[1];
        parts[row] = sum * s[row] + parts[row];
    }
    for (int row = 0; kind == SUMS && row < count; row++) {
        const Floats sum =
            f->offsets[0] * terms[row].scaled + f->offsets[1] * terms[count + row].scaled;
        less[row] = sum * s[row] + less[row];
    }
}

// Adds a whole group of them to the totals.
INLINE void add_group(const int kind, const int count, const Header *h, const Floats *parts,
                      const Floats *less, Floats *totals) {
    for (int row = 0; row < count; row++) {
        const Floats part = parts[row] * h->d;
        totals[row] = (kind == STARTS ? part : part - less[row] * h->dmin) + totals[row];
    }
}

// Stores the rows of a tile, up to `columns` columns, plus the bias if there is one.
INLINE void put_rows(int64_t stride, const int count, const Floats *totals, const float *bias, float *y,
                     int columns) {
    const Floats added = bias ? load_first(bias, columns) : (Floats){0};
    for (int row = 0; row < count; row++)
        store_first(y + row * stride, columns, bias ? totals[row] + added : totals[row]);
}

// How far ahead weights are prefetched, in bytes: a processor's own prefetcher stays within a page, and tiles are
// short. Activations of several rows evict lines that come too early from the first-level cache. After the last
// tile come the next product's weights, or a prefetch does nothing.
INLINE int64_t distance_of(const int rows) { return rows == 1 ? 8192 : 6144; }

// Where a kernel reads: codes of weights and of activations. Lines are prefetched in memory order, from `ahead` on,
// at each step as many as it reads on average. With headers' lines out of order, one token took 1.46 of the time
// with Q4_1, 1.14 with Q6_K, 1.05 with Q4_K (AMD EPYC, Zen 5).
typedef struct {
    const uint8_t *weights, *ahead;
    const int8_t *codes;
    const Ints *missing;  // for unpacked numbers with signs: the initial sums
} Cursor;

INLINE void prefetch_lines(Cursor *at, const int count) {
    for (int line = 0; line < count; line++, at->ahead += LINE) __builtin_prefetch(at->ahead);
}

INLINE int32_t word_at(const int8_t *codes) {
    int32_t word;
    memcpy(&word, codes, 4);
    return word;
}

#endif
