// Layers with a recurrent state for one kind of processor; setup.py compiles this file once for each, with
// another name for STATES.
//
// A vector's lanes are columns of the state, so its sums go over rows in order and never across lanes; only
// the sums of norms and of key * query do, in the fixed order of vectors.h. A state in memory is
// [heads][value_size / 16][key_size][16]. Its columns are computed in parts of two vectors, a few tokens
// at a time, so a part stays in the first-level cache. An update is carried out while the next token
// reads the state, so a token goes through the state once.

#include "states.h"
#include "vectors.h"

enum { TOKENS = LANES, WIDE = 2, COLUMNS = WIDE * LANES };

#define TINY 1e-15f
INLINE Floats flushed(Floats x) { return (Floats)((Ints)x & ~(Ints)(magnitude(x) < TINY)); }

// Some tokens of a span, for one head.
typedef struct {
    int64_t count, position, row;  // of the first token
    float keys[TOKENS][MAX_KEY], queries[TOKENS][MAX_KEY];
    float dots[TOKENS], decays[TOKENS], rates[TOKENS];  // dots: key * query
    float inputs[TOKENS][COLUMNS];
} Tile;

// -- functions of a single token -------------------------------------------------------------------

// Prepares a key or a query; for the delta rule it gets length 1.
static void prepare_key(const StatesPass *pass, const float *from, float scale, float *to) {
    Floats squares = {0};
    for (int64_t i = 0; i < pass->key_size; i += LANES) {
        const Floats numbers = flushed(load(from + i));
        squares += numbers * numbers;
        store(to + i, numbers);
    }
    if (!pass->delta) return;
    const float inverse = 1.0f / sqrtf(total(squares) + 1e-6f);
    for (int64_t i = 0; i < pass->key_size; i += LANES)
        store(to + i, flushed(load(to + i) * inverse * scale));
}

static const float *key_of(const StatesPass *pass, int64_t row, int64_t group) {
    return pass->mixed + row * pass->width + pass->keys + group * pass->key_size;
}

static void prepare_keys(const StatesPass *pass, Tile *t, int64_t group) {
    for (int64_t i = 0; i < t->count; i++) {
        const float *key = key_of(pass, t->row + i, group);
        prepare_key(pass, key, 1.0f, t->keys[i]);
        prepare_key(pass, key - pass->keys + pass->queries, pass->scale, t->queries[i]);
        Floats dot = {0};
        for (int64_t j = 0; j < pass->key_size; j += LANES)
            dot += load(t->keys[i] + j) * load(t->queries[i] + j);
        t->dots[i] = total(dot);
    }
}

static void prepare_rates(const StatesPass *pass, Tile *t, int64_t head) {
    float a[TOKENS] = {0}, b[TOKENS] = {0};
    for (int64_t i = 0; i < t->count; i++) {
        a[i] = pass->decays[(t->row + i) * pass->heads + head];
        b[i] = pass->rates[(t->row + i) * pass->heads + head];
    }
    const Floats time = softplus(load(a) + pass->bias[head]);
    store(t->decays, flushed(exponential(time * pass->decay[head])));
    store(t->rates, flushed(pass->delta ? sigmoid(load(b)) : time));
}

// -- a part of a head's state ----------------------------------------------------------------------

// An update: state = decay * state + key * input. At every 16th position it also flushes the state. A decay
// below 0.5 does so at once, so that no number becomes too small before the next such position.
typedef struct {
    const float *key;  // NULL: none
    const float *input;
    float decay;
    int flush, commits;
} Update;

static Update update_of(const Span *span, int64_t position, const float *key, const float *input,
                        float decay) {
    const int flush = position % TOKENS == 0 || !(decay >= 0.5f);
    return (Update){key, input, decay, flush, position < span->num_committed};
}

typedef struct {
    float *committed, *scratch;  // [WIDE][rows][LANES]: in memory, and for updates that may be rejected
    float *at;            // one of them
    int64_t rows;
    Update pending;
} Part;

// Carries out an update, or reads the state, row by row, or both.
INLINE void step(Part *part, const int update, const int flush, const float *key, const float *query,
                 Floats *keyed, Floats *asked) {
    const int64_t rows = part->rows;
    const float *from = part->at;
    float *to = part->pending.commits ? part->committed : part->scratch;
    const Floats decay = splat(part->pending.decay);
    Floats a[WIDE], b[WIDE], input[WIDE];
    for (int v = 0; v < WIDE; v++) {
        a[v] = b[v] = (Floats){0};
        if (update) input[v] = load(part->pending.input + v * LANES);
    }
    for (int64_t row = 0; row < rows; row++)
        for (int v = 0; v < WIDE; v++) {
            // The next part, if this one may have come from memory.
            if (!update || !query) __builtin_prefetch(from + ((WIDE + v) * rows + row) * LANES);
            Floats state = load(from + (v * rows + row) * LANES);
            if (update) {
                state = state * decay + splat(part->pending.key[row]) * input[v];
                if (flush) state = flushed(state);
                store(to + (v * rows + row) * LANES, state);
            }
            if (key) a[v] += splat(key[row]) * state;
            if (query) b[v] += splat(query[row]) * state;
        }
    if (update) part->at = to, part->pending.key = NULL;
    for (int v = 0; query && v < WIDE; v++) keyed[v] = flushed(a[v]), asked[v] = flushed(b[v]);
}

static void finish_update(Part *part) {
    if (!part->pending.key) return;
    if (part->pending.flush) step(part, 1, 1, NULL, NULL, NULL, NULL);
    else step(part, 1, 0, NULL, NULL, NULL, NULL);
}

INLINE void ask(Part *part, const float *key, const float *query, Floats *keyed, Floats *asked) {
    if (!part->pending.key) step(part, 0, 0, key, query, keyed, asked);
    else if (part->pending.flush) step(part, 1, 1, key, query, keyed, asked);
    else step(part, 1, 0, key, query, keyed, asked);
}

// The kept updates from `applied` to `start`.
static void replay(const StatesPass *pass, const Span *span, int64_t head, int64_t column, Part *part) {
    const int64_t inputs = pass->groups * pass->key_size, group = group_of(pass, head);
    const int64_t decays = inputs + pass->heads * pass->value_size;
    if (!span->applied) memset(part->committed, 0, (size_t)(COLUMNS * part->rows) * sizeof(float));
    for (int64_t position = span->applied; position < span->start; position++) {
        const float *kept = kept_inputs(&pass->kept, span->slot, position) + pass->first;
        finish_update(part);
        part->pending = update_of(span, position, kept + group * pass->key_size,
                                  kept + inputs + head * pass->value_size + column, kept[decays + head]);
    }
}

// The outputs of a tile's tokens for a part of the columns, before norm and gate.
INLINE void compute(const StatesPass *pass, const int delta, const Span *span, int64_t head, int64_t column,
                    Tile *t, Part *part) {
    for (int64_t i = 0; i < t->count; i++) {
        const int64_t place = head * pass->value_size + column;
        const float *value = pass->mixed + (t->row + i) * pass->width + pass->values + place;
        float *out = pass->out + (t->row + i) * pass->heads * pass->value_size + place;
        Floats keyed[WIDE], asked[WIDE];
        ask(part, delta ? t->keys[i] : NULL, t->queries[i], keyed, asked);
        for (int v = 0; v < WIDE; v++) {
            const Floats x = flushed(load(value + v * LANES));
            const Floats input = flushed((delta ? x - keyed[v] * t->decays[i] : x) * t->rates[i]);
            const Floats sum = asked[v] * t->decays[i] + input * t->dots[i];
            store(t->inputs[i] + v * LANES, input);
            store(out + v * LANES, delta ? sum : sum + x * pass->skip[head]);
        }
        part->pending = update_of(span, t->position + i, t->keys[i], t->inputs[i], t->decays[i]);
    }
    // The last update is carried out unless nothing will read it.
    if (part->pending.commits || t->position + t->count < span->start + span->tokens) finish_update(part);
}

// -- a head ----------------------------------------------------------------------------------------

static void finish_outputs(const StatesPass *pass, const Tile *t, int64_t head) {
    for (int64_t i = 0; i < t->count; i++) {
        const int64_t place = ((t->row + i) * pass->heads + head) * pass->value_size;
        float *out = pass->out + place;
        float inverse = 1.0f;
        if (pass->delta) {
            Floats squares = {0};
            for (int64_t j = 0; j < pass->value_size; j += LANES) {
                const Floats numbers = flushed(load(out + j));
                squares += numbers * numbers;
            }
            inverse = inverse_rms(squares, pass->value_size, pass->epsilon);
        }
        for (int64_t j = 0; j < pass->value_size; j += LANES) {
            Floats numbers = flushed(load(out + j));
            if (pass->delta) numbers = numbers * inverse * load(pass->norm + j);
            store(out + j, numbers * flushed(silu(load(pass->gate + place + j))));
        }
    }
}

// Keeps a tile's inputs and decays after the committed tokens.
static void keep(const StatesPass *pass, const Span *span, int64_t head, int64_t column, const Tile *t) {
    const int64_t inputs = pass->groups * pass->key_size, place = head * pass->value_size + column;
    for (int64_t i = 0; i < t->count; i++) {
        if (t->position + i < span->num_committed) continue;
        float *kept = kept_inputs(&pass->kept, span->slot, t->position + i) + pass->first + inputs;
        memcpy(kept + place, t->inputs[i], sizeof t->inputs[i]);
        if (column + COLUMNS == pass->value_size)  // all parts have read the earlier decays
            kept[pass->heads * pass->value_size + head] = t->decays[i];
    }
}

static void compute_head(const StatesPass *pass, const Span *span, int64_t head) {
    _Alignas(64) float scratch[MAX_STATE];
    Tile tile, *t = &tile;
    const int64_t floats = pass->key_size * pass->value_size, end = span->start + span->tokens;
    float *committed = scratch;
    if (pass->kept.memory)
        committed = kept_states(&pass->kept, span->slot) + pass->state_first + head * floats;
    for (t->position = span->start; t->position < end; t->position += t->count) {
        t->count = end - t->position < TOKENS ? end - t->position : TOKENS;
        t->row = span->first + t->position - span->start;
        prepare_keys(pass, t, group_of(pass, head));
        prepare_rates(pass, t, head);
        for (int64_t column = 0; column < pass->value_size; column += COLUMNS) {
            const int64_t place = column * pass->key_size;
            Part part = {.committed = committed + place, .scratch = scratch + place, .rows = pass->key_size};
            const int apart = t->position > span->start && t->position > span->num_committed;
            part.at = apart ? part.scratch : part.committed;
            if (t->position == span->start) replay(pass, span, head, column, &part);
            if (pass->delta) compute(pass, 1, span, head, column, t, &part);
            else compute(pass, 0, span, head, column, t, &part);
            keep(pass, span, head, column, t);
        }
        finish_outputs(pass, t, head);
    }
}

static void keep_keys(const StatesPass *pass, const Span *span) {
    const int64_t behind = span->num_committed > span->start ? span->num_committed : span->start;
    for (int64_t position = behind; position < span->start + span->tokens; position++)
        for (int64_t group = 0; group < pass->groups; group++) {
            float *kept = kept_inputs(&pass->kept, span->slot, position) + pass->first;
            const float *key = key_of(pass, span->first + position - span->start, group);
            prepare_key(pass, key, 1.0f, kept + group * pass->key_size);
        }
}

const StatesKernel STATES = {compute_head, keep_keys};
