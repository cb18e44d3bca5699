// Cuts a product into pieces for threads.

#include "matmul.h"

#include <stdlib.h>

// Bytes of weights that a thread takes at a time, multiplied by the groups of rows that read them:
// enough to stream. Smaller weights are still cut into FEW pieces, so that 2 or 4 threads share them
// evenly: 8 tokens of the demo pair take 0.89 of the time that whole pieces took, and TinyLlama's as
// long (2 cores, AMD EPYC). If there are more threads, each gets the same number of pieces.
static const int64_t PIECE = 256 << 10;
enum { FEW = 4 };
// Number of multiplications that are worth a thread. A core does 200 a nanosecond; while it waits for
// weights, it could compute READ_ROWS rows.
static const int64_t LITTLE = 400000;
enum { READ_ROWS = 4 };
// Up to so many numbers, one thread activates or rounds them as fast as several that wait for each other.
static const int64_t ROUNDED_ALONE = 8192;
// Bytes of activations that stay in a core's own cache while it reads weights.
static const int64_t PANEL = 384 << 10;
// Bytes of activations that lie on the stack. Where each product allocated them, 4 to 14 tokens of the
// demo pair took 1.01 to 1.02 of the time (2 cores, AMD EPYC, Zen 5).
enum { FEW_BYTES = 64 << 10 };

_Atomic int64_t sharing = 2;

void specops_share(int64_t threads) { sharing = threads > 1 ? threads : 1; }

typedef struct {
    const MatmulKernel *kernel;
    const Shape *shape;
    const uint8_t *weights;
    const float *bias;
    const Input *input;
    float *y;
    Activations activations;
    int64_t width;          // rows of a group
    int64_t groups, panel;  // number of groups of rows: all, and of one panel
    int64_t pieces;         // into which the weights are cut
} Job;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int rows_of(const Job *job, int64_t group) {
    return (int)least(job->width, job->activations.rows - group * job->width);
}

// Cuts rows into as few groups as the kernel can, all about as wide: each group reads the weights again,
// and a narrow one waits for them. Where groups had 8 rows and the last one the rest, 10 and 18 to 20
// tokens took 1.05 of the time with TinyLlama's shape, 1.02 to 1.04 with the demo pair, and no number
// took less than 0.99 (512 bits; 2 cores, AMD EPYC, Zen 5).
static void cut_rows(Job *job) {
    const int64_t rows = job->activations.rows, most = job->kernel->most, step = job->kernel->step;
    const int64_t fewest = (rows + most - 1) / most, even = (rows + fewest - 1) / fewest;
    job->width = least((even + step - 1) / step * step, most);
    job->groups = (rows + job->width - 1) / job->width;
}

// Rounds a whole group of rows: its rows share lines of memory, for which two threads would wait in
// turns. With a row for each thread, 8 tokens of TinyLlama's shape took 17.3 ms instead of 13.5 (2
// cores, AMD EPYC).
static void quantize(void *argument, size_t group) {
    Job *job = argument;
    const Activations *out = &job->activations;
    const int64_t first = group * job->width;
    const int64_t blocks = blocks_of(job->shape), depth = blocks * job->shape->block;
    const int by_row = job->kernel->by_row, count = rows_of(job, group);
    const int64_t code = activation_bytes(job->kernel, job->shape), word = 4 * code;
    const int64_t bytes = depth * code;
    for (int row = 0; row < count; row++)
        job->kernel->quantize(job->input, first + row, job->shape,
                              out->codes + first * bytes + row * (by_row ? bytes : word),
                              by_row ? word : word * count, out->scales + first * blocks + row,
                              out->sums + first * blocks + row, count);
}

static void compute(void *argument, size_t index) {
    const Job *job = argument;
    const Shape *shape = job->shape;
    const int64_t top = index / job->pieces * job->panel;
    const int64_t bottom = least(top + job->panel, job->groups);
    const int64_t tiles = tiles_of(shape), bytes = tile_bytes(shape), piece = index % job->pieces;
    const int64_t start = piece * tiles / job->pieces, stop = (piece + 1) * tiles / job->pieces;
    for (int64_t tile = start; tile < stop; tile++)
        for (int64_t group = top; group < bottom; group++) {
            const int64_t first = group * job->width;
            job->kernel->tile(shape, job->weights + tile * bytes, job->weights + tiles * bytes,
                              &job->activations, first, rows_of(job, group),
                              job->bias ? job->bias + tile * TILE : NULL,
                              job->y + first * shape->columns + tile * TILE,
                              (int)least(TILE, shape->columns - tile * TILE));
        }
}

// Number of pieces into which the weights are cut for a panel of so many groups, or rows.
static int64_t pieces_of(const Shape *shape, int64_t groups, int64_t rows) {
    const int64_t tiles = tiles_of(shape), weights = tiles * TILE * shape->depth;
    const int64_t large = tiles * tile_bytes(shape) * groups / PIECE;
    const int64_t worth = weights * (rows > READ_ROWS ? rows : READ_ROWS) / LITTLE;
    const int64_t threads = sharing, few = threads > FEW ? threads : FEW;
    int64_t pieces = least(worth, large > few ? large : few);
    if (pieces > threads) pieces = (pieces + threads - 1) / threads * threads;
    return pieces < 1 ? 1 : least(pieces, tiles);
}

// The same for a panel of so many rows. For tests.
int64_t specops_pieces(int64_t columns, int64_t depth, int64_t block, int bits, int64_t rows) {
    const Shape shape = {columns, depth, block, bits, MIDDLE, 0};
    return pieces_of(&shape, (rows + 7) / 8, rows);
}

int multiply(const MatmulKernel *kernel, const Shape *shape, const uint8_t *weights,
             const float *bias, const Input *input, int64_t rows, float *y, Threads threads) {
    if (kernel->narrow && rows < FEWEST_WIDE) kernel = kernel->narrow;
    const int64_t blocks = blocks_of(shape), depth = blocks * shape->block;
    const int64_t codes = depth * activation_bytes(kernel, shape);  // of a row
    const int64_t bytes = codes + blocks * (int64_t)(sizeof(float) + sizeof(int32_t));
    if (rows > INT64_MAX / bytes) return -1;
    _Alignas(LINE) char few[FEW_BYTES];
    char *memory = rows * bytes <= FEW_BYTES ? few : malloc((size_t)(rows * bytes));
    if (!memory) return -1;
    Job job = {kernel, shape, weights, bias, input, y, .activations.rows = rows};
    job.activations.codes = (int8_t *)memory;  // first, so aligned for any register
    job.activations.scales = (float *)(memory + rows * codes);
    job.activations.sums = (int32_t *)(job.activations.scales + rows * blocks);
    cut_rows(&job);
    if (rows * depth > ROUNDED_ALONE) threads.run(threads.context, quantize, job.groups, &job);
    else for (int64_t group = 0; group < job.groups; group++) quantize(&job, group);
    job.panel = least(PANEL / (codes * job.width) + 1, job.groups);
    job.pieces = pieces_of(shape, job.panel, least(rows, job.panel * job.width));
    const int64_t panels = (job.groups + job.panel - 1) / job.panel;
    threads.run(threads.context, compute, panels * job.pieces, &job);
    if (memory != few) free(memory);
    return 0;
}

typedef struct {
    const MatmulKernel *kernel;
    const Input *input;
    int64_t depth;
} Activation;

static void activate(void *argument, size_t row) {
    const Activation *job = argument;
    job->kernel->activate(job->input, (int64_t)row, job->depth);
}

void activate_rows(const MatmulKernel *kernel, const Input *input, int64_t rows, int64_t depth,
                   Threads threads) {
    Activation job = {kernel, input, depth};
    if (rows * depth > ROUNDED_ALONE) threads.run(threads.context, activate, rows, &job);
    else for (int64_t row = 0; row < rows; row++) activate(&job, row);
}
