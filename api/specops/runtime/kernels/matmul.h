// Products of activations and blockwise quantized weights: a model spends most of its time here.
//
// y[m, n] = sum over k of x[m, k] * scale[n, k / block] * (code[n, k] - zero_point[n, k / block])
//
// Activations are rounded to 8 bits, with one scale per row and block, as MatMulNBits does with
// accuracy_level 4. Products within a block are exact integers and blocks are added in order. Float
// products are rounded before they are added, which every processor can do. So a row's result depends
// neither on the rows beside it nor on the processor.
//
// Weights lie in tiles of 16 columns, which is a vector of floats, one tile after another. A tile has,
// for each block of K in order:
//   codes   lines of 64 bytes, 4 for each column: four codes of 8 bits, k to k + 3; or eight of
//           4 bits, k to k + 3 in the low halves and k + 4 to k + 7 in the high ones
//   scales  16 float32
//   zero points, if they are fractions: 16 float32
// If float16 holds all these numbers of a product exactly, the tile has instead one line behind
//   each block, if zero points are fractions: 16 scales and 16 offsets in float16
//   every second block, if not: 16 scales of that block and 16 of the next, in float16
// Behind the last block come, if zero points are codes, the codes of all blocks: 16 uint8 a block,
// padded to whole lines. Columns and K beyond the matrix are zeros.
//
// Fractions come from formats that store scale * code + offset: zero point -offset / scale. With
// fractions a block's product is (dot - zero_point * sum) * (scale[n] * scale[m]), each step rounded to
// float32. `dot` is the sum of products and `sum` the sum of the activations' codes; float32 holds
// both integers. From an offset in float16 a kernel computes the zero point by one division, which
// float32 rounds alike everywhere; if a scale is 0, the zero point is 0, too.

#ifndef SPECOPS_MATMUL_H
#define SPECOPS_MATMUL_H

#include <stdint.h>
#include <string.h>

#include "threads.h"

enum { TILE = 16, LINE = 64, AHEAD = 16384, MOST_BLOCK = 256, MOST_SIDE = 1 << 24 };
enum { FEWEST_WIDE = 16 };  // rows that fill a matrix of AMX
enum { MIDDLE = 0, CODES = 1, FRACTIONS = 2 };  // zero points: the middle of the range, or stored
enum { AS_IT_IS, NORM, LAYER_NORM, GELU, SILU_GATE, GELU_GATE };  // kinds of inputs
#define TINY 1e-30f  // 127 / x overflows below it, so a block of smaller numbers is zeros

typedef struct {
    int64_t columns, depth;  // N and K
    int64_t block;           // of K; a multiple of 32, so small that float32 holds its sums
    int bits;                // 4 or 8
    int zero_points;         // MIDDLE, CODES or FRACTIONS
    int half_scales;         // whether scales, and offsets instead of fractions, are float16
} Shape;

// The input of a product or a norm. `activated` and `sum` have K numbers a row and may be NULL.
//   AS_IT_IS   x [rows, K]
//   NORM       s / sqrt(mean of s^2 + epsilon) * weight[k], with s = x, plus `residual` [rows, K]
//              unless that is NULL; `sum` gets s
//   LAYER_NORM d / sqrt(mean of d^2 + epsilon) * weight[k] + shift[k], with d = s - mean of s;
//              `shift` may be NULL
//   GELU       GELU of x, by its approximation with tanh
//   SILU_GATE  x[0, K) * sigmoid(x[0, K)) * x[K, 2 K), of x [rows, 2 K]
//   GELU_GATE  likewise, with GELU by its approximation with tanh
// `activated` gets the numbers to multiply, except for AS_IT_IS.
typedef struct {
    int kind;
    const float *x, *residual, *weight, *shift;
    float epsilon;
    float *sum, *activated;
} Input;

// Rows of activations in 8 bits; K is padded to whole blocks with zeros. Rows come in groups, all as
// wide as the first one but the last, which has the rest. A group of n rows from row `first` on has
//   codes   [K / 4][n][4] from first * K on, in the order in which a kernel reads them; see `by_row`
//           and `bytes`
//   scales  [blocks][n] from first * blocks on
//   sums    likewise: the sum of a block's codes, for the zero points
typedef struct {
    int8_t *codes;
    float *scales;
    int32_t *sums;
    int64_t rows;
} Activations;

// A piece of a product: `tiles` tiles side by side for some rows. `weights`, `bias`, which may be NULL, and
// `y` [rows, N] begin at its first tile, `y` also at row `first`, with which a group begins. The matrix
// has `columns` columns from there on. Prefetches end at `end`.
typedef struct {
    const Shape *shape;
    const uint8_t *weights, *end;
    const Activations *x;
    const float *bias;
    float *y;
    int64_t tiles, columns;
    int64_t first, rows, width;  // `width` rows are a group
} Piece;

// The kernel for one kind of processor.
typedef struct MatmulKernel {
    int most;    // rows of a group
    int step;    // a group has a multiple of so many rows, or `most`
    int by_row;  // whether activations' codes lie row by row instead, [n][K], with a LINE behind each row
    // Bytes of a code of activations, for weights of 4 and of 8 bits: 1, or more if the kernel stores it
    // in another form.
    int bytes[2];
    // Computes a row of the input into `activated`; not for AS_IT_IS.
    void (*activate)(const Input *input, int64_t row, int64_t depth);
    // Computes a row of the input and rounds it to codes, four of them every `stride` bytes. The scale of
    // each block, and the sum of its codes, go into every `step`th place.
    void (*quantize)(const Input *input, int64_t row, const Shape *shape, int8_t *codes,
                     int64_t stride, float *scales, int32_t *sums, int64_t step);
    void (*piece)(const Piece *piece);
    const struct MatmulKernel *narrow;  // for fewer rows than FEWEST_WIDE; NULL: this kernel
} MatmulKernel;

static inline int64_t blocks_of(const Shape *shape) {
    return (shape->depth + shape->block - 1) / shape->block;
}

// Bytes of a code of activations in the form in which the kernel stores it for these weights.
static inline int64_t activation_bytes(const MatmulKernel *kernel, const Shape *shape) {
    return kernel->bytes[shape->bits == 8];
}

static inline int64_t code_bytes(const Shape *shape) {
    return shape->block * shape->bits / 8 * TILE;
}

// Bytes of a tile's blocks with their scales.
static inline int64_t bytes_of_blocks(const Shape *shape) {
    const int64_t blocks = blocks_of(shape), fractions = shape->zero_points == FRACTIONS;
    int64_t lines = fractions ? 2 * blocks : blocks;
    if (shape->half_scales) lines = (lines + 1) / 2;
    return blocks * code_bytes(shape) + lines * LINE;
}

static inline int64_t tile_bytes(const Shape *shape) {
    const int64_t zero_points = shape->zero_points == CODES ? blocks_of(shape) * TILE : 0;
    return bytes_of_blocks(shape) + (zero_points + LINE - 1) / LINE * LINE;
}

static inline int64_t tiles_of(const Shape *shape) { return (shape->columns + TILE - 1) / TILE; }

// Codes of a block of tiny numbers, or of one with an infinite number or a NaN; its scale is 0 or NaN.
static inline void no_codes(int8_t *codes, int64_t block, int64_t stride) {
    for (int64_t k = 0; k < block; k += 4) memset(codes + k / 4 * stride, 0, 4);
}

// What a tile's kernel reads of activations, and of zero points that are codes, from the first block on.
typedef struct {
    const int8_t *codes;
    const float *scales;
    const int32_t *sums;
    const uint8_t *zero_points;
} Operands;

// Bytes of a row's codes.
static inline int64_t row_bytes(const MatmulKernel *kernel, const Shape *shape) {
    const int64_t codes = blocks_of(shape) * shape->block * activation_bytes(kernel, shape);
    return kernel->by_row ? codes + LINE : codes;  // a power of two would use few sets of a cache
}

// The operands of the group from row `first` on; `bytes` of a code as in the kernel.
static inline Operands operands_of(const Shape *shape, const uint8_t *weights,
                                   const Activations *x, int64_t first, int64_t bytes) {
    const int64_t blocks = blocks_of(shape);
    return (Operands){x->codes + first * blocks * shape->block * bytes, x->scales + first * blocks,
                      x->sums + first * blocks, weights + bytes_of_blocks(shape)};
}

extern const MatmulKernel MATMUL_PLAIN, MATMUL_AVX2, MATMUL_AVX512, MATMUL_VNNI256, MATMUL_VNNI512;
extern const MatmulKernel MATMUL_AMX, MATMUL_DOTPROD, MATMUL_I8MM;

// y [rows, N] = input [rows, K] times the weights, plus `bias` [N] unless it is NULL. Returns 0, or -1
// if there is no memory.
int multiply(const MatmulKernel *kernel, const Shape *shape, const uint8_t *weights,
             const float *bias, const Input *input, int64_t rows, float *y, Threads threads);

// Computes `rows` rows of an input, of K numbers each, without a product.
void activate_rows(const MatmulKernel *kernel, const Input *input, int64_t rows, int64_t depth,
                   Threads threads);

#endif
