// The spans of a pass: what operators that read other tokens of a slot know of its tokens.

#ifndef SPECOPS_SPANS_H
#define SPECOPS_SPANS_H

#include <stdint.h>

enum { MOST_SLOTS = 1024 };

// Tokens of a slot in consecutive positions.
typedef struct {
    int64_t slot, start, tokens;
    int64_t first;  // the first token's row in the pass
} Span;

#endif
