// Draft lengths: how many draft tokens of each request a pass verifies, for the most tokens per second.
//
// A place is a position of a request's draft. It is worth the probability that it is reached: that its token and all
// draft tokens before it are accepted. The likeliest places are verified, as long as they raise the tokens per second.

#ifndef SPECOPS_LENGTHS_H
#define SPECOPS_LENGTHS_H

#include <stdint.h>

// A step in which every request gets one token, and what places add to it. All times are seconds.
typedef struct {
    int64_t requests;
    double seconds;               // of the step without places, outside its pass
    double drafting;              // that the first place adds to the step
    const double *place_seconds;  // [requests] that each place of a request adds outside the pass
    const double *token_seconds;  // [requests] that each new token of a request takes outside the pass
    const double *costs;          // of the pass, by the number of its places
    const double *prompt_costs;   // the same with the prompts that are in the pass; NULL: none are
    double least;                 // the lowest probability of being reached that may be verified
} StepCosts;

// Writes the number of draft tokens to verify to `lengths` [requests]. The draft of request i has the probabilities
// offsets[i] to offsets[i + 1]: that a token is accepted if those before it are. They become the places' worth.
//
// In a pass with prompts, draft tokens cost only the time that they add to it. Their worth is their tokens minus those
// that a pass without prompts would give in the same time.
void specops_choose_lengths(const StepCosts *step, const int64_t *offsets, double *probs, int64_t *lengths);

#endif
