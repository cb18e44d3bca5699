// Counted suffixes: how a text goes on where its last tokens stood before, and how sure that is.
//
// A text is its tokens and, for two lengths of context, chains from each place to the one before it
// with the same context: appending takes O(1), and a look-up visits the latest VISITS places. They
// vote, the longest match counting most. How likely a token is the target's own is a logistic
// regression over the votes, learned while it runs: every look-up is judged by the tokens that came,
// whether they were verified or not. Tokens are any numbers; none is ever used as an index.

#ifndef SPECOPS_SUFFIXES_H
#define SPECOPS_SUFFIXES_H

#include <stdint.h>

enum { SUFFIX_LONGEST_DRAFT = 16 };

typedef struct Text Text;        // tokens and where they stood
typedef struct Lookups Lookups;  // a request: its text, and what it was last told

// An empty text that remembers up to `capacity` tokens, at least 2: the latest half of them where
// that is not enough. Contexts of `longer` tokens are tried first, then of `shorter`, at least 1.
// NULL where memory ran out.
Text *specops_text_new(int64_t capacity, int64_t longer, int64_t shorter);
void specops_text_free(Text *text);

Lookups *specops_lookups_new(int64_t capacity);
void specops_lookups_free(Lookups *lookups);

// How many floats the estimates of all requests take; all 0 at first.
int64_t specops_estimate_floats(void);

// Let a request's text grow by [count] tokens and look up how it goes on: in itself and in `history`
// (NULL: there is none), whichever promises more.
//
//   estimate: learns what became of what the request was told before.
//   most:     tokens to propose, up to SUFFIX_LONGEST_DRAFT.
//   line:     they end before the one that is reached with less than this probability.
//   tokens, promised: [most] what is proposed, and the probability of each, given those before it.
//
// Returns how many are proposed.
int64_t specops_look_up(Lookups *lookups, const Text *history, float *estimate,
                        const int32_t *more, int64_t count, int64_t most, float line,
                        int32_t *tokens, float *promised);

// Append a request's text to a history, after a mark that no token equals.
void specops_teach(Text *history, const Lookups *lookups);

#endif
