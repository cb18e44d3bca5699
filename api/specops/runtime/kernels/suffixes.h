// Suffix lookup: how a text goes on where its last tokens stood before, and how sure that is.
//
// A text is its tokens and, for two lengths of context, chains from each place to the previous place
// with the same context. Appending takes O(1), and a lookup visits the latest VISITS places. They vote;
// a longer match counts more. A logistic regression over the votes predicts how likely a token is the
// target's own. It learns while it runs: every lookup is compared with the tokens that came, verified
// or not. Tokens may be any numbers: none is used as an index.

#ifndef SPECOPS_SUFFIXES_H
#define SPECOPS_SUFFIXES_H

#include <stdint.h>

enum { SUFFIX_MAX_DRAFT = 16 };

typedef struct Text Text;        // tokens and the chains
typedef struct Lookups Lookups;  // a request: its text and its last lookup

// An empty text that remembers up to `capacity` tokens, at least 2; when it is full, it keeps the latest
// half. Lookups try contexts of `longer` tokens first, then of `shorter`, at least 1. NULL if there is no
// memory.
Text *specops_text_new(int64_t capacity, int64_t longer, int64_t shorter);
void specops_text_free(Text *text);

Lookups *specops_lookups_new(int64_t capacity);
void specops_lookups_free(Lookups *lookups);

// Number of floats of the estimate that all requests share; they are 0 at first.
int64_t specops_estimate_floats(void);

// Append [count] tokens to a request's text and predict how it goes on, from the text itself, from
// `history` and from `table` (both may be NULL), whichever promises most tokens.
//
//   table:    n-grams, see `NgramTable` in `specops.runtime.suffixes`.
//   estimate: learns from the tokens that came after the last lookup.
//   most:     most tokens to predict, up to SUFFIX_MAX_DRAFT.
//   least:    the prediction ends before the first token that is reached with a smaller probability.
//   tokens, promised: [most] the predicted tokens, and for each the probability that it is right if
//             those before it are.
//   found_in: 0 if the text predicted them, 1 if the history did, 2 if the table did.
//
// Returns the number of predicted tokens.
int64_t specops_look_up(Lookups *lookups, const Text *history, const uint64_t *table, float *estimate,
                        const int32_t *more, int64_t count, int64_t most, float least,
                        int32_t *tokens, float *promised, int32_t *found_in);

// Append what is new in a request's text to a history: tokens that it does not hold yet behind the same
// 32. Each new part stands behind a mark that equals no token and the tokens before it.
void specops_teach(Text *history, const Lookups *lookups);

#endif
