// Cuts a product into pieces for threads.

#include "matmul.h"

#include <stdlib.h>

// Bytes of weights that a thread takes at a time, by as many groups of rows as they are read for:
// enough to stream, few enough to share out evenly.
static const int64_t PIECE = 256 << 10;
// Bytes of activations that stay in a core's own cache while weights pass by.
static const int64_t PANEL = 384 << 10;

typedef struct {
    const MatmulKernel *kernel;
    const Shape *shape;
    const uint8_t *weights;
    const float *bias, *x;
    float *y;
    Activations activations;
    int64_t groups, panel;  // groups of rows: all, and those of a panel
    int64_t pieces, piece;  // pieces of the weights, and tiles of one
} Job;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int rows_of(const Job *job, int64_t group) {
    const int width = job->kernel->width;
    return group < job->groups - 1 ? width : (int)(job->activations.rows - group * width);
}

static void quantize(void *argument, size_t group) {
    Job *job = argument;
    const Shape *shape = job->shape;
    const Activations *out = &job->activations;
    const int64_t blocks = blocks_of(shape), first = group * job->kernel->width;
    const int count = rows_of(job, group);
    for (int row = 0; row < count; row++) {
        const float *x = job->x + (first + row) * shape->depth;
        int8_t *codes = out->codes + first * blocks * shape->block + row * 4;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t start = block * shape->block;
            const int64_t place = first * blocks + block * count + row;
            out->scales[place] =
                job->kernel->round(x + start, least(shape->depth - start, shape->block),
                                   shape->block, codes + start * count, count * 4,
                                   &out->sums[place]);
        }
    }
}

static void compute(void *argument, size_t index) {
    const Job *job = argument;
    const Shape *shape = job->shape;
    const int64_t top = index / job->pieces * job->panel;
    const int64_t bottom = least(top + job->panel, job->groups);
    const int64_t start = index % job->pieces * job->piece;
    const int64_t stop = least(start + job->piece, tiles_of(shape)), bytes = tile_bytes(shape);
    for (int64_t tile = start; tile < stop; tile++)
        for (int64_t group = top; group < bottom; group++) {
            const int64_t first = group * job->kernel->width;
            job->kernel->tile(shape, job->weights + tile * bytes, job->weights + stop * bytes,
                              &job->activations, first, rows_of(job, group),
                              job->bias ? job->bias + tile * TILE : NULL,
                              job->y + first * shape->columns + tile * TILE,
                              (int)least(TILE, shape->columns - tile * TILE));
        }
}

int multiply(const MatmulKernel *kernel, const Shape *shape, const uint8_t *weights,
             const float *bias, const float *x, int64_t rows, float *y, Threads threads) {
    const int64_t blocks = blocks_of(shape), depth = blocks * shape->block;
    const int64_t width = kernel->width;
    const int64_t bytes = depth + blocks * (int64_t)(sizeof(float) + sizeof(int32_t));  // of a row
    char *memory = rows <= INT64_MAX / bytes ? malloc((size_t)(rows * bytes)) : NULL;
    if (!memory) return -1;
    Job job = {kernel, shape, weights, bias, x, y, .activations.rows = rows};
    job.activations.scales = (float *)memory;
    job.activations.sums = (int32_t *)(job.activations.scales + rows * blocks);
    job.activations.codes = (int8_t *)(job.activations.sums + rows * blocks);
    // A single row that would be left joins the last group.
    job.groups = rows > width ? (rows + width - 2) / width : 1;
    if (job.groups > 1) threads.run(threads.context, quantize, job.groups, &job);
    else quantize(&job, 0);
    job.panel = least(PANEL / (depth * width) + 1, job.groups);
    job.piece = PIECE / (tile_bytes(shape) * job.panel) + 1;
    job.pieces = (tiles_of(shape) + job.piece - 1) / job.piece;
    const int64_t panels = (job.groups + job.panel - 1) / job.panel;
    threads.run(threads.context, compute, panels * job.pieces, &job);
    free(memory);
    return 0;
}
