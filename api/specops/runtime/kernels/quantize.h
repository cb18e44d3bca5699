// Rounds a model's weights to 4 or 8 bits, for the converter.
//
// A block is `block` weights in a row, a multiple of 16 up to MAX_BLOCK, that share one scale. A weight
// is stored as round(weight / scale) + zero point. Weights are finite; the scale of a block of zeros is 0.

#ifndef SPECOPS_QUANTIZE_H
#define SPECOPS_QUANTIZE_H

#include "matmul.h"  // MAX_BLOCK, TINY

// The kernel for one kind of processor.
typedef struct {
    // Finds the scale and the zero point of 4-bit codes with the least squared error for [blocks] blocks.
    // `importance` [block]: a factor of each square; NULL: 1.
    void (*grids)(const float *weights, int64_t blocks, int64_t block, const float *importance,
                  float *scales, float *zero_points);
    // Rounds [blocks] blocks. 4 bits: to codes from 0 to 15, two in a byte, the earlier one in the low
    // half. 8 bits: to codes from 1 to 255 with the zero point 128; `zero_points` is not read.
    void (*codes)(const float *weights, int64_t blocks, int64_t block, int bits, const float *scales,
                  const float *zero_points, uint8_t *codes);
    // Rounds the columns of a block, up to MAX_BLOCK, one after the other. Before column c is rounded,
    // feedback[c][j] times the error of each earlier column j is added to it.
    //
    //   weights: [columns, rows].
    //   target: [columns, rows], the weights with the additions of earlier blocks.
    //   feedback: [columns, columns].
    //   scales, zero_points: [rows].
    //   errors: [columns, rows], gets each weight minus its rounded value.
    //   codes: gets a byte for each weight; those of row r start at r * pitch.
    void (*compensate)(const float *weights, const float *target, int64_t columns, int64_t rows,
                       const float *feedback, const float *scales, const float *zero_points,
                       float *errors, uint8_t *codes, int64_t pitch);
} QuantizeKernel;

extern const QuantizeKernel QUANTIZE_AVX512, QUANTIZE_AVX2, QUANTIZE_PLAIN;

#endif
