// Chooses draft lengths, in a few microseconds: a step of a small model takes a few hundred.

#include "lengths.h"

// The request whose next place is the likeliest; -1 if no place is left. Of equal ones the first.
static int64_t next_request(const StepCosts *step, const int64_t *offsets, const double *reached,
                            const int64_t *lengths) {
    int64_t found = -1;
    double most = step->least;
    for (int64_t i = 0; i < step->requests; i++) {
        const int64_t place = offsets[i] + lengths[i];
        if (place < offsets[i + 1] && (reached[place] > most || (found < 0 && reached[place] == most))) {
            found = i;
            most = reached[place];
        }
    }
    return found;
}

// Writes the lengths after the first `count` places.
static void admit(const StepCosts *step, const int64_t *offsets, const double *reached, int64_t count,
                  int64_t *lengths) {
    for (int64_t i = 0; i < step->requests; i++) lengths[i] = 0;
    for (; count; count--) lengths[next_request(step, offsets, reached, lengths)]++;
}

// Returns how many places are worth most. `rate` is the tokens per second that the pass's time could bring elsewhere;
// 0: the most tokens per second are wanted, and `best` becomes them.
static int64_t best_count(const StepCosts *step, const int64_t *offsets, const double *reached, const double *costs,
                          double rate, double *best, int64_t *lengths) {
    double tokens = (double)step->requests, seconds = step->seconds;
    int64_t found = 0;
    admit(step, offsets, reached, 0, lengths);
    for (int64_t count = 0;; count++) {
        const double all = seconds + costs[count];
        const double worth = rate > 0 ? tokens - rate * all : tokens / all;
        if (!count || worth > *best) {
            found = count;
            *best = worth;
        }
        const int64_t i = next_request(step, offsets, reached, lengths);
        if (i < 0) return found;
        const double more = reached[offsets[i] + lengths[i]++];
        tokens += more;
        seconds += step->place_seconds[i] + more * step->token_seconds[i] + (count ? 0 : step->drafting);
    }
}

void specops_choose_lengths(const StepCosts *step, const int64_t *offsets, double *probs, int64_t *lengths) {
    for (int64_t i = 0; i < step->requests; i++)
        for (int64_t place = offsets[i] + 1; place < offsets[i + 1]; place++) probs[place] *= probs[place - 1];
    double rate = 0, worth;
    int64_t count = best_count(step, offsets, probs, step->costs, 0, &rate, lengths);
    if (step->prompt_costs) count = best_count(step, offsets, probs, step->prompt_costs, rate, &worth, lengths);
    admit(step, offsets, probs, count, lengths);
}
