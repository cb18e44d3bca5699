// The functions that Python calls; they use the chosen kernels.

#include "quantize.h"
#include "processor.h"

void specops_grids(const float *weights, int64_t blocks, int64_t block, const float *importance,
                   float *scales, float *zero_points) {
    choose_processor()->quantize->grids(weights, blocks, block, importance, scales, zero_points);
}

void specops_codes(const float *weights, int64_t blocks, int64_t block, int bits,
                   const float *scales, const float *zero_points, uint8_t *codes) {
    choose_processor()->quantize->codes(weights, blocks, block, bits, scales, zero_points, codes);
}

void specops_compensate(const float *weights, const float *target, int64_t columns, int64_t rows,
                        const float *feedback, const float *scales, const float *zero_points,
                        float *errors, uint8_t *codes, int64_t pitch) {
    choose_processor()->quantize->compensate(weights, target, columns, rows, feedback, scales,
                                             zero_points, errors, codes, pitch);
}
