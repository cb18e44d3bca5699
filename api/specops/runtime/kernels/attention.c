// Divides a pass of attention into pieces for threads. Results do not depend on the division.

#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// A span of at most this many rows is a piece for each head of the cache: it writes its keys and values and
// computes at once. Splits before its own tokens, which nobody writes, may be further pieces. Longer spans
// are written first, then computed in tiles.
enum { FEW_ROWS = 96 };
// A piece is at most one part in this number of a thread's work, so threads end at about the same time. With 16
// pieces per thread, 4 tokens after 4,000 took 1.09 of the time (9 heads of 64 over 3, AMD EPYC).
enum { PARTS_OF_SHARE = 6 };
// Maximum floats of splits' results, 16 MiB; a pass that needs more is not divided.
static const int64_t MAX_RESULTS = 1 << 22;

typedef struct {
    const AttentionKernel *kernel;
    const Pass *pass;
    int64_t step;      // number of splits of a piece
    int64_t pieces;    // of each span's head; the last one has the span's own tokens
    int64_t room;      // floats of the results of a span's head, if there are several pieces
    atomic_int *done;  // [kv_heads], number of computed pieces
    float *results;    // [spans][kv_heads][room]
    int64_t tiles;     // of long spans
    // For each span, the number of splits that another span with the same blocks computes, and which span.
    int64_t *common, *leader;
} Job;

static int is_long(const Pass *pass, const Span *span) { return rows_of(pass, span) > FEW_ROWS; }

static int64_t tiles_of(const Pass *pass, const Span *span) {
    const int64_t rows = tile_rows(&pass->layer);
    return is_long(pass, span) ? (rows_of(pass, span) + rows - 1) / rows : 0;
}

// Computes the tiles of some spans' rows from `first` to below `end`.
static void compute(const Job *job, const Span *const *spans, int64_t head, int64_t first, int64_t end,
                    const Splits *some) {
    for (int64_t most = tile_rows(&job->pass->layer); first < end; first += most)
        job->kernel->attend(job->pass, spans, head, first, end - first < most ? end - first : most, some);
}

static Splits all_splits(const Job *job, const Span *span) {
    const int64_t end = (span->start + span->tokens - 1) / SPLIT + 1;
    return (Splits){first_seen(job->pass, span) / SPLIT, end, job->room, job->results};
}

// The splits of a piece; none if the span has fewer than others.
static Splits splits_of(const Job *job, const Span *span, int64_t piece) {
    Splits some = all_splits(job, span);
    const int64_t own = span->start / SPLIT, first = some.first + piece * job->step;
    if (piece == job->pieces - 1) some.first = own;
    else some.first = first, some.end = first + job->step < own ? first + job->step : own;
    return some;
}

// Finds the earlier span that shares most splits' blocks with a short one, before both spans' own tokens.
// Layers with windows, which are short, do not need this.
static void find_leader(Job *job, int64_t nth) {
    const Pass *pass = job->pass;
    const Span *span = pass->spans + nth, *other = pass->spans;
    for (; !pass->layer.window && other < span && job->common[nth] < span->start / SPLIT; other++) {
        const int64_t start = span->start < other->start ? span->start : other->start;
        int64_t block = 0;
        while (block < start / BLOCK && table_of(pass, span)[block] == table_of(pass, other)[block]) block++;
        if (block / BLOCKS <= job->common[nth] || is_long(pass, other)) continue;
        job->common[nth] = block / BLOCKS, job->leader[nth] = other - pass->spans;
    }
}

// Computes some splits of a span, without those that others compute, together with the spans that it leads.
static void lead(const Job *job, int64_t leader, int64_t head, Splits some) {
    const Pass *pass = job->pass;
    const int64_t end = some.end;
    if (some.first < job->common[leader]) some.first = job->common[leader];
    for (; some.first < end; some.first = some.end) {
        const Span *spans[MAX_SLOTS];
        int64_t count = 0, rows = 0;
        some.end = end;
        for (int64_t nth = leader; nth < pass->count; nth++) {
            int64_t root = nth;
            while (job->common[root] > some.first) root = job->leader[root];
            if (root != leader) continue;
            spans[count++] = pass->spans + nth, rows += rows_of(pass, pass->spans + nth);
            if (nth > leader && job->common[nth] < some.end) some.end = job->common[nth];
        }
        compute(job, spans, head, 0, rows, &some);
    }
}

static void begin(void *argument, size_t index) {
    const Job *job = argument;
    const Pass *pass = job->pass;
    const int64_t nth = (int64_t)index % pass->count, place = (int64_t)index / pass->count;
    const int64_t head = place % pass->layer.kv_heads, piece = place / pass->layer.kv_heads;
    const Span *span = pass->spans + nth;
    if (piece == job->pieces - 1 && pass->key) job->kernel->write(pass, span, head);
    if (job->pieces > 1 && !is_long(pass, span)) lead(job, nth, head, splits_of(job, span, piece));
    else if (!is_long(pass, span)) compute(job, &span, head, 0, rows_of(pass, span), NULL);
    if (job->pieces == 1 || atomic_fetch_add(job->done + head, 1) < job->pieces * pass->count - 1) return;
    for (span = pass->spans; span < pass->spans + pass->count; span++) {
        const Splits all = all_splits(job, span);
        if (!is_long(pass, span)) job->kernel->merge(pass, span, head, &all);
    }
}

// Computes piece (span, tile, head) of the long spans; tiles with the longest past come first.
static void finish(void *argument, size_t index) {
    const Job *job = argument;
    const Pass *pass = job->pass;
    const int64_t head = (int64_t)index % pass->layer.kv_heads;
    int64_t left = (int64_t)index / pass->layer.kv_heads;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++) {
        const int64_t rows = rows_of(pass, span), most = tile_rows(&pass->layer);
        left -= tiles_of(pass, span);
        const int64_t first = (-1 - left) * most, end = first + most < rows ? first + most : rows;
        if (left < 0) {
            compute(job, &span, head, first, end, NULL);
            return;
        }
    }
}

int64_t specops_part_bytes(int64_t size, int type) { return part_bytes(size, type); }

static int is_little(const Pass *pass) {
    double work = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++)
        work += (double)span->tokens * ((double)span->start + (double)span->tokens);
    return work * (double)(2 * pass->layer.heads * pass->layer.size) < (double)FEW_PRODUCTS;
}

// Chooses the number of pieces: one per span and head if no spans share blocks and the heads divide evenly among
// the threads, or if there is little work.
static void cut(Job *job) {
    const Pass *pass = job->pass;
    const int64_t heads = pass->layer.kv_heads;
    int64_t splits = 0, longest = 0, common = 0;
    job->pieces = 1;
    for (int64_t nth = 0; nth < pass->count; nth++) {
        const Span *span = pass->spans + nth;
        job->common[nth] = 0, job->tiles += tiles_of(pass, span);
        if (is_long(pass, span)) continue;
        find_leader(job, nth);
        const Splits all = all_splits(job, span);
        const int64_t before = span->start / SPLIT - all.first;
        const int64_t floats = (all.end - all.first) * result_floats(pass, span);
        splits += before + 1 - job->common[nth], common += job->common[nth];
        longest = before > longest ? before : longest;
        job->room = floats > job->room ? floats : job->room;
    }
    job->step = splits * heads / (PARTS_OF_SHARE * sharing);
    if (is_little(pass) || job->room > MAX_RESULTS / (pass->count * heads)) return;
    if (!common && (heads % sharing == 0 || longest < job->step)) return;
    job->step += !job->step;
    job->pieces = 1 + (longest + job->step - 1) / job->step;
}

// Positions that a piece of one token's head reads; 0: there is no such piece. For tests.
int64_t specops_piece_positions(int64_t heads, int64_t kv_heads, int64_t size, int64_t start, int64_t piece) {
    const Span span = {.start = start, .tokens = 1};
    const Pass pass = {
        .layer = {.heads = heads, .kv_heads = kv_heads, .size = size}, .spans = &span, .count = 1};
    int64_t none[1];
    Job job = {.pass = &pass, .common = none, .leader = none};
    cut(&job);
    if (piece >= job.pieces) return 0;
    const Splits some = job.pieces > 1 ? splits_of(&job, &span, piece) : all_splits(&job, &span);
    const int64_t end = some.end * SPLIT;
    return (end < start + 1 ? end : start + 1) - some.first * SPLIT;
}

void attend(const AttentionKernel *kernel, const Pass *pass, Threads threads) {
    if (!pass->count) return;
    int64_t common[MAX_SLOTS], leader[MAX_SLOTS];
    Job job = {.kernel = kernel, .pass = pass, .common = common, .leader = leader};
    cut(&job);
    const int64_t heads = pass->layer.kv_heads, counts = pass->count * heads;
    if (job.pieces > 1) {
        const size_t floats = (size_t)(counts * job.room), numbers = (size_t)padded_size(heads);
        job.results = aligned_alloc(64, floats * sizeof(float) + numbers * sizeof(atomic_int));
        if (job.results) {
            job.done = (atomic_int *)(job.results + floats);
            memset(job.done, 0, numbers * sizeof(atomic_int));
        } else job.pieces = 1;  // there is no memory
    }
    if (is_little(pass)) threads.run = run_in_turn;
    threads.run(threads.context, begin, (size_t)(counts * job.pieces), &job);
    if (job.tiles) threads.run(threads.context, finish, (size_t)(job.tiles * heads), &job);
    free(job.results);
}
