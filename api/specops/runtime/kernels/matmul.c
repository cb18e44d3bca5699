// Divides a product into pieces for threads.

#include "matmul.h"

#include <stdlib.h>

// Bytes of weights that a thread takes at a time, multiplied by the groups of rows that read them: enough to
// stream. Smaller weights are still divided into FEW pieces, so that 2 or 4 threads share them evenly: 8 tokens
// of the demo pair take 0.89 of the time. If there are more threads, each gets the same number of pieces.
static const int64_t PIECE = 256 << 10;
enum { FEW = 4 };
// Minimum number of multiplications worth a thread. A core does 200 per nanosecond; while it waits for
// weights, it could compute READ_ROWS rows.
static const int64_t LITTLE = 400000;
enum { READ_ROWS = 4 };
// Up to this many numbers, one thread activates or rounds as fast as several that wait for each other.
static const int64_t ROUNDED_ALONE = 8192;
// Bytes of activations that stay in a core's own cache while it reads weights.
static const int64_t PANEL = 384 << 10;
// Bytes of activations on the stack. When each product allocated them, 4 to 14 tokens of the demo pair
// took 1.01 to 1.02 of the time (2 cores, AMD EPYC, Zen 5).
enum { FEW_BYTES = 64 << 10 };

_Atomic int64_t sharing = 2;

void specops_share(int64_t threads) { sharing = threads > 1 ? threads : 1; }

static Terms terms_of(const Form f) {
    Terms terms = {STARTS, halves_of(f), f.middle, lowered_by(f), NULL};
    if (f.scales == HALF_PAIR || f.scales == SIX_PAIR) terms.kind = SCALED;
    if (f.scales == HALF_ZERO || f.scales == FLOAT_ZERO || f.scales == SIXTEEN_PAIR) terms.kind = SUMS;
    return terms;
}

static int same_terms(const Terms *one, const Terms *other) {
    return one->kind == other->kind && one->halves == other->halves && one->middle == other->middle &&
           one->lowered == other->lowered;
}

const char *describe_weights(Weights *weights, int64_t depth, int64_t block, int64_t count,
                             const int64_t *columns, const int64_t *types) {
    *weights = (Weights){.depth = depth, .block = block, .count = (int)count};
    for (Segment *s = weights->segments; s < weights->segments + count; s++) {
        const int64_t n = *columns++;
        const char *wrong = describe_matrix(*types++, n, depth, block, &s->form);
        if (wrong) return wrong;
        weights->blocks = (depth + block - 1) / block;
        s->columns = n, s->tiles = (n + TILE - 1) / TILE;
        s->size = bytes_of_tile(s->form, weights->blocks, block);
        s->columns_before = weights->columns, s->bytes_before = weights->bytes;
        weights->columns += n, weights->tiles += s->tiles, weights->bytes += s->tiles * s->size;
        const Terms needed = terms_of(s->form);
        while (s->terms < weights->kinds && !same_terms(weights->terms + s->terms, &needed)) s->terms++;
        if (s->terms == weights->kinds) weights->terms[weights->kinds++] = needed;
    }
    return NULL;
}

typedef struct {
    const MatmulKernel *kernel;
    const Weights *weights;
    const uint8_t *tiles;
    const float *bias;
    const Input *input;
    float *y;
    Activations x;
    int64_t groups, panel;  // number of groups of rows: all, and of one panel
    int64_t parts;          // of K, into which a group is cut to be rounded
    int64_t pieces;         // into which the weights are cut
} Job;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Divides rows into as few groups as the kernel can, of about the same width: each group reads the weights again,
// and a narrow one waits for them. With groups of 8 rows and the rest in the last one, 10 and 18 to 20 tokens took
// 1.02 to 1.05 of the time, and no number took less than 0.99 (512 bits; 2 cores, AMD EPYC, Zen 5).
static void cut_rows(Job *job) {
    const MatmulKernel *kernel = job->kernel;
    const int64_t rows = job->x.rows, step = kernel->step;
    const int64_t most = rows < kernel->once ? kernel->most : kernel->group;
    const int64_t fewest = (rows + most - 1) / most, even = (rows + fewest - 1) / fewest;
    job->x.width = least((even + step - 1) / step * step, most);
    job->groups = (rows + job->x.width - 1) / job->x.width;
}

// Rounds a part of K of a whole group of rows: its rows share cache lines, for which two threads would take turns.
// With a row for each thread, 8 tokens of TinyLlama's shape took 17.3 ms instead of 13.5.
static void quantize(void *argument, size_t index) {
    const Job *job = argument;
    const Activations *x = &job->x;
    const int64_t first = index / job->parts * x->width, part = index % job->parts;
    const int64_t start = part * x->blocks / job->parts, stop = (part + 1) * x->blocks / job->parts;
    const int64_t count = least(x->width, x->rows - first);
    for (int row = 0; row < count; row++)
        job->kernel->quantize(job->input, x, first, row, (int)count, start, stop);
}

// Number of parts of K: enough for all threads, each as large as one thread rounds alone.
static int64_t parts_of(const Job *job) {
    const int64_t wanted = (sharing + job->groups - 1) / job->groups;
    const int64_t parts = least(wanted, job->x.width * job->x.depth / ROUNDED_ALONE);
    return parts < 1 ? 1 : least(parts, job->x.blocks);
}

// Number of a segment's tiles before a piece that starts at byte `bytes` of all weights.
static inline int64_t tiles_before(const Segment *s, int64_t bytes) {
    if (bytes <= s->bytes_before) return 0;
    return least((bytes - s->bytes_before + s->size - 1) / s->size, s->tiles);
}

static void compute(void *argument, size_t index) {
    const Job *job = argument;
    const Weights *w = job->weights;
    const int64_t first = index / job->pieces * job->panel * job->x.width, number = index % job->pieces;
    const int64_t from = number * w->bytes / job->pieces, to = (number + 1) * w->bytes / job->pieces;
    for (const Segment *s = w->segments; s < w->segments + w->count; s++) {
        const int64_t start = tiles_before(s, from), stop = tiles_before(s, to);
        const int64_t column = s->columns_before + start * TILE;
        if (start == stop) continue;
        job->kernel->piece(&(Piece){
            .segment = s, .weights = job->tiles + s->bytes_before + start * s->size,
            .x = &job->x, .bias = job->bias ? job->bias + column : NULL,
            .y = job->y + first * w->columns + column, .stride = w->columns, .tiles = stop - start,
            .columns = s->columns - start * TILE, .first = first,
            .rows = least(job->panel * job->x.width, job->x.rows - first)});
    }
}

// Number of pieces into which the weights are divided for a panel of these groups and rows. With several per
// thread, the busiest thread has at most 1.1 of the mean, unless one per thread would be no better.
static int64_t pieces_of(const Weights *w, int64_t groups, int64_t rows) {
    const int64_t all = w->tiles, large = w->bytes * groups / PIECE;
    const int64_t worth = w->tiles * TILE * w->depth * (rows > READ_ROWS ? rows : READ_ROWS) / LITTLE;
    const int64_t threads = sharing, few = threads > FEW ? threads : FEW;
    const int64_t pieces = least(worth, large > few ? large : few);
    if (pieces <= threads) return pieces < 1 ? 1 : least(pieces, all);
    int64_t each = (pieces + threads - 1) / threads;
    while (each > 1 && each * ((all - 1) / (each * threads) + 1) * threads * 10 > all * 11) each--;
    return least(each * threads, all);
}

// The same for a panel of some rows of one matrix. For tests.
int64_t specops_pieces(int64_t columns, int64_t depth, int64_t block, int type, int64_t rows) {
    Weights weights;
    describe_weights(&weights, depth, block, 1, &columns, (const int64_t[]){type});
    return pieces_of(&weights, (rows + 7) / 8, rows);
}

int multiply(const MatmulKernel *kernel, const Weights *weights, const uint8_t *tiles,
             const float *bias, const Input *input, int64_t rows, float *y, Threads threads) {
    const int64_t blocks = weights->blocks, step = kernel->step;
    const int64_t pitch = blocks * weights->block * kernel->bytes;
    int64_t numbers = 1;  // a block's scale and terms
    for (int i = 0; i < weights->kinds; i++) numbers += weights->terms[i].halves;
    const int64_t bytes = pitch + numbers * blocks * (int64_t)sizeof(float);
    if (rows > INT64_MAX / bytes - step) return -1;
    const int64_t places = (rows + step - 1) / step * step;  // a kernel may read codes after the last row
    _Alignas(LINE) char few[FEW_BYTES];
    char *memory = places * bytes <= FEW_BYTES ? few : malloc((size_t)(places * bytes));
    if (!memory) return -1;
    Job job = {kernel, weights, tiles, bias, input, y,
               {(int8_t *)memory,  // first, so aligned for any register
                (float *)(memory + places * pitch), rows, 0, weights->depth, weights->block, blocks,
                kernel->bytes, pitch, weights->kinds, {{0}}}, 0, 0, 1, 0};
    Term *next = (Term *)(job.x.scales + rows * blocks);
    for (int i = 0; i < weights->kinds; i++) {
        Terms *terms = job.x.terms + i;
        *terms = weights->terms[i];
        if (kernel->is_signed) terms->middle -= terms->lowered;
        terms->at = next, next += rows * blocks * terms->halves;
    }
    cut_rows(&job);
    if (rows * weights->depth <= ROUNDED_ALONE) run_in_turn(NULL, quantize, job.groups, &job);
    else {
        job.parts = parts_of(&job);
        threads.run(threads.context, quantize, job.groups * job.parts, &job);
    }
    job.panel = least(PANEL / (pitch * job.x.width) + 1, job.groups);
    job.pieces = pieces_of(weights, job.panel, least(rows, job.panel * job.x.width));
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
