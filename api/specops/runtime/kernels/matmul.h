// Products of activations and blockwise quantized weights: a model spends most of its time here.
//
// tiles.h describes the layout of weights and the arithmetic: which steps are exact, and in what order the
// others are rounded. Activations are rounded to 8 bits, with one scale per row and block, as MatMulNBits
// does with accuracy_level 4. Products within a block are exact integers, and blocks are added in order.
// Float products are rounded before they are added, which every processor can do. So a row's result
// depends neither on other rows nor on the processor.
//
// One product may have several matrices with the same input, its segments, each with its own type of
// weights: a model's query, key and value, or its gate and up projection.

#ifndef SPECOPS_MATMUL_H
#define SPECOPS_MATMUL_H

#include <stdint.h>
#include <string.h>

#include "threads.h"
#include "tiles.h"

enum { MAX_SEGMENTS = 8 };
// Kinds of inputs. No product has the last one.
enum { AS_IT_IS, NORM, LAYER_NORM, GELU, SILU_GATE, GELU_GATE, OUTPUT_GATE, SOFT_CAP };
#define TINY 1e-30f  // 127 / x overflows below it, so a block of smaller numbers is zeros

// The sums of activations' codes that kernels need, by the weights' form; one number a block, or two,
// for its first and last 16, if weights have a scale for each 16.
//   STARTS  no offsets: the sums of products start with -middle * sum
//   SUMS    zero points: sum; minima for each 16: sum, as a float32, which holds it exactly
//   SCALED  offsets: the activations' scale * sum
enum { STARTS, SUMS, SCALED };
typedef union {
    int32_t whole;
    float scaled;
} Term;
typedef struct {
    int kind, halves;     // halves: 1 or 2 numbers a block
    int middle, lowered;  // for STARTS; `lowered`: the number that a kernel with signed numbers has subtracted
    Term *at;
} Terms;

// A matrix among those of a product.
typedef struct {
    Form form;
    int64_t columns;      // N
    int64_t tiles, size;  // number of tiles, and bytes of each
    int64_t bytes_before, columns_before;  // of the segments before it
    int terms;            // which of the product's terms it needs
} Segment;

// The weights of a product, with the segments' tiles one after the other.
typedef struct {
    int64_t depth, block, blocks;   // K, cut into blocks
    int64_t columns, tiles, bytes;  // of all segments
    int count, kinds;               // of segments, and of the terms that they need
    Segment segments[MAX_SEGMENTS];
    Terms terms[MAX_SEGMENTS];
} Weights;

// Fills in the weights' description. Returns an error message; NULL: no error.
const char *describe_weights(Weights *weights, int64_t depth, int64_t block, int64_t count,
                             const int64_t *columns, const int64_t *types);

// The input of a product or a norm. `activated` and `sum` have K numbers a row and may be NULL.
//   AS_IT_IS   x [rows, K]
//   NORM       s / sqrt(mean of s^2 + epsilon) * weight[k], with s = x, plus `residual` [rows, K]
//              unless that is NULL; `sum` gets s
//   LAYER_NORM d / sqrt(mean of d^2 + epsilon) * weight[k] + shift[k], with d = s - mean of s;
//              `shift` may be NULL
//   GELU       GELU of x, by its approximation with tanh
//   SILU_GATE  x[0, K) * sigmoid(x[0, K)) * x[K, 2 K), of x [rows, 2 K]
//   GELU_GATE  likewise, with GELU by its approximation with tanh
//   OUTPUT_GATE  x * sigmoid(residual), both [rows, K]
//   SOFT_CAP   cap * tanh(x / cap), with cap = weight[0]
// `activated` gets the numbers to multiply, except for AS_IT_IS.
typedef struct {
    int kind;
    const float *x, *residual, *weight, *shift;
    float epsilon;
    float *sum, *activated;
} Input;

// Rows of activations in 8 bits; K is padded to whole blocks with zeros. Rows are in groups of `width`
// rows; the last group has the rest. A group of n rows from row `first` on has
//   codes   [K / 4][n][4] from first * pitch on, in the order in which a kernel reads them; see `bytes`
//   scales  [blocks][n] from first * blocks on
//   terms   [blocks][halves][n] from first * blocks * halves on, of each kind that segments need
typedef struct {
    int8_t *codes;
    float *scales;
    int64_t rows, width;
    int64_t depth, block, blocks;
    int64_t bytes, pitch;  // of a code, and of a row's codes
    int kinds;
    Terms terms[MAX_SEGMENTS];
} Activations;

// A piece of a product: `tiles` adjacent tiles of a segment, for some rows. `weights`, `bias` (which may be
// NULL) and `y` start at the first of these tiles, `y` also at row `first`, the first of a group; a row of
// `y` has `stride` numbers. The segment has `columns` columns from there on.
typedef struct {
    const Segment *segment;
    const uint8_t *weights;
    const Activations *x;
    const float *bias;
    float *y;
    int64_t stride, tiles, columns;
    int64_t first, rows;
} Piece;

// The kernel for one kind of processor.
typedef struct {
    int64_t once;  // minimum number of rows for which weights are unpacked once for all groups
    int group;     // rows of a group then
    int most;      // rows of a group otherwise
    int step;      // ... which has a multiple of this number, or `most`
    int bytes;     // of a code of activations: 1, or more if the kernel stores it in another form
    // Whether codes of 8 bits and IQ4's numbers are multiplied as signed numbers; see `lowered_by`.
    int is_signed;
    // Computes a row of the input into `activated`; not for AS_IT_IS.
    void (*activate)(const Input *input, int64_t row, int64_t depth);
    // Computes blocks `start` to `stop` of row `first + row` of the input and rounds them; `first` is the
    // first row of a group of `count` rows.
    void (*quantize)(const Input *input, const Activations *x, int64_t first, int row, int count,
                     int64_t start, int64_t stop);
    void (*piece)(const Piece *piece);
} MatmulKernel;

// Number of terms that a block of a form adds to a row's total: one, or one for each 16 of K.
static inline int halves_of(const Form f) { return f.scales >= SIXTEEN ? 2 : 1; }

// The number that a kernel with signed numbers subtracts from codes of 8 bits and from IQ4's numbers. Those of
// E2M1 are at most 24.
static inline int lowered_by(const Form f) { return f.low == 8 ? 128 : f.table == IQ4 ? f.middle : 0; }

extern const MatmulKernel MATMUL_PLAIN, MATMUL_AVX2, MATMUL_AVX512, MATMUL_VNNI256, MATMUL_VNNI512;
extern const MatmulKernel MATMUL_DOTPROD, MATMUL_I8MM;

// y [rows, N] = input [rows, K] times the weights, plus `bias` [N] unless it is NULL. Returns 0, or -1
// if there is no memory.
int multiply(const MatmulKernel *kernel, const Weights *weights, const uint8_t *tiles,
             const float *bias, const Input *input, int64_t rows, float *y, Threads threads);

// Computes `rows` rows of an input, of K numbers each, without a product.
void activate_rows(const MatmulKernel *kernel, const Input *input, int64_t rows, int64_t depth,
                   Threads threads);

#endif
