// Cuts a pass of attention into pieces for threads. Results do not depend on the cut.

#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// A span of at most so many rows is at least one piece for each head of the cache: it writes its keys and
// values and computes at once. Splits before its own tokens, which nobody writes to, are further pieces.
// Longer spans are written first, then computed in tiles.
enum { FEW_ROWS = 96 };
// Number of multiplications that take about as long as waking a thread.
static const int64_t LITTLE = 200000;
// Number of pieces for each thread from which on further ones share the work no better.
enum { MANY_PIECES = 16 };

typedef struct {
    const AttentionKernel *kernel;
    const Pass *pass;
    int64_t step;      // number of splits of a piece; 0: a short span's head is one piece
    atomic_int *done;  // [spans][kv_heads], number of computed pieces
    float *results;    // of the splits of the spans that are cut
} Job;

static int is_long(const Pass *pass, const Span *span) { return rows_of(pass, span) > FEW_ROWS; }

static int64_t tiles_of(const Pass *pass, const Span *span) {
    if (!is_long(pass, span)) return 0;
    const int64_t rows = tile_rows(&pass->layer);
    return (rows_of(pass, span) + rows - 1) / rows;
}

static void compute_tile(const Job *job, const Span *span, int64_t head, int64_t tile,
                         const Splits *some) {
    const int64_t most = tile_rows(&job->pass->layer), first = tile * most;
    const int64_t left = rows_of(job->pass, span) - first;
    job->kernel->attend(job->pass, span, head, first, left < most ? left : most, some);
}

static int64_t first_split(const Pass *pass, const Span *span) {
    const int64_t window = pass->layer.window;
    return window && window <= span->start ? (span->start + 1 - window) / SPLIT : 0;
}

// Number of splits before that of a short span's first token.
static int64_t past_splits(const Pass *pass, const Span *span) {
    return is_long(pass, span) ? 0 : span->start / SPLIT - first_split(pass, span);
}

// Number of pieces of a span's head. The last one has the span's own tokens.
static int64_t pieces_of(const Job *job, const Span *span) {
    const int64_t past = past_splits(job->pass, span), step = job->step;
    return 1 + (step && past >= step ? (past + step - 1) / step : 0);
}

// Number of floats of the results of a span's head.
static int64_t results_of(const Job *job, const Span *span) {
    if (pieces_of(job, span) == 1) return 0;
    const int64_t last = (span->start + span->tokens - 1) / SPLIT;
    return (last - first_split(job->pass, span) + 1) * rows_of(job->pass, span) *
           result_floats(&job->pass->layer);
}

// The splits of one of several pieces of a span's head.
static Splits splits_of(const Job *job, const Span *span, int64_t piece, float *results) {
    const int64_t from = first_split(job->pass, span), own = span->start / SPLIT;
    const int64_t first = from + piece * job->step, end = first + job->step;
    if (piece == pieces_of(job, span) - 1) return (Splits){own, INT64_MAX / SPLIT, from, results};
    return (Splits){first, end < own ? end : own, from, results};
}

static void compute_piece(const Job *job, const Span *span, int64_t head, int64_t piece,
                          float *results) {
    const Pass *pass = job->pass;
    const int64_t pieces = pieces_of(job, span), rows = rows_of(pass, span);
    if (piece == pieces - 1) job->kernel->write(pass, span, head);
    if (is_long(pass, span)) return;
    const Splits splits = splits_of(job, span, piece, results);
    for (int64_t tile = 0; tile * tile_rows(&pass->layer) < rows; tile++)
        compute_tile(job, span, head, tile, pieces > 1 ? &splits : NULL);
    if (pieces == 1) return;
    atomic_int *done = job->done + (span - pass->spans) * pass->layer.kv_heads + head;
    if (atomic_fetch_add(done, 1) == pieces - 1) job->kernel->merge(pass, span, head, &splits);
}

// Pieces of a head come one after another: a piece prefetches what the next one reads first.
static void begin(void *argument, size_t index) {
    const Job *job = argument;
    const int64_t heads = job->pass->layer.kv_heads;
    const Span *span = job->pass->spans;
    float *results = job->results;
    int64_t left = (int64_t)index;
    for (; left >= pieces_of(job, span) * heads; span++) {
        left -= pieces_of(job, span) * heads;
        results += results_of(job, span) * heads;
    }
    const int64_t head = left / pieces_of(job, span), piece = left % pieces_of(job, span);
    compute_piece(job, span, head, piece, results + results_of(job, span) * head);
}

// Piece (span, tile, head) of the long spans; tiles with the longest past come first.
static void finish(void *argument, size_t index) {
    const Job *job = argument;
    const Pass *pass = job->pass;
    const int64_t head = (int64_t)index % pass->layer.kv_heads;
    int64_t left = (int64_t)index / pass->layer.kv_heads;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++) {
        const int64_t tiles = tiles_of(pass, span);
        if (left < tiles) {
            compute_tile(job, span, head, tiles - 1 - left, NULL);
            return;
        }
        left -= tiles;
    }
}

int64_t specops_block_bytes(int64_t layers, int64_t kv_heads, int64_t size, int type) {
    return block_bytes(&(Layer){.layers = layers, .kv_heads = kv_heads, .size = size}, type);
}

static int is_little(const Pass *pass) {
    double work = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++)
        work += (double)span->tokens * ((double)span->start + (double)span->tokens);
    return work * (double)(2 * pass->layer.heads * pass->layer.size) < (double)LITTLE;
}

// Number of splits of a piece; 0 where threads share heads evenly or there is little to do. Uncut, one token
// behind 2,000 takes 0.94 of the time with the shape of TinyLlama (one thread; AMD EPYC, Zen 5).
static int64_t step_of(const Pass *pass) {
    const int64_t heads = pass->layer.kv_heads, most = MANY_PIECES * sharing;
    int64_t past = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++)
        past += past_splits(pass, span);
    const int even = heads % sharing == 0 || pass->count * heads >= most;
    return even || is_little(pass) ? 0 : 1 + past * heads / most;
}

// Positions that a piece of one token's head reads; 0: there is no such piece. For tests.
int64_t specops_piece_positions(int64_t heads, int64_t kv_heads, int64_t size, int64_t start,
                                int64_t piece) {
    const Span span = {.start = start, .tokens = 1};
    const Pass pass = {
        .layer = {.heads = heads, .kv_heads = kv_heads, .size = size}, .spans = &span, .count = 1};
    const Job job = {.pass = &pass, .step = step_of(&pass)};
    if (piece >= pieces_of(&job, &span)) return 0;
    if (pieces_of(&job, &span) == 1) return start + 1;
    const Splits splits = splits_of(&job, &span, piece, NULL);
    const int64_t end = splits.end * SPLIT;
    return (end < start + 1 ? end : start + 1) - splits.first * SPLIT;
}

void attend(const AttentionKernel *kernel, const Pass *pass, Threads threads) {
    Job job = {kernel, pass, step_of(pass), NULL, NULL};
    if (is_little(pass)) threads.run = run_in_turn;
    const int64_t heads = pass->layer.kv_heads, counts = pass->count * heads;
    int64_t floats = 0, pieces = 0, tiles = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++) {
        floats += results_of(&job, span) * heads;
        pieces += pieces_of(&job, span);
        tiles += tiles_of(pass, span);
    }
    if (floats) job.done = malloc(counts * sizeof *job.done + floats * sizeof *job.results);
    if (job.done) {
        memset(job.done, 0, counts * sizeof *job.done);
        job.results = (float *)(job.done + counts);
    } else job.step = 0, pieces = pass->count;  // uncut, also if there is no memory
    if (pieces) threads.run(threads.context, begin, (size_t)(pieces * heads), &job);
    if (tiles) threads.run(threads.context, finish, (size_t)(tiles * heads), &job);
    free(job.done);
}
