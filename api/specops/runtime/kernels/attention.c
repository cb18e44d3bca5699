// Cuts a pass of attention into pieces for threads. Results do not depend on the cut.

#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// A span of at most so many rows is a piece for each head of the cache: it writes its keys and values and
// computes at once. Splits before its own tokens, which nobody writes to, may be further pieces. Longer
// spans are written first, then computed in tiles.
enum { FEW_ROWS = 96 };
// A piece has one part in so many of what a thread computes, or less: threads end at about the same time. Where
// there were 16 pieces a thread, 4 tokens behind 4,000 took 1.09 of the time (9 heads of 64 over 3, AMD EPYC).
enum { PARTS_OF_SHARE = 6 };
// Most floats of splits' results, 16 MiB; a pass that needs more is not cut.
static const int64_t MAX_RESULTS = 1 << 22;

typedef struct {
    const AttentionKernel *kernel;
    const Pass *pass;
    int64_t step;      // number of splits of a piece
    int64_t pieces;    // of each span's head; the last one has the span's own tokens
    int64_t room;      // floats of the results of a span's head, if there are several pieces
    atomic_int *done;  // [spans][kv_heads], number of computed pieces
    float *results;    // [spans][kv_heads][room]
} Job;

static int is_long(const Pass *pass, const Span *span) { return rows_of(pass, span) > FEW_ROWS; }

static int64_t tiles_of(const Pass *pass, const Span *span) {
    const int64_t rows = tile_rows(&pass->layer);
    return (rows_of(pass, span) + rows - 1) / rows;
}

static void compute_tile(const Job *job, const Span *span, int64_t head, int64_t tile,
                         const Splits *some) {
    const int64_t most = tile_rows(&job->pass->layer), first = tile * most;
    const int64_t left = rows_of(job->pass, span) - first;
    job->kernel->attend(job->pass, span, head, first, left < most ? left : most, some);
}

static Splits all_splits(const Pass *pass, const Span *span) {
    const int64_t window = pass->layer.window, end = (span->start + span->tokens - 1) / SPLIT + 1;
    const int64_t from = window && window <= span->start ? (span->start + 1 - window) / SPLIT : 0;
    return (Splits){from, end, from, NULL};
}

// The splits of a piece, none where a span has fewer than others.
static Splits splits_of(const Job *job, const Span *span, int64_t piece) {
    Splits some = all_splits(job->pass, span);
    const int64_t own = span->start / SPLIT, first = some.from + piece * job->step;
    if (piece == job->pieces - 1) some.first = own;
    else some.first = first, some.end = first + job->step < own ? first + job->step : own;
    return some;
}

// All spans' pieces with the same place come one after another: spans that share blocks read them from the
// processor's cache.
static void begin(void *argument, size_t index) {
    const Job *job = argument;
    const Pass *pass = job->pass;
    const int64_t nth = (int64_t)index % pass->count, place = (int64_t)index / pass->count;
    const int64_t head = place % pass->layer.kv_heads, piece = place / pass->layer.kv_heads;
    const int64_t number = nth * pass->layer.kv_heads + head;
    const Span *span = pass->spans + nth;
    if (piece == job->pieces - 1 && pass->key) job->kernel->write(pass, span, head);
    if (is_long(pass, span)) return;
    Splits all = all_splits(pass, span), some = splits_of(job, span, piece);
    if (job->results) all.memory = some.memory = job->results + number * job->room;
    for (int64_t tile = 0; some.first < some.end && tile < tiles_of(pass, span); tile++)
        compute_tile(job, span, head, tile, job->pieces > 1 ? &some : NULL);
    if (job->pieces > 1 && atomic_fetch_add(job->done + number, 1) == job->pieces - 1)
        job->kernel->merge(pass, span, head, &all);
}

// Piece (span, tile, head) of the long spans; tiles with the longest past come first.
static void finish(void *argument, size_t index) {
    const Job *job = argument;
    const Pass *pass = job->pass;
    const int64_t head = (int64_t)index % pass->layer.kv_heads;
    int64_t left = (int64_t)index / pass->layer.kv_heads;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++) {
        const int64_t tiles = is_long(pass, span) ? tiles_of(pass, span) : 0;
        if (left < tiles) {
            compute_tile(job, span, head, tiles - 1 - left, NULL);
            return;
        }
        left -= tiles;
    }
}

int64_t specops_part_bytes(int64_t size, int type) { return part_bytes(size, type); }

static int is_little(const Pass *pass) {
    double work = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++)
        work += (double)span->tokens * ((double)span->start + (double)span->tokens);
    return work * (double)(2 * pass->layer.heads * pass->layer.size) < (double)FEW_PRODUCTS;
}

// Decides how many pieces there are; one for a span's head where threads share heads evenly or there is
// little to do.
static Job cut(const AttentionKernel *kernel, const Pass *pass) {
    Job job = {.kernel = kernel, .pass = pass, .pieces = 1};
    const int64_t heads = pass->layer.kv_heads;
    int64_t splits = 0, longest = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++) {
        if (is_long(pass, span)) continue;
        const Splits all = all_splits(pass, span);
        const int64_t before = span->start / SPLIT - all.from;
        const int64_t floats = (all.end - all.from) * result_floats(pass, span);
        splits += before + 1;
        longest = before > longest ? before : longest;
        job.room = floats > job.room ? floats : job.room;
    }
    job.step = splits * heads / (PARTS_OF_SHARE * sharing);
    if (heads % sharing == 0 || longest < job.step || is_little(pass)) return job;
    if (job.room > MAX_RESULTS / (pass->count * heads)) return job;
    job.step += !job.step;
    job.pieces = 1 + (longest + job.step - 1) / job.step;
    return job;
}

// Positions that a piece of one token's head reads; 0: there is no such piece. For tests.
int64_t specops_piece_positions(int64_t heads, int64_t kv_heads, int64_t size, int64_t start,
                                int64_t piece) {
    const Span span = {.start = start, .tokens = 1};
    const Pass pass = {
        .layer = {.heads = heads, .kv_heads = kv_heads, .size = size}, .spans = &span, .count = 1};
    const Job job = cut(NULL, &pass);
    if (piece >= job.pieces) return 0;
    const Splits some = job.pieces > 1 ? splits_of(&job, &span, piece) : all_splits(&pass, &span);
    const int64_t end = some.end * SPLIT;
    return (end < start + 1 ? end : start + 1) - some.first * SPLIT;
}

void attend(const AttentionKernel *kernel, const Pass *pass, Threads threads) {
    if (!pass->count) return;
    Job job = cut(kernel, pass);
    const int64_t heads = pass->layer.kv_heads, counts = pass->count * heads;
    if (job.pieces > 1) {
        const size_t floats = (size_t)(counts * job.room), numbers = (size_t)padded_size(counts);
        job.results = aligned_alloc(64, floats * sizeof(float) + numbers * sizeof(atomic_int));
        if (job.results) {
            job.done = (atomic_int *)(job.results + floats);
            memset(job.done, 0, numbers * sizeof(atomic_int));
        } else job.pieces = 1;  // there is no memory
    }
    int64_t tiles = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++)
        if (is_long(pass, span)) tiles += tiles_of(pass, span);
    if (is_little(pass)) threads.run = run_in_turn;
    threads.run(threads.context, begin, (size_t)(counts * job.pieces), &job);
    if (tiles) threads.run(threads.context, finish, (size_t)(tiles * heads), &job);
    free(job.results);
}
