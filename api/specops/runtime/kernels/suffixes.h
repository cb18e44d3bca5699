// Suffix lookup: predicts how a text continues from earlier occurrences of its last tokens.
//
// A text has its tokens and, for two lengths of context, chains from each place to the previous place
// with the same context. Appending takes O(1), and a lookup visits the latest VISITS places. They vote;
// a longer match counts more. A logistic regression over the votes predicts how likely the target chooses
// a token. It learns online: every lookup is compared with the tokens that followed, verified or not.
// Tokens may be any numbers: none is used as an index.

#ifndef SPECOPS_SUFFIXES_H
#define SPECOPS_SUFFIXES_H

#include <stdint.h>

enum { SUFFIX_MAX_DRAFT = 16 };

typedef struct Text Text;        // tokens and the chains
typedef struct Lookups Lookups;  // a request: its text and its last lookup

// An empty text of up to `capacity` tokens, at least 2; when full, it keeps the latest half. Lookups try
// contexts of `longer` tokens first, then of `shorter`, at least 1. NULL if there is no memory.
Text *specops_text_new(int64_t capacity, int64_t longer, int64_t shorter);
void specops_text_free(Text *text);

Lookups *specops_lookups_new(int64_t capacity);
void specops_lookups_free(Lookups *lookups);

// Number of floats of the estimate that all requests share; they are 0 at first.
int64_t specops_estimate_floats(void);

// Append [count] tokens to a request's text and predict how it continues, from the text itself, `history`
// or `table` (both may be NULL), whichever promises most tokens.
//
//   table:    n-grams, see `NgramTable` in `specops.runtime.suffixes`.
//   estimate: learns from the tokens after the last lookup.
//   most:     maximum number of tokens to predict, up to SUFFIX_MAX_DRAFT.
//   least:    the prediction ends before the first token that is reached with a lower probability.
//   tokens, promised: [most] the predicted tokens, and for each the probability that it is right if
//             those before it are.
//   found_in: 0 if the text predicted them, 1 if the history did, 2 if the table did.
//
// Returns the number of predicted tokens.
int64_t specops_look_up(Lookups *lookups, const Text *history, const uint64_t *table, float *estimate,
                        const int32_t *more, int64_t count, int64_t most, float least,
                        int32_t *tokens, float *promised, int32_t *found_in);

// Append the new parts of a request's text to a history: tokens that it does not yet have after the same 32
// tokens. Each new part follows a mark that equals no token, and the tokens before the part.
void specops_teach(Text *history, const Lookups *lookups);

#endif
