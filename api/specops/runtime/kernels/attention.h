// Attention of a flat batch of tokens over a paged cache of keys and values.
//
// A pass consists of spans: tokens of one slot in consecutive positions. The kernel rotates each span's keys, writes
// keys and values into the cache's blocks, and then each token attends to all positions of its slot up to its own. A
// slot's positions are split at multiples of SPLIT. In each split, softmax is computed online over blocks of 64
// positions, in order from the first visible one; then the splits' results are merged in order. So threads can share
// the splits, and spans with the same blocks read them together, but a token's result depends on none of that, nor
// on the chunks of a prompt. Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Kwon et
// al., "Efficient Memory Management for LLM Serving with PagedAttention" (2023); Dao et al., "Flash-Decoding for
// long-context inference" (2023).
//
// The cache is [blocks][layers][kv_heads] of parts, each for 64 positions of a head. Layers may have different
// numbers of heads and head sizes. A part:
//   keys    [size][64], so that 16 scores are computed at once and keys are read in order; of int8
//           [size / 4][64][4]
//   values  [64][size, padded to a multiple of 16]; of int8 [64 / 4][padded size][4]
//   scales  only of int8: float32 [64] of keys, [64] of values; the largest magnitude / 127
// Keys of int8 and all scales are in the order of positions 0, 4, … 60, 1, 5, … 63: sixteen weights computed
// together then have a byte each of sixteen words. Attention over int8 computes products in integers
// (code_products.h): a query's head is rounded to 8 bits, too, and over a split the probabilities times the
// values' scales to 14 bits. Keys and queries are transformed first. Codes have 128 added. The cache needs no
// initialization: nothing after a slot's positions enters a sum.

#ifndef SPECOPS_ATTENTION_H
#define SPECOPS_ATTENTION_H

#include <stdint.h>

#include "spans.h"
#include "threads.h"

enum { BLOCK = 64, BLOCKS = 4, SPLIT = BLOCKS * BLOCK, MAX_SIZE = 512, MAX_HEADS = 1024, MAX_LAYERS = 1024 };
enum { KV_FLOAT32, KV_FLOAT16, KV_INT8, TYPES };

// A layer of the model.
typedef struct {
    int64_t heads, kv_heads;
    int64_t size;      // of a head
    int64_t before[TYPES], block[TYPES];  // bytes of a block before the layer's, and of the whole block
    int64_t window;    // number of visible positions, its own included; 0: all up to its own
    float rotary_factor;   // of cosines and sines computed from frequencies
    int64_t rotary_within; // maximum positions of slots for the first frequencies; 0: no maximum
    int interleaved;   // whether rotated pairs are neighbours, not half a head apart
    float scale;       // of scores
    float softcap;     // scores become softcap * tanh(score / softcap); 0: no change
    float epsilon;     // of the norms of queries and keys
} Layer;

// The tensors of a pass.
typedef struct {
    Layer layer;
    const float *query, *key, *value;  // without a key, the layer reads another layer's keys and values
    int64_t query_stride, key_stride;  // floats from a token to the next; value as key
    char *cache;  // the layer's part of block 0
    int type;
    const int64_t *block_tables;  // [slots][max_blocks]
    int64_t max_blocks;
    const float *cos, *sin;  // [positions][pairs], or NULL: no rotation, or one by `frequencies`
    const float *frequencies;  // [pairs], or NULL: angles from a position to the next
    int64_t pairs;           // number of rotated pairs, at most half of a head
    const float *query_norm, *key_norm, *value_norm;  // [size], or NULL: no norm
    float *out;                                       // [tokens][heads * size]
    const Span *spans;
    int64_t count;
} Pass;

// The softmax of some rows over some positions. Each row of sums has those of probabilities times values,
// followed by those of the probabilities by lane. The highest scores are padded to whole vectors.
typedef struct {
    float *sums, *most;
} Results;

// Splits from `first` to below `end`, and the memory for the results of all splits: `room` floats for each
// span's head, [spans][kv_heads][splits] of the span's rows.
typedef struct {
    int64_t first, end, room;
    float *memory;
} Splits;

// The kernel for one kind of processor.
typedef struct {
    // Writes the keys and values of a span's tokens for a head of the cache.
    void (*write)(const Pass *pass, const Span *span, int64_t head);
    // Computes `count` rows from `first` on, at most `tile_rows`, of spans with the same blocks in some splits.
    // A row is a token of a span and one of the query heads that share the cache's `head`.
    // NULL: over all splits of a single span.
    void (*attend)(const Pass *pass, const Span *const *spans, int64_t head, int64_t first, int64_t count,
                   const Splits *some);
    // Merges the results of all splits of a span's head and writes its output.
    void (*merge)(const Pass *pass, const Span *span, int64_t head, const Splits *all);
} AttentionKernel;

enum { MAX_ROWS = 32, SMALL_SIZE = 128 };

static inline int64_t tile_rows(const Layer *layer) {
    return layer->size <= SMALL_SIZE ? MAX_ROWS : MAX_ROWS / 2;
}

extern const AttentionKernel ATTENTION_PLAIN, ATTENTION_AVX2, ATTENTION_VNNI256, ATTENTION_AVX512,
    ATTENTION_VNNI512, ATTENTION_DOTPROD;

static inline int64_t element_bytes(int type) {
    return type == KV_FLOAT32 ? 4 : type == KV_FLOAT16 ? 2 : 1;
}

static inline int64_t padded_size(int64_t size) { return (size + 15) / 16 * 16; }

static inline int64_t rows_of(const Pass *pass, const Span *span) {
    return span->tokens * (pass->layer.heads / pass->layer.kv_heads);
}

// Floats from a row of results to the next.
static inline int64_t result_stride(int64_t padded) { return padded + 16; }

// Number of floats of the results of a span's rows over a split.
static inline int64_t result_floats(const Pass *pass, const Span *span) {
    const int64_t rows = rows_of(pass, span);
    return rows * result_stride(padded_size(pass->layer.size)) + padded_size(rows);
}

static inline int64_t key_bytes(int64_t size, int type) {
    return BLOCK * size * element_bytes(type);
}

static inline int64_t value_bytes(int64_t size, int type) {
    return BLOCK * padded_size(size) * element_bytes(type);
}

static inline int64_t part_bytes(int64_t size, int type) {
    const int64_t scales = type == KV_INT8 ? 2 * BLOCK * (int64_t)sizeof(float) : 0;
    return key_bytes(size, type) + value_bytes(size, type) + scales;
}

static inline const int64_t *table_of(const Pass *pass, const Span *span) {
    return pass->block_tables + span->slot * pass->max_blocks;
}

// The first position that a span's first token sees.
static inline int64_t first_seen(const Pass *pass, const Span *span) {
    const int64_t window = pass->layer.window;
    return window && window <= span->start ? span->start + 1 - window : 0;
}

// The address of a head's keys for the 64 positions from 64 * `block` on.
static inline char *part_of(const Pass *pass, const Span *span, int64_t head, int64_t block) {
    const Layer *layer = &pass->layer;
    const int64_t number = table_of(pass, span)[block];
    return pass->cache + number * layer->block[pass->type] + head * part_bytes(layer->size, pass->type);
}

// Computes a pass; the caller has checked sizes, slots, positions and blocks.
void attend(const AttentionKernel *kernel, const Pass *pass, Threads threads);

#endif
