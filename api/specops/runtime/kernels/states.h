// Layers with a recurrent state, over the spans of a pass: the gated delta rule (Qwen3.5) and Mamba-2's state
// space (Granite 4).
//
// A head's state has a row for each number of a key and a column for each number of a value. A token
// updates it, then reads it with a query:
//
//   state = decay * state + key * input        output = sum over rows of query * state
//
// The delta rule's input is rate * (value - sum over rows of key * decay * state), its keys and queries have
// length 1, and its outputs are normalized per head, then multiplied by SiLU of the gate. Mamba-2's input is
// rate * value, and skip * value is added to its outputs before they are multiplied by SiLU of the gate.
//
// A slot's state in memory is that after its first `applied` tokens. The updates of later tokens (keys, inputs,
// decays) are kept in a ring by position (spans.h), so rejecting tokens costs nothing. A pass
//   1. repeats the kept updates of the positions from `applied` to below `start`,
//   2. continues with its own tokens, and
//   3. stores the state after the first `num_committed` tokens, and keeps later updates.
// So a prompt's chunk commits all of its tokens, and a decoding request commits its first one, because its
// draft tokens may be rejected. With applied = 0 the state counts as zeros, whatever is in memory.
//
// All sums have one order, and each token updates the state as it would alone. So a result depends neither on other
// slots' tokens, nor on the chunks of a prompt, nor on rejected tokens, nor on threads. Numbers smaller than 1e-15
// become 0 wherever products of them might be denormal, which processors compute up to a hundred times more slowly.
// Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); Dao, Gu, "Transformers are SSMs" (arXiv
// 2405.21060).

#ifndef SPECOPS_STATES_H
#define SPECOPS_STATES_H

#include "spans.h"
#include "threads.h"

// Limits of heads, numbers of a key, and numbers of a head's state.
enum { MAX_STATE_HEADS = 1024, MAX_KEY = 256, MAX_STATE = 1 << 15 };

typedef struct {
    int delta;  // the gated delta rule
    // Heads of a group share keys and queries: consecutive heads, or if `tiled` every `groups`-th head.
    // A key has a multiple of 16 numbers, a value of 32.
    int64_t groups, heads, tiled, key_size, value_size;
    const float *mixed;  // [tokens][width]: keys and queries of all groups, values of all heads, ...
    int64_t width, keys, queries, values;    // ... and their offsets in a row
    const float *gate;                       // [tokens][heads * value_size]
    const float *decays, *rates;             // [tokens][heads]: a and b; of Mamba-2 both are dt
    const float *decay, *bias, *skip, *norm; // [heads], but the norm [value_size]
    float epsilon, scale;                    // of norms; of queries
    float *out;                              // [tokens][heads * value_size]
    const Span *spans;                       // NULL: sequences of `tokens` tokens from position 0 on
    int64_t count, tokens;
    RecurrentState kept;
    int64_t first, state_first;  // this layer's offset in a row of kept inputs, and in a slot's states
} StatesPass;

// Floats of a row of kept inputs: keys, inputs and decays.
static inline int64_t ring_floats_per_token(const StatesPass *pass) {
    return pass->groups * pass->key_size + pass->heads * pass->value_size + (pass->heads + 15) / 16 * 16;
}

static inline int64_t group_of(const StatesPass *pass, int64_t head) {
    return pass->tiled ? head % pass->groups : head / (pass->heads / pass->groups);
}

// The kernels for one kind of processor.
typedef struct {
    // A head of a span. It keeps inputs and decays, but no keys: other heads may still read earlier ones.
    void (*head)(const StatesPass *pass, const Span *span, int64_t head);
    void (*keep_keys)(const StatesPass *pass, const Span *span);  // when all heads are done
} StatesKernel;
extern const StatesKernel STATES_AVX512, STATES_AVX2, STATES_PLAIN;

#endif
