// Attention for one kind of processor; setup.py compiles this file once for each.

#include "attention.h"
#include "code_products.h"
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

// A separate function, so that `restrict` lets the compiler rotate 16 pairs at once.
static void rotate_halves(float *restrict one, float *restrict two, const float *restrict cos,
                        const float *restrict sin, int64_t pairs) {
    for (int64_t i = 0; i < pairs; i++) rotate(one + i, two + i, cos[i], sin[i]);
}

// Normalizes a head and pads it to whole vectors with zeros.
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
    float cos[MAX_SIZE / 2 + EIGHT], sin[MAX_SIZE / 2 + EIGHT];
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

// Normalizes and rotates a head of a query or key.
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

// Flips the sign of lanes with `bit` set.
INLINE Floats sum_and_difference(Floats values, Floats swapped, int bit) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return swapped + (Floats)((Words)values ^ ((Words)((lane & bit) != 0) & 0x80000000u));
}

// Numbers of a head that are transformed together: the largest power of two that divides its size.
static inline int64_t transformed(int64_t size) { return size & -size; }

// A Hadamard transform without its factor 1 / sqrt(transformed): each number becomes a sum of all, with signs.
// Products of queries and keys do not change, and a channel with large numbers no longer determines the scale of a
// head's codes. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024).
static void transform(float *head, int64_t size) {
    const int64_t together = transformed(size);
    for (int64_t half = together / 2; half >= LANES; half /= 2)
        for (int64_t i = 0; i < size; i += LANES) {
            if (i & half) continue;
            const Floats one = load(head + i), other = load(head + i + half);
            store(head + i, one + other), store(head + i + half, one - other);
        }
    for (int64_t i = 0; i < size; i += LANES) {
        Floats v = load(head + i);
        if (together > 8) v = sum_and_difference(v, HALVES_SWAPPED(v), 8);
        v = sum_and_difference(v, FOURS_SWAPPED(v), 4);
        v = sum_and_difference(v, TWOS_SWAPPED(v), 2);
        store(head + i, sum_and_difference(v, ONES_SWAPPED(v), 1));
    }
}

// The factor that turns numbers up to the largest of `most` into codes up to `codes`; `*scale` turns codes into
// numbers: NaN if `not_finite` is not 0, always the same NaN.
INLINE float factor_of(Floats most, Floats not_finite, float codes, float *scale) {
    const float highest = largest(most) + total(not_finite);
    *scale = highest > TINY ? highest / codes : highest != highest ? NAN : 0.0f;
    return highest > TINY ? codes / highest : 0.0f;
}

// The same of a head, for codes of 8 bits.
static float code_factor(const float *head, int64_t padded, float *scale) {
    Floats most = {0}, not_finite = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        most = larger(magnitude(load(head + i)), most);
        not_finite += load(head + i) * 0.0f;
    }
    return factor_of(most, not_finite, 127.0f, scale);
}

// Rounds a head to codes of 8 bits, raised; returns their scale.
static float to_raised(const float *head, int64_t padded, uint8_t *codes) {
    float scale;
    const float factor = code_factor(head, padded, &scale);
    for (int64_t i = 0; i < padded; i += LANES) to_codes((int8_t *)codes + i, load(head + i) * factor);
    for (int64_t i = 0; i < padded; i++) codes[i] ^= RAISED;
    return scale;
}

// Converts a head to the cache's type of floats.
static void convert(int type, const float *head, int64_t padded, void *to) {
    if (type == KV_FLOAT32) memcpy(to, head, padded * sizeof(float));
    else for (int64_t i = 0; i < padded; i += LANES) to_halves((uint16_t *)to + i, load(head + i));
}

static void scatter_key(int type, const void *key, int64_t size, char *keys, int64_t place) {
    for (int64_t i = 0; i < size; i++) {
        const int64_t at = i * BLOCK + place;
        if (type == KV_FLOAT32) memcpy(keys + at * 4, (const char *)key + i * 4, 4);
        else memcpy(keys + at * 2, (const char *)key + i * 2, 2);
    }
}

// The index of a block's position among the codes of keys and the scales.
static inline int64_t column_of(int64_t place) { return place % 4 * LANES + place / 4; }

// Writes a key and a value as codes.
static void write_codes(float *key, const float *value, int64_t size, char *keys, int64_t place) {
    const int64_t padded = padded_size(size), column = column_of(place);
    uint8_t codes[MAX_SIZE], *values = (uint8_t *)keys + key_bytes(size, KV_INT8);
    float *scales = (float *)(values + value_bytes(size, KV_INT8));
    transform(key, size);
    scales[column] = to_raised(key, padded, codes);
    for (int64_t i = 0; i < size; i += 4) memcpy(keys + i * BLOCK + column * 4, codes + i, 4);
    scales[BLOCK + column] = to_raised(value, padded, codes);
    for (int64_t i = 0; i < padded; i++) values[(place / 4 * padded + i) * 4 + place % 4] = codes[i];
}

static void write_span(const Pass *pass, const Span *span, int64_t head) {
    const int64_t size = pass->layer.size, padded = padded_size(size);
    const int type = pass->type;
    float row[MAX_SIZE], value[MAX_SIZE], converted[MAX_SIZE];
    Turn turn;
    turn.position = -1;
    for (int64_t token = 0; token < span->tokens; token++) {
        const int64_t position = span->start + token, place = position % BLOCK;
        const int64_t from = (span->first + token) * pass->key_stride + head * size;
        char *keys = part_of(pass, span, head, position / BLOCK);
        prepare(pass, pass->key + from, pass->key_norm, position, &turn, row);
        normalize(pass, pass->value + from, pass->value_norm, value);
        if (type == KV_INT8) {
            write_codes(row, value, size, keys, place);
            continue;
        }
        convert(type, row, padded, converted);
        scatter_key(type, converted, size, keys, place);
        convert(type, value, padded, keys + key_bytes(size, type) + place * padded * element_bytes(type));
    }
}

// With heads of more than SMALL_SIZE numbers, a tile has at most half as many rows.
enum { MAX_FLOATS = MAX_ROWS / 2 * MAX_SIZE };

// A tile's memory for a cache of codes: its queries, and for a split the scores (first as integers), the
// scales of keys and values, the weights of values as codes, and these codes' products with values.
typedef struct {
    _Alignas(64) int32_t queries[MAX_FLOATS / 4 * WORDS], starts[MAX_ROWS];
    float query_scales[MAX_ROWS], weight_scales[MAX_ROWS];
    _Alignas(64) float scores[MAX_ROWS * SPLIT], scales[2][SPLIT], relative[SPLIT];
    _Alignas(64) int32_t weights[MAX_ROWS * SPLIT / 2], weight_starts[2 * MAX_ROWS];
    _Alignas(64) int32_t sums[2 * MAX_FLOATS];
} Coded;

// The state of a tile's rows from one block of a split to the next.
typedef struct {
    int64_t rows, padded;
    const Span *spans[MAX_ROWS];
    int64_t numbers[MAX_ROWS];            // among the rows of the span
    int64_t stride;                       // floats from a row of results to the next
    int64_t prefetched;  // bytes of the cache to prefetch for each multiplied vector
    _Alignas(64) float queries[MAX_FLOATS];
    Results results;                      // over the split, so far
    int64_t from[MAX_ROWS], to[MAX_ROWS];    // visible positions of a row: all, ...
    int64_t first[MAX_ROWS], last[MAX_ROWS]; // ... and those of the block or split, counted from its first
    float block_max[MAX_ROWS];           // the highest score of the block or split
    float factors[MAX_ROWS];             // of the sums, after a higher score
    union {
        struct {
            _Alignas(64) float scores[MAX_ROWS * BLOCK];      // of a block, later its probabilities
            _Alignas(64) float expanded[BLOCK * MAX_SIZE];    // a block's keys or values as float32
        };
        Coded coded;
    };
} Rows;

INLINE Floats capped(Floats scores, float cap) { return cap * hyperbolic_tangent(scores / splat(cap)); }

// Completes a row's scores of the block and returns the highest.
INLINE float complete_scores(const Pass *pass, Rows *rows, int64_t row) {
    const Floats none = splat(-INFINITY);
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t first = rows->first[row], last = rows->last[row];
    float *scores = rows->scores + row * BLOCK;
    Floats highest = none;
    for (int64_t i = first / LANES * LANES; i < last; i += LANES) {
        Floats values = load(scores + i);
        if (pass->layer.softcap > 0) values = capped(values, pass->layer.softcap);
        const Ints position = lane + (int32_t)i;
        values = choose((position >= (int32_t)first) & (position < (int32_t)last), values, none);
        highest = larger(values, highest);
        store(scores + i, values);
    }
    return largest(highest);
}

// Turns the block's scores into probabilities, relative to the highest score so far.
static void softmax_block(const Pass *pass, Rows *rows, int64_t top, int64_t bottom) {
    for (int64_t row = 0; row < MAX_ROWS; row++) rows->block_max[row] = -INFINITY;
    for (int64_t row = top; row < bottom; row++)
        rows->block_max[row] = complete_scores(pass, rows, row);
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
            const Floats values = exponential(load(scores + i) - most);
            weights += values;
            store(scores + i, values);
        }
        store(by_lane, weights);
    }
}

// Adds values [first, last) of the block, weighted, to the sums of some rows. `next` is read after them.
INLINE void add_values(const Rows *rows, Multiply *multiply, const void *values, const void *next,
                       int64_t row, int64_t count, int64_t first, int64_t last) {
    const Product product = {
        .out = rows->results.sums + row * rows->stride, .out_stride = rows->stride,
        .factors = rows->factors + row, .a = rows->scores + row * BLOCK, .a_stride = BLOCK,
        .b = values, .ahead = next, .prefetched = rows->prefetched, .step = rows->padded,
        .first = first, .last = last};
    multiply(&product, count, rows->padded / LANES);
}

// The same for rows that see different parts of the block, each in the order of positions: first the part
// before the common one, row by row, then the common part for all rows together, then the rest.
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

// Sets each row's visible positions among `count` from `base` on, relative to `base`.
static void visible_range(Rows *rows, int64_t top, int64_t bottom, int64_t base, int64_t count,
                          int64_t *least, int64_t *most) {
    *least = count, *most = 0;
    for (int64_t row = top; row < bottom; row++) {
        const int64_t first = rows->from[row] > base ? rows->from[row] - base : 0;
        const int64_t last = rows->to[row] < base + count ? rows->to[row] - base : count;
        rows->first[row] = first, rows->last[row] = last;
        *least = first < *least ? first : *least;
        *most = last > *most ? last : *most;
    }
}

// Converts elements [first, last) to float32, once for many rows.
static const void *expand(const void *elements, int64_t first, int64_t last, float *to) {
    for (int64_t i = first; i < last; i += LANES) store(to + i, element(KV_FLOAT16, elements, i));
    return to;
}

static void see_block(const Pass *pass, Rows *rows, const char *keys, const char *next, int64_t base) {
    const int64_t size = pass->layer.size, padded = rows->padded;
    int64_t top = 0, bottom = rows->rows, least, most;
    while (rows->to[top] <= base) top++;
    while (rows->from[bottom - 1] >= base + BLOCK) bottom--;
    visible_range(rows, top, bottom, base, BLOCK, &least, &most);
    const int64_t start = least / LANES, stop = (most + LANES - 1) / LANES;
    const void *values = keys + key_bytes(size, pass->type), *elements = keys;
    int type = pass->type;
    const int many = type == KV_FLOAT16 && bottom - top > FEW_HALVES;
    if (many) {
        elements = expand(keys, 0, size * BLOCK, rows->expanded);
        type = KV_FLOAT32;
    }
    const Product product = {
        .out = rows->scores + top * BLOCK + start * LANES, .out_stride = BLOCK,
        .a = rows->queries + top * padded, .a_stride = padded,
        .b = (const char *)elements + start * LANES * element_bytes(type),
        .ahead = values, .prefetched = rows->prefetched, .step = BLOCK, .first = 0, .last = size};
    SCORES[type](&product, bottom - top, stop - start);
    softmax_block(pass, rows, top, bottom);
    if (many) values = expand(values, least * padded, most * padded, rows->expanded);
    for (int64_t row = top, count; row < bottom; row += count) {
        count = height_of_tile(bottom - row);
        add_parts(rows, VALUES[type], values, row == top ? next : values, row, count);
    }
}

// -- a cache of codes --------------------------------------------------------------------------------

// Weights, which are probabilities times the scales of values, become codes relative to the largest scale.
// Codes of 14 bits are two numbers that every instruction accepts as signed numbers of 8 bits.
enum { WEIGHT_BITS = 14, HALF_BITS = 7, WEIGHT_ROWS = BYTEWISE ? 2 : 1, ROW_WORDS = SPLIT / 4 * WORDS };

// Rounds the prepared queries to codes.
static void round_queries(Rows *rows, int64_t size) {
    const int64_t words = rows->padded / 4;
    for (int64_t row = 0; row < rows->rows; row++) {
        float *query = rows->queries + row * rows->padded;
        Ints sum = {0};
        transform(query, size);
        float *scale = rows->coded.query_scales + row;
        const float factor = code_factor(query, rows->padded, scale);
        const Ints finite = (Ints){0} - (*scale == *scale);
        for (int64_t i = 0; i < size; i += LANES) {
            const Ints codes = rounded(load(query + i) * factor) & finite;
            to_words(rows->coded.queries + row * words * WORDS + i / 4, words, codes);
            sum += codes;
        }
        rows->coded.starts[row] = -SEEN_RAISED * total_of(sum);
    }
}

// Lanes of the columns from number `i` on whose positions are visible to a row.
INLINE Ints seen_at(int64_t i, int64_t first, int64_t last) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints place = lane * 4 + (int32_t)(i / BLOCK * BLOCK + i % BLOCK / LANES);
    return (place >= (int32_t)first) & (place < (int32_t)last);
}

// Scales of values, such that the largest one visible to a row becomes the largest code; returns the factor of
// codes. Positions after a row's last must not count: they may be written later, or belong to a rejected token.
static float relative_scales(const float *scales, int64_t first, int64_t last, int64_t low, int64_t high,
                             float *to) {
    Floats most = {0}, not_finite = {0};
    for (int64_t i = low; i < high; i += LANES) {
        const Floats seen = choose(seen_at(i, first, last), load(scales + i), (Floats){0});
        most = larger(seen, most);
        not_finite += seen * 0.0f;
        store(to + i, seen);
    }
    float scale;
    const float factor = factor_of(most, not_finite, (1 << WEIGHT_BITS) - 1, &scale);
    for (int64_t i = low; i < high; i += LANES) store(to + i, load(to + i) * factor);
    return scale;
}

// 2^x for x <= 0, exact for 0; 2^-125 below -125. Its error of 1e-4 is less than that of rounding.
INLINE Floats power_of_two(Floats x) {
    x = larger(splat(-125.0f), x);
    const Floats shifted = x + ROUNDER, r = x - (shifted - ROUNDER);
    Floats y = r * 0.0550087662f + 0.242210995f;
    y = y * r + 0.693282974f;
    y = y * r + 1.0f;
    return (Floats)((Words)y + ((Words)shifted << 23));
}

// Writes sixteen fours of a row's codes as its words: the first and third of each, then the second and fourth.
INLINE void pairs_to_words(int32_t *words, Words even, Words odd) {
    const uint32_t low = ((1 << HALF_BITS) - 1) * 0x10001;
    const Words one = BYTEWISE ? (even & low) | (odd & low) << 8 : even;
    const Words other = BYTEWISE ? (even >> HALF_BITS & low) | (odd >> HALF_BITS & low) << 8 : odd;
    store((float *)words, (Floats)one), store((float *)(words + SPLIT / 4), (Floats)other);
}

// Turns a row's integer products with the split's keys into scores (without the scale of its query if there is
// no soft cap) and returns the highest.
INLINE float score_codes(const Pass *pass, Rows *rows, int64_t row, int64_t low, int64_t high) {
    const int64_t first = rows->first[row], last = rows->last[row];
    const int whole = first <= low && last >= high;
    float *scores = rows->coded.scores + row * SPLIT;
    Floats highest = splat(-FLT_MAX);
    for (int64_t i = low; i < high; i += LANES) {
        Floats values = __builtin_convertvector((Ints)load(scores + i), Floats);
        values *= load(rows->coded.scales[0] + i);
        if (pass->layer.softcap > 0)
            values = capped(values * rows->coded.query_scales[row], pass->layer.softcap);
        if (!whole) values = choose(seen_at(i, first, last), values, splat(-INFINITY));
        highest = larger(values, highest);
        store(scores + i, values);
    }
    return largest(highest);
}

// Computes the codes of a row's weights and adds up its probabilities, by lane.
INLINE void weigh_codes(const Pass *pass, Rows *rows, int64_t row, int64_t low, int64_t high) {
    Coded *c = &rows->coded;
    const int64_t first = rows->first[row], last = rows->last[row];
    const int whole = first <= low && last >= high;
    _Alignas(64) float own[SPLIT];
    const float *relative = c->relative;
    if (!whole) {
        c->weight_scales[row] = relative_scales(c->scales[1], first, last, low, high, own);
        relative = own;
    }
    const float scale = pass->layer.softcap > 0 ? 1.0f : c->query_scales[row];
    const float most = rows->block_max[row], factor = scale * 1.44269504f;
    int32_t *words = c->weights + row * WEIGHT_ROWS * ROW_WORDS;
    Floats by_lane = {0};
    Words sum = {0}, zeros = {0};  // of codes, and of the number added for rounding
    for (int64_t i = low; i < high; i += BLOCK, words += BLOCK / 4) {
        Words codes[BLOCK / LANES];
        for (int nth = 0; nth < BLOCK / LANES; nth++) {
            const int64_t at = i + nth * LANES;
            Floats values = power_of_two((load(c->scores + row * SPLIT + at) - most) * factor);
            if (!whole) values = choose(seen_at(at, first, last), values, (Floats){0});
            codes[nth] = (Words)(values * load(relative + at) + ROUNDER);
            by_lane += values;
            sum += codes[nth], zeros += (Words)splat(ROUNDER);
        }
        pairs_to_words(words, (codes[0] & 0xffff) | codes[2] << 16, (codes[1] & 0xffff) | codes[3] << 16);
    }
    store(rows->results.sums + row * rows->stride + rows->padded, by_lane);
    rows->results.most[row] = most * scale;
    const Words most_codes = (Words){0} + ((SPLIT / LANES << WEIGHT_BITS) - 1);  // NaN has no code
    c->weight_starts[row * WEIGHT_ROWS] = -SEEN_RAISED * total_of((Ints)((sum - zeros) & most_codes));
    if (BYTEWISE) c->weight_starts[row * WEIGHT_ROWS + 1] = 0;
}

// `see_split` for a cache of codes: softmax is computed over the whole split.
static void see_codes(const Pass *pass, const Span *span, int64_t head, Rows *rows, int64_t split) {
    Coded *c = &rows->coded;
    const int64_t size = pass->layer.size, padded = rows->padded, base = split * SPLIT;
    const int64_t end = rows->to[rows->rows - 1];
    int64_t top = 0, bottom = rows->rows, low, high;
    while (top < bottom && rows->to[top] <= base) top++;
    while (top < bottom && rows->from[bottom - 1] >= base + SPLIT) bottom--;
    if (top == bottom) return;
    visible_range(rows, top, bottom, base, SPLIT, &low, &high);
    low = low / BLOCK * BLOCK, high = (high + BLOCK - 1) / BLOCK * BLOCK;
    const uint8_t *keys[BLOCKS], *values[BLOCKS], *scales[BLOCKS], *next[BLOCKS];
    const int64_t blocks = (high - low) / BLOCK, scale_bytes = BLOCK * (int64_t)sizeof(float);
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t block = (base + low) / BLOCK + i, later = block + BLOCKS;
        keys[i] = (const uint8_t *)part_of(pass, span, head, block);
        values[i] = keys[i] + key_bytes(size, KV_INT8), scales[i] = values[i] + value_bytes(size, KV_INT8);
        next[i] = later * BLOCK < end ? (const uint8_t *)part_of(pass, span, head, later) : keys[i];
        for (int64_t line = scales[i] - keys[i]; line < part_bytes(size, KV_INT8); line += 64)
            prefetch(next[i] + line);
    }
    for (int64_t i = 0; i < blocks; i++) {
        const CodeProduct scores = {
            .out = (int32_t *)(c->scores + top * SPLIT + low + i * BLOCK), .out_stride = SPLIT,
            .starts = c->starts + top, .x = c->queries + top * padded / 4 * WORDS, .x_stride = padded / 4 * WORDS,
            .odd = padded / 4, .bytes = keys + i, .ahead = values + i, .blocks = 1,
            .fours = size / 4, .step = 4 * BLOCK};
        multiply_codes(&scores, bottom - top, BLOCK);
        for (int kind = 0; kind < 2; kind++)
            memcpy(c->scales[kind] + low + i * BLOCK, scales[i] + kind * scale_bytes, scale_bytes);
    }
    const float scale = relative_scales(c->scales[1], low, high, low, high, c->relative);
    for (int64_t row = top; row < bottom; row++) {
        rows->block_max[row] = score_codes(pass, rows, row, low, high);
        c->weight_scales[row] = scale;
    }
    for (int64_t row = top; row < bottom; row++) weigh_codes(pass, rows, row, low, high);
    const CodeProduct sums = {
        .out = c->sums, .out_stride = padded, .starts = c->weight_starts + top * WEIGHT_ROWS,
        .x = c->weights + top * WEIGHT_ROWS * ROW_WORDS, .x_stride = ROW_WORDS,
        .odd = SPLIT / 4, .bytes = values, .ahead = next, .blocks = blocks, .fours = BLOCK / 4, .step = 4 * padded};
    multiply_codes(&sums, (bottom - top) * WEIGHT_ROWS, padded);
    for (int64_t row = top; row < bottom; row++)
        for (int64_t i = 0; i < padded; i += LANES) {
            const float *from = (const float *)c->sums + (row - top) * WEIGHT_ROWS * padded + i;
            Ints sum = (Ints)load(from);
            if (BYTEWISE) sum += (Ints)load(from + padded) * (1 << HALF_BITS);
            store(rows->results.sums + row * rows->stride + i,
                  __builtin_convertvector(sum, Floats) * c->weight_scales[row]);
        }
}

// The results of a span's rows from `first` on over split number `split`.
INLINE Results results_of(const Pass *pass, const Span *span, int64_t head, const Splits *all,
                          int64_t split, int64_t first) {
    const int64_t rows = rows_of(pass, span), stride = result_stride(padded_size(pass->layer.size));
    const int64_t number = (span - pass->spans) * pass->layer.kv_heads + head;
    float *memory = all->memory + number * all->room;
    memory += (split - first_seen(pass, span) / SPLIT) * result_floats(pass, span);
    return (Results){memory + first * stride, memory + rows * stride + first};
}

// Merges the results over the next split into those over the splits before it. If a row saw nothing in
// one of them, the other stays the same, to the bit.
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

// Writes the output of rows from `first` on, whose results are in `all`.
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
    const Results into = results_of(pass, span, head, all, all->first, 0);
    for (int64_t split = all->first + 1; split < all->end; split++)
        merge_results(into, results_of(pass, span, head, all, split, 0), rows, stride);
    write_rows(pass, span, head, 0, rows, into);
}

static void prepare_rows(const Pass *pass, const Span *const *spans, int64_t head, int64_t first,
                         int64_t count, Rows *rows) {
    const Layer *layer = &pass->layer;
    const int64_t group = layer->heads / layer->kv_heads, size = layer->size;
    rows->rows = count, rows->padded = padded_size(size), rows->stride = result_stride(rows->padded);
    // With prefetching, one token after 1,000 takes 144 us instead of 169 with float16 (32 heads of 64 over 4,
    // one thread, AMD EPYC); with float32 it took longer.
    rows->prefetched = pass->type == KV_FLOAT32 ? 0 : LANES * element_bytes(pass->type);
    const float scale = layer->scale / (pass->type == KV_INT8 ? (float)transformed(size) : 1.0f);
    Turn turn;
    turn.position = -1;
    for (int64_t row = 0; row < count; row++, first++) {
        while (first >= rows_of(pass, *spans)) first -= rows_of(pass, *spans++);
        const Span *span = rows->spans[row] = *spans;
        const int64_t token = first / group, number = head * group + first % group;
        rows->numbers[row] = first;
        float *query = rows->queries + row * rows->padded;
        prepare(pass, pass->query + (span->first + token) * pass->query_stride + number * size,
                pass->query_norm, span->start + token, &turn, query);
        for (int64_t i = 0; i < size; i++) query[i] *= scale;
        const int64_t end = span->start + token + 1, window = layer->window;
        rows->to[row] = end, rows->from[row] = window && window < end ? end - window : 0;
    }
    if (pass->type == KV_INT8) round_queries(rows, size);
}

// Computes the results over one split. Rows that see nothing of it keep sums of -0, which changes no number
// to which it is added.
static void see_split(const Pass *pass, const Span *span, int64_t head, Rows *rows, int64_t split,
                      Results results) {
    const int64_t count = rows->rows, first = rows->from[0], last = rows->to[count - 1];
    const int64_t floats = count * rows->stride;
    rows->results = results;
    for (int64_t i = 0; i < floats; i += LANES) store(results.sums + i, splat(-0.0f));
    for (int64_t row = 0; row < count; row += LANES) store(results.most + row, splat(-FLT_MAX));
    if (pass->type == KV_INT8) {
        see_codes(pass, span, head, rows, split);
        return;
    }
    const int64_t end = (split + 1) * SPLIT < last ? (split + 1) * SPLIT : last;
    int64_t base = split * SPLIT > first ? split * SPLIT : first / BLOCK * BLOCK;
    for (; base < end; base += BLOCK) {
        const int64_t block = base / BLOCK, next = base + BLOCK < last ? block + 1 : block;
        see_block(pass, rows, part_of(pass, span, head, block), part_of(pass, span, head, next), base);
    }
}

// Prefetches the keys of a piece's first split, before its queries are prepared; later keys are prefetched during the
// products with values of the split before them. One token after 4,000 takes 0.93 to 0.97 of the time (9 heads of 64
// over 3, AMD EPYC, Zen 4).
static void prefetch_keys(const Pass *pass, const Span *span, int64_t head, int64_t split) {
    const int64_t seen = first_seen(pass, span) / BLOCK, last = (span->start + span->tokens - 1) / BLOCK;
    int64_t block = split * BLOCKS > seen ? split * BLOCKS : seen;
    for (; block < (split + 1) * BLOCKS && block <= last; block++) {
        const char *keys = part_of(pass, span, head, block);
        for (int64_t at = 0; at < key_bytes(pass->layer.size, KV_INT8); at += 64) prefetch(keys + at);
    }
}

static void attend_rows(const Pass *pass, const Span *const *spans, int64_t head, int64_t first,
                        int64_t count, const Splits *some) {
    Rows rows;
    if (pass->type == KV_INT8 && some && some->first < some->end)
        prefetch_keys(pass, *spans, head, some->first);
    prepare_rows(pass, spans, head, first, count, &rows);
    _Alignas(64) float sums[2][MAX_FLOATS + MAX_ROWS * LANES], most[2][MAX_ROWS];
    const Results all = {sums[0], most[0]}, next = {sums[1], most[1]};
    const Span *span = rows.spans[count - 1];
    for (int64_t split = some ? some->first : 0; some && split < some->end; split++) {
        see_split(pass, span, head, &rows, split, all);
        for (int64_t row = 0; row < count; row++) {  // each span keeps the results of its rows
            const Results kept = results_of(pass, rows.spans[row], head, some, split, rows.numbers[row]);
            memcpy(kept.sums, all.sums + row * rows.stride, (size_t)rows.stride * sizeof(float));
            *kept.most = all.most[row];
        }
    }
    if (some) return;
    int64_t split = rows.from[0] / SPLIT;
    see_split(pass, span, head, &rows, split, all);
    while (++split * SPLIT < rows.to[count - 1]) {
        see_split(pass, span, head, &rows, split, next);
        merge_results(all, next, count, rows.stride);
    }
    write_rows(pass, span, head, first, count, all);
}

const AttentionKernel ATTENTION = {write_span, attend_rows, merge_splits};
