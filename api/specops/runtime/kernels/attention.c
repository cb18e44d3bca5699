// Cuts a pass of attention into pieces for threads. Results do not depend on the cut.

#include "attention.h"

// A span of at most so many rows is one piece for each head of the cache: it writes its keys and
// values and computes at once. Longer spans are written first, then computed in tiles.
enum { FEW_ROWS = 96 };
// Number of multiplications that take about as long as waking a thread.
static const int64_t LITTLE = 200000;

typedef struct {
    const AttentionKernel *kernel;
    const Pass *pass;
} Job;

static int64_t rows_of(const Pass *pass, const Span *span) {
    return span->tokens * (pass->layer.heads / pass->layer.kv_heads);
}

static int is_long(const Pass *pass, const Span *span) { return rows_of(pass, span) > FEW_ROWS; }

static int64_t tiles_of(const Pass *pass, const Span *span) {
    if (!is_long(pass, span)) return 0;
    const int64_t rows = tile_rows(&pass->layer);
    return (rows_of(pass, span) + rows - 1) / rows;
}

static void compute_tile(const Job *job, const Span *span, int64_t head, int64_t tile) {
    const int64_t most = tile_rows(&job->pass->layer), first = tile * most;
    const int64_t left = rows_of(job->pass, span) - first;
    job->kernel->attend(job->pass, span, head, first, left < most ? left : most);
}

// Piece (span, head): writes keys and values; computes short spans.
static void begin(void *argument, size_t index) {
    const Job *job = argument;
    const Pass *pass = job->pass;
    const Span *span = pass->spans + (int64_t)index / pass->layer.kv_heads;
    const int64_t head = (int64_t)index % pass->layer.kv_heads;
    job->kernel->write(pass, span, head);
    if (is_long(pass, span)) return;
    const int64_t rows = rows_of(pass, span), most = tile_rows(&pass->layer);
    for (int64_t tile = 0; tile * most < rows; tile++) compute_tile(job, span, head, tile);
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
            compute_tile(job, span, head, tiles - 1 - left);
            return;
        }
        left -= tiles;
    }
}

int64_t specops_block_bytes(int64_t layers, int64_t kv_heads, int64_t size, int type) {
    return block_bytes(&(Layer){.layers = layers, .kv_heads = kv_heads, .size = size}, type);
}

void attend(const AttentionKernel *kernel, const Pass *pass, Threads threads) {
    Job job = {kernel, pass};
    double work = 0;
    int64_t tiles = 0;
    for (const Span *span = pass->spans; span < pass->spans + pass->count; span++) {
        work += (double)span->tokens * ((double)span->start + (double)span->tokens);
        tiles += tiles_of(pass, span);
    }
    work *= (double)(2 * pass->layer.heads * pass->layer.size);
    if (work < (double)LITTLE) threads.run = run_in_turn;
    const int64_t heads = pass->layer.kv_heads;
    if (pass->count) threads.run(threads.context, begin, (size_t)(pass->count * heads), &job);
    if (tiles) threads.run(threads.context, finish, (size_t)(tiles * heads), &job);
}
