// The product with which attention computes scores and values over a cache of floats:
//
//   out[row][lane] = out[row][lane] * factor[row] + sum over i of a[row][i] * b[i][lane]
//
// Each lane has its own sum, in the order of i, for any size of tile: no sum goes across lanes. Tiles are as large
// as the processor's registers allow. A single row has wider tiles, so that memory is read line after line.

#ifndef SPECOPS_PRODUCTS_H
#define SPECOPS_PRODUCTS_H

#include "attention.h"
#include "vectors.h"

// Up to FEW_HALVES rows, converting float16 again for each tile takes less time than writing a block of
// float32 that all tiles read: passes of 8 and 14 tokens of the demo pair take 0.93 and 0.96 of the time
// with 512 bits, 0.95 and 0.96 with 256.
#if defined(__AVX512F__)
enum { TILE_ROWS = 4, TILE_VECTORS = 4, WIDE_VECTORS = 8, FEW_HALVES = 16 };
#elif defined(__AVX2__) || defined(__aarch64__)
enum { TILE_ROWS = 2, TILE_VECTORS = 2, WIDE_VECTORS = 4, FEW_HALVES = 8 };
#else
enum { TILE_ROWS = 1, TILE_VECTORS = 2, WIDE_VECTORS = 2, FEW_HALVES = 1 };
#endif

// Sixteen elements of the cache from number `index` on.
INLINE Floats element(const int type, const void *from, int64_t index) {
    if (type == KV_FLOAT32) return load((const float *)from + index);
    return from_halves((const uint16_t *)from + index);
}

// The number at `x` times a vector. With 512 bits each product reads the number from memory, while
// compilers would keep it in a register: 50 to 55 G instead of 43 G multiplications with additions a
// second on a core (AMD EPYC, Zen 4; 57 G if they were fused). A chunk of 96 after 1,000 takes 11 ms
// instead of 13.7 (32 heads of 64 over 4, float32, one thread).
INLINE Floats times(const float *x, Floats values) {
#if defined(__AVX512F__)
    Floats product;
    __asm__("vmulps %2%{1to16%}, %1, %0" : "=v"(product) : "v"(values), "m"(*x));
    return product;
#else
    return splat(*x) * values;
#endif
}

// `out` and `a` have strides in floats from row to row; b[i] starts at element i * step. Without factors the
// old `out` is ignored. The product prefetches `prefetched` bytes from `ahead` on for each vector of `b`.
typedef struct {
    float *out;
    const float *factors, *a;
    const void *b;
    const char *ahead;
    int64_t out_stride, a_stride, step, first, last, prefetched;
} Product;

INLINE void tile(const int rows, const int vectors, const int type, const int anew,
                 const Product *p, int64_t row, int64_t vector) {
    float *out = p->out + row * p->out_stride + vector * LANES;
    const float *a = p->a + row * p->a_stride;
    const int64_t first = vector * LANES, step = p->step;
    Floats sums[TILE_ROWS][WIDE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = anew ? (Floats){0}
                              : load(out + r * p->out_stride + v * LANES) * p->factors[row + r];
    const int64_t pair = row ? 0 : 2 * p->prefetched;  // the first rows prefetch for all
    const int pairs = vectors > 1 ? vectors / 2 : 1;
    const char *ahead = p->ahead + vector * p->prefetched * (p->last - p->first);
    for (int64_t i = p->first; i < p->last; i++, ahead += pair * pairs) {
        for (int v = 0; v < pairs; v++) prefetch(ahead + v * pair);
        Floats values[WIDE_VECTORS];
        for (int v = 0; v < vectors; v++)
            values[v] = element(type, p->b, first + i * step + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sums[r][v] += times(a + r * p->a_stride + i, values[v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(out + r * p->out_stride + v * LANES, sums[r][v]);
}

#define TILE_OF(ROWS, VECTORS)                                                            \
    if (ROWS <= TILE_ROWS && rows == ROWS && VECTORS <= most && vectors == VECTORS)       \
        tile(ROWS <= TILE_ROWS ? ROWS : 1, VECTORS <= WIDE_VECTORS ? VECTORS : 1, type, anew, p, \
             row, vector);

INLINE int64_t vectors_of(int64_t left, int64_t most) {
    return left >= most ? most : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// Number of rows of the next tile. The last two tiles have about the same height. Heads often come in threes: as one
// tile instead of two, 4 tokens of the demo pair after 700 take 0.96 of the time with float16 and 0.95 with 8 bits.
INLINE int64_t height_of_tile(int64_t left) {
    return left >= 2 * TILE_ROWS ? TILE_ROWS : left > TILE_ROWS ? (left + 1) / 2 : left;
}

INLINE void product_of(const int type, const int anew, const Product *p, int64_t all_rows,
                       int64_t all_vectors) {
    const int64_t most = all_rows == 1 ? WIDE_VECTORS : TILE_VECTORS;
    for (int64_t vector = 0, vectors; vector < all_vectors; vector += vectors) {
        vectors = vectors_of(all_vectors - vector, most);
        for (int64_t row = 0, rows; row < all_rows; row += rows) {
            rows = height_of_tile(all_rows - row);
            TILE_OF(4, 4) TILE_OF(4, 2) TILE_OF(4, 1)
            TILE_OF(3, 4) TILE_OF(3, 2) TILE_OF(3, 1)
            TILE_OF(2, 4) TILE_OF(2, 2) TILE_OF(2, 1)
            TILE_OF(1, 8) TILE_OF(1, 6) TILE_OF(1, 4) TILE_OF(1, 2) TILE_OF(1, 1)
        }
    }
}

// A function for each type; more variants would not be worth their code.
#define PRODUCT(NAME, TYPE, ANEW)                                                         \
    static __attribute__((noinline)) void NAME(const Product *p, int64_t rows, int64_t vectors) { \
        product_of(TYPE, ANEW, p, rows, vectors);                                         \
    }
PRODUCT(scores_float32, KV_FLOAT32, 1)
PRODUCT(scores_float16, KV_FLOAT16, 1)
PRODUCT(values_float32, KV_FLOAT32, 0)
PRODUCT(values_float16, KV_FLOAT16, 0)

typedef void Multiply(const Product *, int64_t rows, int64_t vectors);
static Multiply *const SCORES[] = {scores_float32, scores_float16};
static Multiply *const VALUES[] = {values_float32, values_float16};

#endif
