// Attention for one kind of processor; setup.py compiles this file once for each.

#include "attention.h"
#include "products.h"
#include "vectors.h"

#include <float.h>
#include <math.h>

#define TINY 1e-30f  // 127 / x may overflow below it, so a head of smaller numbers is zeros

INLINE void rotate(float *one, float *two, float cos, float sin) {
    const float x = *one, y = *two;
    *one = x * cos - y * sin;
    *two = y * cos + x * sin;
}

// A function of its own, so that `restrict` lets the compiler rotate 16 pairs at once.
static void rotate_halves(float *restrict one, float *restrict two, const float *restrict cos,
                        const float *restrict sin, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i++) rotate(one + i, two + i, cos[i], sin[i]);
}

// Norms a head and pads it to whole vectors with zeros.
static void normalize(const Pass *pass, const float *from, const float *norm, float *head) {
    const int64_t size = pass->layer.size, padded = padded_size(size);
    memcpy(head, from, size * sizeof(float));
    for (int64_t i = size; i < padded; i++) head[i] = 0;
    if (norm) {
        Floats squares = {0};
        for (int64_t i = 0; i < padded; i += LANES) squares += load(head + i) * load(head + i);
        const float inverse = inverse_rms(squares, size, pass->layer.epsilon);
        for (int64_t i = 0; i < size; i++) head[i] = head[i] * inverse * norm[i];
    }
}

// Cosines and sines of a position; heads of a token, one after another, share them.
typedef struct {
    int64_t position;  // -1: none yet
    float cos[MOST_SIZE / 2 + EIGHT], sin[MOST_SIZE / 2 + EIGHT];
} Turn;

static void turn_to(const Pass *pass, int64_t position, Turn *turn) {
    if (turn->position == position) return;
    turn->position = position;
    for (int64_t i = 0; i < pass->pairs; i += EIGHT) {
        const int64_t left = pass->pairs - i;
        Eight angles = {0};
        memcpy(&angles, pass->frequencies + i, (size_t)(left < EIGHT ? left : EIGHT) * sizeof(float));
        cosines_and_sines((float)position * angles, pass->layer.rotary_factor, turn->cos + i, turn->sin + i);
    }
}

// Norms and rotates a head of a query or key.
static void prepare(const Pass *pass, const float *from, const float *norm, int64_t position, Turn *turn,
                    float *head) {
    const int64_t pairs = pass->pairs;
    normalize(pass, from, norm, head);
    if (!pairs) return;
    if (pass->frequencies) turn_to(pass, position, turn);
    const float *cos = pass->frequencies ? turn->cos : pass->cos + position * pairs;
    const float *sin = pass->frequencies ? turn->sin : pass->sin + position * pairs;
    if (pass->layer.interleaved)
        for (int64_t i = 0; i < pairs; i++) rotate(head + 2 * i, head + 2 * i + 1, cos[i], sin[i]);
    else
        rotate_halves(head, head + pairs, cos, sin, pairs);
}

// Rounds a head to codes of 8 bits; returns their scale, NaN if a number is infinite or NaN.
static float to_int8(const float *head, int64_t padded, int8_t *codes) {
    Floats most = {0}, not_finite = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        most = larger(magnitude(load(head + i)), most);
        not_finite += load(head + i) * 0.0f;
    }
    const float highest = largest(most) + total(not_finite);
    const float inverse = highest > TINY ? 127.0f / highest : 0.0f;
    for (int64_t i = 0; i < padded; i += LANES) to_codes(codes + i, load(head + i) * inverse);
    return highest > TINY || highest != highest ? highest / 127.0f : 0.0f;
}

// Converts a head to the cache's type; returns its scale.
static float convert(int type, const float *head, int64_t padded, void *to) {
    if (type == KV_INT8) return to_int8(head, padded, to);
    if (type == KV_FLOAT32) memcpy(to, head, padded * sizeof(float));
    else for (int64_t i = 0; i < padded; i += LANES) to_halves((uint16_t *)to + i, load(head + i));
    return 1;
}

static void scatter_key(int type, const void *key, int64_t size, char *keys, int64_t place) {
    for (int64_t i = 0; i < size; i++) {
        const int64_t at = i * BLOCK + place;
        if (type == KV_FLOAT32) memcpy(keys + at * 4, (const char *)key + i * 4, 4);
        else if (type == KV_FLOAT16) memcpy(keys + at * 2, (const char *)key + i * 2, 2);
        else keys[at] = ((const char *)key)[i];
    }
}

static void write_span(const Pass *pass, const Span *span, int64_t head) {
    const int64_t size = pass->layer.size, padded = padded_size(size);
    const int type = pass->type;
    float row[MOST_SIZE], converted[MOST_SIZE];
    Turn turn;
    turn.position = -1;
    for (int64_t token = 0; token < span->tokens; token++) {
        const int64_t position = span->start + token, place = position % BLOCK;
        const int64_t from = (span->first + token) * pass->key_stride + head * size;
        char *keys = part_of(pass, span, head, position / BLOCK);
        char *values = keys + key_bytes(size, type);
        char *value = values + place * padded * element_bytes(type);
        float *scales = (float *)(values + value_bytes(size, type));
        prepare(pass, pass->key + from, pass->key_norm, position, &turn, row);
        const float key_scale = convert(type, row, padded, converted);
        scatter_key(type, converted, size, keys, place);
        normalize(pass, pass->value + from, pass->value_norm, row);
        const float value_scale = convert(type, row, padded, value);
        if (type == KV_INT8) {
            scales[place] = key_scale;
            scales[BLOCK + place] = value_scale;
        }
    }
}

// Of more than SMALL_SIZE numbers a tile has at most half as many rows.
enum { MOST_FLOATS = MOST_ROWS / 2 * MOST_SIZE };

// The state of a tile's rows from one block of a split to the next.
typedef struct {
    int64_t rows, padded;
    int64_t stride;                       // floats from a row of results to the next
    int64_t prefetched;  // bytes of the cache to prefetch for each multiplied vector
    _Alignas(64) float queries[MOST_FLOATS];
    Results results;                      // over the split, so far
    _Alignas(64) float scores[MOST_ROWS * BLOCK];      // of a block, later its probabilities
    float block_max[MOST_ROWS];           // the highest score of the block
    float factors[MOST_ROWS];             // of the sums, after a higher score
    int64_t from[MOST_ROWS], to[MOST_ROWS];    // positions that a row sees: all, ...
    int64_t first[MOST_ROWS], last[MOST_ROWS]; // ... and those of the block, counted from its first
    _Alignas(64) float expanded[BLOCK * MOST_SIZE];    // a block's keys or values as float32
} Rows;

// Completes a row's scores of the block and returns the highest.
INLINE float complete_scores(const Pass *pass, Rows *rows, int64_t row, const float *scales) {
    const Floats none = splat(-INFINITY);
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t first = rows->first[row], last = rows->last[row];
    float *scores = rows->scores + row * BLOCK;
    Floats highest = none;
    for (int64_t i = first / LANES * LANES; i < last; i += LANES) {
        Floats values = load(scores + i);
        if (scales) values *= load(scales + i);
        if (pass->layer.softcap > 0) {
            const Floats cap = splat(pass->layer.softcap);
            values = cap * hyperbolic_tangent(values / cap);
        }
        const Ints position = lane + (int32_t)i;
        values = choose((position >= (int32_t)first) & (position < (int32_t)last), values, none);
        highest = larger(values, highest);
        store(scores + i, values);
    }
    return largest(highest);
}

// Turns the block's scores into probabilities, relative to the highest score so far.
static void softmax_block(const Pass *pass, Rows *rows, int64_t top, int64_t bottom, const float *scales) {
    for (int64_t row = 0; row < MOST_ROWS; row++) rows->block_max[row] = -INFINITY;
    for (int64_t row = top; row < bottom; row++)
        rows->block_max[row] = complete_scores(pass, rows, row, scales);
    for (int64_t row = 0; row < rows->rows; row += LANES) {
        const Floats before = load(rows->results.most + row);
        const Floats most = larger(load(rows->block_max + row), before);
        store(rows->results.most + row, most);
        store(rows->factors + row, exponential(before - most));
    }
    for (int64_t row = top; row < bottom; row++) {
        const int64_t first = rows->first[row] / LANES * LANES, last = rows->last[row];
        const float most = rows->results.most[row];
        float *scores = rows->scores + row * BLOCK;
        float *by_lane = rows->results.sums + row * rows->stride + rows->padded;
        Floats weights = load(by_lane) * rows->factors[row];
        for (int64_t i = first; i < last; i += LANES) {
            Floats values = exponential(load(scores + i) - most);
            weights += values;
            if (scales) values *= load(scales + BLOCK + i);
            store(scores + i, values);
        }
        store(by_lane, weights);
    }
}

// Adds values [first, last) of the block, weighted, to the sums of some rows. `next`: what is read
// after them.
INLINE void add_values(const Rows *rows, Multiply *multiply, const void *values, const void *next,
                       int64_t row, int64_t count, int64_t first, int64_t last) {
    const Product product = {
        .out = rows->results.sums + row * rows->stride, .out_stride = rows->stride,
        .factors = rows->factors + row, .a = rows->scores + row * BLOCK, .a_stride = BLOCK,
        .b = values, .ahead = next, .prefetched = rows->prefetched, .step = rows->padded,
        .first = first, .last = last};
    multiply(&product, count, rows->padded / LANES);
}

// The same for rows that see different parts of the block, each in the order of positions: first what
// a row sees before the common part, then the common part for all rows together, then the rest.
static void add_parts(Rows *rows, Multiply *multiply, const void *values, const void *next,
                      int64_t row, int64_t count) {
    int64_t first = 0, last = BLOCK;
    int equal = 1;
    for (int64_t r = row; r < row + count; r++) {
        equal &= rows->first[r] == rows->first[row] && rows->last[r] == rows->last[row];
        first = rows->first[r] > first ? rows->first[r] : first;
        last = rows->last[r] < last ? rows->last[r] : last;
    }
    if (equal) {
        add_values(rows, multiply, values, next, row, count, first, last);
        return;
    }
    if (last < first) last = first;
    for (int64_t r = row; r < row + count; r++) {
        const int64_t stop = rows->last[r] < first ? rows->last[r] : first;
        add_values(rows, multiply, values, next, r, 1, rows->first[r], stop);
        rows->factors[r] = 1;
    }
    add_values(rows, multiply, values, next, row, count, first, last);
    for (int64_t r = row; r < row + count; r++) {
        const int64_t start = rows->first[r] > last ? rows->first[r] : last;
        if (start < rows->last[r])
            add_values(rows, multiply, values, next, r, 1, start, rows->last[r]);
    }
}

// Sets the positions that each row sees in the block from `base` on, counted from there.
static void visible_range(Rows *rows, int64_t top, int64_t bottom, int64_t base, int64_t *least,
                          int64_t *most) {
    *least = BLOCK, *most = 0;
    for (int64_t row = top; row < bottom; row++) {
        const int64_t first = rows->from[row] > base ? rows->from[row] - base : 0;
        const int64_t last = rows->to[row] < base + BLOCK ? rows->to[row] - base : BLOCK;
        rows->first[row] = first, rows->last[row] = last;
        *least = first < *least ? first : *least;
        *most = last > *most ? last : *most;
    }
}

// Converts elements [first, last) to float32, once for many rows.
static const void *expand(int type, const void *elements, int64_t first, int64_t last, float *to) {
    for (int64_t i = first; i < last; i += LANES)
        store(to + i, type == KV_FLOAT16 ? element(KV_FLOAT16, elements, i) : element(KV_INT8, elements, i));
    return to;
}

static void see_block(const Pass *pass, Rows *rows, const char *keys, const char *next,
                      int64_t base) {
    const int64_t size = pass->layer.size, padded = rows->padded;
    int64_t top = 0, bottom = rows->rows, least, most;
    while (rows->to[top] <= base) top++;
    while (rows->from[bottom - 1] >= base + BLOCK) bottom--;
    visible_range(rows, top, bottom, base, &least, &most);
    const int64_t start = least / LANES, stop = (most + LANES - 1) / LANES;
    const void *values = keys + key_bytes(size, pass->type), *elements = keys;
    const char *behind = keys + key_bytes(size, pass->type) + value_bytes(size, pass->type);
    const float *scales = pass->type == KV_INT8 ? (const float *)behind : NULL;
    int type = pass->type;
    const int many = type != KV_FLOAT32 && bottom - top > (type == KV_INT8 ? FEW_CODES : FEW_HALVES);
    if (many) {
        elements = expand(type, keys, 0, size * BLOCK, rows->expanded);
        type = KV_FLOAT32;
    }
    const Product product = {
        .out = rows->scores + top * BLOCK + start * LANES, .out_stride = BLOCK,
        .a = rows->queries + top * padded, .a_stride = padded,
        .b = (const char *)elements + start * LANES * element_bytes(type),
        .ahead = values, .prefetched = rows->prefetched, .step = BLOCK, .first = 0, .last = size};
    SCORES[type](&product, bottom - top, stop - start);
    softmax_block(pass, rows, top, bottom, scales);
    if (many)
        values = expand(pass->type, values, least * padded, most * padded, rows->expanded);
    for (int64_t row = top, count; row < bottom; row += count) {
        count = height_of_tile(bottom - row);
        add_parts(rows, VALUES[type], values, row == top ? next : values, row, count);
    }
}

// The results of a span's rows from `first` on over split number `split`.
INLINE Results results_of(const Pass *pass, const Span *span, const Splits *all, int64_t split,
                          int64_t first) {
    const int64_t rows = rows_of(pass, span), stride = result_stride(padded_size(pass->layer.size));
    float *memory = all->memory + (split - all->from) * result_floats(pass, span);
    return (Results){memory + first * stride, memory + rows * stride + first};
}

// Merges results over the next split into those over the splits before it. Where a row saw nothing in
// one of them, the other stays as it is, to the bit.
static void merge_results(Results into, Results next, int64_t rows, int64_t stride) {
    for (int64_t first = 0; first < rows; first += LANES) {
        const Floats before = load(into.most + first), after = load(next.most + first);
        const Floats most = larger(after, before);
        float old[LANES], new[LANES];
        store(into.most + first, most);
        store(old, exponential(before - most)), store(new, exponential(after - most));
        for (int64_t row = first; row < rows && row < first + LANES; row++)
            for (int64_t i = row * stride; i < (row + 1) * stride; i += LANES)
                store(into.sums + i, load(into.sums + i) * old[row - first] +
                                         load(next.sums + i) * new[row - first]);
    }
}

// Writes the output of rows from `first` on, of which `all` has the results.
static void write_rows(const Pass *pass, const Span *span, int64_t head, int64_t first, int64_t count,
                       Results all) {
    const Layer *layer = &pass->layer;
    const int64_t group = layer->heads / layer->kv_heads, size = layer->size, padded = padded_size(size);
    for (int64_t row = 0; row < count; row++) {
        const int64_t token = span->first + (first + row) / group;
        const int64_t number = head * group + (first + row) % group;
        float *out = pass->out + (token * layer->heads + number) * size;
        const float *sums = all.sums + row * result_stride(padded);
        const float inverse = 1.0f / total(load(sums + padded));
        for (int64_t i = 0; i < size; i++) out[i] = sums[i] * inverse;
    }
}

static void merge_splits(const Pass *pass, const Span *span, int64_t head, const Splits *all) {
    const int64_t rows = rows_of(pass, span), stride = result_stride(padded_size(pass->layer.size));
    const Results into = results_of(pass, span, all, all->from, 0);
    for (int64_t split = all->from + 1; split < all->end; split++)
        merge_results(into, results_of(pass, span, all, split, 0), rows, stride);
    write_rows(pass, span, head, 0, rows, into);
}

static void prepare_rows(const Pass *pass, const Span *span, int64_t head, int64_t first,
                         int64_t count, Rows *rows) {
    const Layer *layer = &pass->layer;
    const int64_t group = layer->heads / layer->kv_heads, size = layer->size;
    rows->rows = count, rows->padded = padded_size(size), rows->stride = result_stride(rows->padded);
    // Prefetching: one token behind 1,000 takes 144 us instead of 169 with float16, 127 instead of 165
    // with int8 (32 heads of 64 over 4, one thread, AMD EPYC); with float32 it took longer.
    rows->prefetched = pass->type == KV_FLOAT32 ? 0 : LANES * element_bytes(pass->type);
    Turn turn;
    turn.position = -1;
    for (int64_t row = 0; row < count; row++) {
        const int64_t token = (first + row) / group, number = head * group + (first + row) % group;
        float *query = rows->queries + row * rows->padded;
        prepare(pass, pass->query + (span->first + token) * pass->query_stride + number * size,
                pass->query_norm, span->start + token, &turn, query);
        for (int64_t i = 0; i < size; i++) query[i] *= layer->scale;
        const int64_t end = span->start + token + 1, window = layer->window;
        rows->to[row] = end, rows->from[row] = window && window < end ? end - window : 0;
    }
}

// Computes the results over one split. Rows that see nothing of it keep sums of -0: added to any number
// it leaves the number as it is.
static void see_split(const Pass *pass, const Span *span, int64_t head, Rows *rows, int64_t split,
                      Results results) {
    const int64_t count = rows->rows, first = rows->from[0], last = rows->to[count - 1];
    const int64_t floats = count * rows->stride;
    rows->results = results;
    for (int64_t i = 0; i < floats; i += LANES) store(results.sums + i, splat(-0.0f));
    for (int64_t row = 0; row < count; row += LANES) store(results.most + row, splat(-FLT_MAX));
    const int64_t end = (split + 1) * SPLIT < last ? (split + 1) * SPLIT : last;
    int64_t base = split * SPLIT > first ? split * SPLIT : first / BLOCK * BLOCK;
    for (; base < end; base += BLOCK) {
        const int64_t block = base / BLOCK, next = base + BLOCK < last ? block + 1 : block;
        see_block(pass, rows, part_of(pass, span, head, block), part_of(pass, span, head, next), base);
    }
}

static void attend_rows(const Pass *pass, const Span *span, int64_t head, int64_t first,
                        int64_t count, const Splits *some) {
    Rows rows;
    prepare_rows(pass, span, head, first, count, &rows);
    if (some) {
        for (int64_t split = some->first; split < some->end; split++)
            see_split(pass, span, head, &rows, split, results_of(pass, span, some, split, first));
        return;
    }
    _Alignas(64) float sums[2][MOST_FLOATS + MOST_ROWS * LANES], most[2][MOST_ROWS];
    const Results all = {sums[0], most[0]}, next = {sums[1], most[1]};
    int64_t split = rows.from[0] / SPLIT;
    see_split(pass, span, head, &rows, split, all);
    while (++split * SPLIT < rows.to[count - 1]) {
        see_split(pass, span, head, &rows, split, next);
        merge_results(all, next, count, rows.stride);
    }
    write_rows(pass, span, head, first, count, all);
}

const AttentionKernel ATTENTION = {write_span, attend_rows, merge_splits};
