// Quantization for one kind of processor; setup.py compiles this file once for each.

#include "quantize.h"
#include "vectors.h"

enum { LAST = 15, MIDDLE_4 = 8, MIDDLE_8 = 128, MAX_8 = 127 };  // of the codes
// Candidates for the number of steps from a 4-bit block's smallest to its largest weight. 15 stores
// both exactly; fewer and more steps trade their error for that of the others.
static const float SPANS[] = {13.0f, 13.75f, 14.5f, 15.25f, 16.0f, 16.75f, 17.5f, 18.25f, 19.0f};
enum { CANDIDATES = sizeof SPANS / sizeof *SPANS };

INLINE Floats nearest(Floats x) { return x + ROUNDER - ROUNDER; }

INLINE Floats within(Floats x, float low, float high) {
    x = larger(x, splat(low));
    return choose(x < high, x, splat(high));
}

INLINE float inverse(float scale) { return scale == 0 ? 0 : 1 / scale; }

// The candidates map the range from the smallest to the largest weight to the range of codes, centre to
// centre, stretched by several factors. For fixed codes q, counted from the zero point, the best scale is
// x.q / q.q and removes (x.q)^2 / q.q of the block's energy, so the candidate with the largest quotient
// wins (as in llama.cpp's `make_qx_quants`).
INLINE void best_grid(const float *weights, int64_t vectors, const float *importance, float *scale,
                      float *zero_point) {
    Floats relative[MAX_BLOCK / LANES], high = {0}, low = {0};
    for (int64_t i = 0; i < vectors; i++) {
        relative[i] = load(weights + i * LANES);
        // The range includes 0, because its code, the zero point, must be one of the 16.
        high = larger(relative[i], high);
        low = larger(-relative[i], low);
    }
    const float above = largest(high), below = largest(low);
    const float extreme = above > below ? above : below;
    *scale = 0, *zero_point = MIDDLE_4;
    if (extreme < TINY) return;
    for (int64_t i = 0; i < vectors; i++) relative[i] /= extreme;  // so that no square overflows
    const float span = above / extreme + below / extreme;
    const float middle = (above / extreme - below / extreme) / 2;
    float most = -1;
    for (int candidate = 0; candidate < CANDIDATES; candidate++) {
        const float per_step = SPANS[candidate] / span;
        const float zero = within(nearest(splat(LAST / 2.0f - middle * per_step)), 0, LAST)[0];
        Floats projections = {0}, energies = {0};
        for (int64_t i = 0; i < vectors; i++) {
            const Floats code = within(nearest(relative[i] * per_step), -zero, LAST - zero);
            const Floats counted = importance ? code * load(importance + i * LANES) : code;
            projections += relative[i] * counted;
            energies += code * counted;
        }
        const float projection = total(projections), energy = total(energies);
        const float gain = energy > 0 ? projection * projection / energy : 0;
        if (!(gain > most)) continue;
        most = gain;
        *scale = energy > 0 ? projection / energy * extreme : 0;
        *zero_point = zero;
    }
}

static void grids(const float *weights, int64_t blocks, int64_t block, const float *importance,
                  float *scales, float *zero_points) {
    for (int64_t i = 0; i < blocks; i++, weights += block) {
        if (importance)
            best_grid(weights, block / LANES, importance, scales + i, zero_points + i);
        else best_grid(weights, block / LANES, NULL, scales + i, zero_points + i);
    }
}

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));
typedef uint8_t Packed __attribute__((vector_size(8)));

// Numbers from 0 to 255 as bytes.
INLINE Bytes bytes_of(Floats values) {
    return __builtin_convertvector(__builtin_convertvector(values, Ints), Bytes);
}

static void codes(const float *weights, int64_t blocks, int64_t block, int bits,
                  const float *scales, const float *zero_points, uint8_t *codes) {
    for (int64_t i = 0; i < blocks; i++) {
        const float by = inverse(scales[i]), zero = bits == 4 ? zero_points[i] : MIDDLE_8;
        for (int64_t at = 0; at < block; at += LANES, weights += LANES) {
            const Floats steps = nearest(load(weights) * by);
            if (bits == 4) {
                const Pairs pairs = (Pairs)bytes_of(within(steps + zero, 0, LAST));
                const Packed packed = __builtin_convertvector((pairs | pairs >> 4) & 0xff, Packed);
                memcpy(codes, &packed, sizeof packed), codes += sizeof packed;
            } else {
                const Bytes stored = bytes_of(within(steps, -MAX_8, MAX_8) + zero);
                memcpy(codes, &stored, sizeof stored), codes += sizeof stored;
            }
        }
    }
}

enum { GROUP = 2 };  // vectors of rows computed together: their sums do not wait for each other

// A group of up to GROUP vectors of rows; the last one may have fewer lanes.
INLINE void compensate_rows(const float *weights, const float *target, int64_t columns,
                            int64_t rows, int64_t count, const float *feedback, const float *scales,
                            const float *zero_points, float *errors, uint8_t *codes,
                            int64_t pitch, int vectors) {
    Floats done[MAX_BLOCK][GROUP], scale[GROUP], by[GROUP], zero[GROUP];
    int64_t lanes[GROUP];
    for (int v = 0; v < vectors; v++) {
        lanes[v] = count - v * LANES < LANES ? count - v * LANES : LANES;
        scale[v] = some(scales + v * LANES, lanes[v]);
        zero[v] = some(zero_points + v * LANES, lanes[v]);
        by[v] = choose(scale[v] == 0, splat(0), 1.0f / scale[v]);
    }
    for (int64_t column = 0; column < columns; column++, feedback += columns) {
        Floats sums[GROUP];
        for (int v = 0; v < vectors; v++)
            sums[v] = some(target + column * rows + v * LANES, lanes[v]);
        for (int64_t before = 0; before < column; before++)
            for (int v = 0; v < vectors; v++) sums[v] += done[before][v] * feedback[before];
        for (int v = 0; v < vectors; v++) {
            const int64_t at = column * rows + v * LANES;
            const Floats code = within(nearest(sums[v] * by[v] + zero[v]), 0, LAST);
            done[column][v] = some(weights + at, lanes[v]) - (code - zero[v]) * scale[v];
            store_first(errors + at, (int)lanes[v], done[column][v]);
            const Bytes stored = bytes_of(code);
            for (int64_t lane = 0; lane < lanes[v]; lane++)
                codes[(v * LANES + lane) * pitch + column] = stored[lane];
        }
    }
}

static void compensate(const float *weights, const float *target, int64_t columns, int64_t rows,
                       const float *feedback, const float *scales, const float *zero_points,
                       float *errors, uint8_t *codes, int64_t pitch) {
    int64_t row = 0;
    for (; rows - row >= GROUP * LANES; row += GROUP * LANES)
        compensate_rows(weights + row, target + row, columns, rows, GROUP * LANES, feedback,
                        scales + row, zero_points + row, errors + row, codes + row * pitch, pitch,
                        GROUP);
    for (; row < rows; row += LANES)
        compensate_rows(weights + row, target + row, columns, rows, rows - row, feedback,
                        scales + row, zero_points + row, errors + row, codes + row * pitch, pitch,
                        1);
}

const QuantizeKernel QUANTIZE = {grids, codes, compensate};
