// Tries a kernel of products on this processor before it is used: whether it is right, and from how many
// rows on it is faster than its narrow one. A hypervisor may report features that the processor does not
// have, and matrix units differ by processor.

#define _GNU_SOURCE  // clock_gettime

#include "matmul.h"

#include <stdlib.h>
#include <time.h>

enum { COLUMNS = 64, DEPTH = 1000, MOST_ROWS = 64, ROUNDS = 5 };

// Weights of random codes and scales, and random activations.
typedef struct {
    Weights weights;
    uint8_t *tiles;
    float *x, *y;
} Trial;

static void end_trial(Trial *trial) { free(trial->tiles), free(trial->x); }

static uint32_t next_number(uint32_t *number) { return *number = *number * 1664525 + 1013904223; }

// Returns 0, or -1 if there is no memory.
static int begin_trial(Trial *trial, int type, int64_t block) {
    const int64_t columns = COLUMNS, kind = type;
    if (describe_weights(&trial->weights, DEPTH, block, 1, &columns, &kind)) return -1;
    trial->tiles = malloc((size_t)trial->weights.bytes);
    trial->x = malloc((DEPTH + COLUMNS) * MOST_ROWS * sizeof(float));
    if (!trial->tiles || !trial->x) return end_trial(trial), -1;
    trial->y = trial->x + DEPTH * MOST_ROWS;
    uint32_t number = 1;
    for (int64_t i = 0; i < trial->weights.bytes; i++)  // without a bit, all scales are below 2
        trial->tiles[i] = (uint8_t)(next_number(&number) >> 24 & (i % 2 ? 0xbf : 0xff));
    for (int i = 0; i < MOST_ROWS * DEPTH; i++)
        trial->x[i] = (float)(int32_t)next_number(&number) / (1 << 24);
    return 0;
}

static int run_trial(const Trial *trial, const MatmulKernel *kernel, int64_t rows) {
    const Input input = {.kind = AS_IT_IS, .x = trial->x};
    const Threads alone = {run_in_turn, NULL};
    return multiply(kernel, &trial->weights, trial->tiles, NULL, &input, rows, trial->y, alone);
}

// Whether both kernels compute the same bits of small products of float16 scales.
int specops_agree(const MatmulKernel *one, const MatmulKernel *other, int type, int64_t block) {
    enum { LEAST = 1, STEP = 21 };
    Trial trial;
    if (begin_trial(&trial, type, block)) return 0;
    float found[MOST_ROWS * COLUMNS];
    int same = 1;
    for (int rows = LEAST; same && rows <= MOST_ROWS; rows += STEP) {
        same = !run_trial(&trial, one, rows);
        memcpy(found, trial.y, (size_t)rows * COLUMNS * sizeof(float));
        same = same && !run_trial(&trial, other, rows) &&
               !memcmp(found, trial.y, (size_t)rows * COLUMNS * sizeof(float));
    }
    end_trial(&trial);
    return same;
}

static double seconds(const Trial *trial, const MatmulKernel *kernel, int64_t rows) {
    double least = 1;
    for (int round = 0; round < ROUNDS; round++) {
        struct timespec start, stop;
        clock_gettime(CLOCK_MONOTONIC, &start);
        if (run_trial(trial, kernel, rows)) return 1;
        clock_gettime(CLOCK_MONOTONIC, &stop);
        const double nanoseconds = (double)(stop.tv_nsec - start.tv_nsec);
        const double taken = (double)(stop.tv_sec - start.tv_sec) + 1e-9 * nanoseconds;
        least = taken < least ? taken : least;
    }
    return least;
}

// The fewest rows from which on the wide kernel takes less time; INT64_MAX: it never does.
int64_t specops_fewest_rows(const double *wide, const double *narrow, const int64_t *rows, int64_t count) {
    int64_t fewest = INT64_MAX;
    while (count-- > 0 && wide[count] < narrow[count]) fewest = rows[count];
    return fewest;
}

// The same as measured here, in about a millisecond.
int64_t measure_fewest_rows(const MatmulKernel *wide, const MatmulKernel *narrow, int type, int64_t block) {
    static const int64_t ROWS[] = {1, 2, 4, 8, 12, 16, 24, 32, 48, MOST_ROWS};
    enum { COUNT = sizeof ROWS / sizeof *ROWS };
    double taken[2][COUNT];
    Trial trial;
    if (begin_trial(&trial, type, block)) return INT64_MAX;
    for (int i = 0; i < COUNT; i++) {
        taken[0][i] = seconds(&trial, wide, ROWS[i]);
        taken[1][i] = seconds(&trial, narrow, ROWS[i]);
    }
    end_trial(&trial);
    return specops_fewest_rows(taken[0], taken[1], ROWS, COUNT);
}
