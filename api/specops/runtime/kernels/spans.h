// The spans of a pass, and the layers' memory for each slot: the input of operators that read a slot's earlier
// tokens.

#ifndef SPECOPS_SPANS_H
#define SPECOPS_SPANS_H

#include <stdint.h>

enum { MAX_SLOTS = 1024 };

// Tokens of a slot in consecutive positions.
typedef struct {
    int64_t slot, start, tokens;
    int64_t first;             // the first token's row in the pass
    int64_t applied, num_committed;  // only for layers with a recurrent state; see states.h
} Span;

// The layers' memory for each slot in addition to keys and values: recurrent states, then a ring with a row of
// inputs for each of the last positions, indexed by position like keys in the KV cache: those of rejected
// tokens are overwritten later. Each layer has its own part of the states and of a row.
typedef struct {
    float *memory;  // [slots][states + ring * total]; NULL: nothing stays
    int64_t slots, ring, total, states;
} RecurrentState;

static inline float *kept_states(const RecurrentState *kept, int64_t slot) {
    return kept->memory + slot * (kept->states + kept->ring * kept->total);
}

static inline float *kept_inputs(const RecurrentState *kept, int64_t slot, int64_t position) {
    return kept_states(kept, slot) + kept->states + position % kept->ring * kept->total;
}

#endif
