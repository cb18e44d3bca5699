// Sampling for one kind of processor; setup.py compiles this file once for each.
//
// Nothing is sorted: bisection over the range of weights finds the k-th largest, or the smallest of a nucleus.

#include "sampling.h"
#include "vectors.h"

#include <math.h>
#include <stdlib.h>

enum { RUN = 64 * LANES };  // number of weights that are summed in float32; these sums in float64

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Up to sixteen numbers, padded with `padding`.
INLINE Floats some_or(const float *from, int64_t left, float padding) {
    if (left >= LANES) return load(from);
    float lanes[LANES];
    for (int64_t i = 0; i < LANES; i++) lanes[i] = i < left ? from[i] : padding;
    return load(lanes);
}

INLINE void store_some(float *to, int64_t left, Floats values) {
    if (left >= LANES) store(to, values);
    else memcpy(to, &values, (size_t)left * sizeof(float));
}

static double sum(const float *weights, int64_t count) {
    double all = 0;
    for (int64_t start = 0; start < count; start += RUN) {
        const int64_t end = least(start + RUN, count);
        Floats lanes = {0};
        for (int64_t i = start; i < end; i += LANES) lanes += some_or(weights + i, end - i, 0);
        all += total(lanes);
    }
    return all;
}

// e^((logit - largest) / temperature).
static void exponentials(const float *logits, int64_t count, float temperature, float *weights) {
    Floats most = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES)
        most = larger(some_or(logits + i, count - i, -INFINITY), most);
    const float highest = largest(most);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats below = some_or(logits + i, count - i, highest) - highest;
        store_some(weights + i, count - i, exponential(below / temperature));
    }
}

static inline uint32_t bits_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return bits;
}

static inline float of_bits(uint32_t bits) {
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
}

// The sum of the weights from `low` up to below `high`, or their number.
INLINE double sum_between(const float *weights, int numbers, int64_t count, float low, float high) {
    double all = 0;
    for (int64_t start = 0; start < count; start += RUN) {
        const int64_t end = least(start + RUN, count);
        Floats lanes = {0};
        for (int64_t i = start; i < end; i += LANES) {
            const Floats values = some_or(weights + i, end - i, -1);
            const Ints inside = (values >= low) & (values < high);
            lanes += choose(inside, numbers ? splat(1) : values, splat(0));
        }
        all += total(lanes);
    }
    return all;
}

// Copies the weights from `low` up to below `high` to `kept`, which may be `weights` itself. Returns their number.
static int64_t gather(const float *weights, int64_t count, float low, float high, float *kept) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats values = some_or(weights + i, count - i, -1);
        const Ints inside = (values >= low) & (values < high);
        if (any(inside)) found += store_where(kept + found, inside, values);
    }
    return found;
}

// The smallest of the largest weights whose sum, or with `numbers` whose number, reaches `wanted`. `above` gets the
// sum or number of larger ones. Weights are from 0 to 1, so their order is that of their bits. The relevant weights
// are mostly near the top: the first cut is there, and soon few are left, which are in `space` [count].
static float reaching(const float *weights, int numbers, int64_t count, double wanted, float *space,
                      double *above) {
    enum { STEPS = 4 };  // then weights outside of the range are dropped
    uint32_t low = 0, high = bits_of(1) + 1, middle = bits_of(0x1p-9f);
    *above = 0;
    for (int step = 1; high - low > 1; step++) {
        const float from = of_bits(middle), to = of_bits(high);
        const double inside = numbers ? sum_between(weights, 1, count, from, to)
                                      : sum_between(weights, 0, count, from, to);  // a separate loop
        const double reached = *above + inside;
        if (reached >= wanted) low = middle;
        else high = middle, *above = reached;
        if (step % STEPS == 1) {
            count = gather(weights, count, of_bits(low), of_bits(high), space);
            weights = space;
        }
        middle = low + (high - low) / 2;
    }
    return of_bits(low);
}

static void drop_below(float *weights, int64_t count, float edge) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats values = some_or(weights + i, count - i, 0);
        store_some(weights + i, count - i, choose(values < edge, splat(0), values));
    }
}

// Keeps the smallest set of largest weights with `share` of the sum; among equal weights, the first stay.
static void keep_nucleus(float *weights, int64_t count, double share, float *space) {
    const double wanted = share * sum(weights, count);
    double held;
    const float edge = reaching(weights, 0, count, wanted, space, &held);
    drop_below(weights, count, edge);
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = least(count - i, LANES);
        if (!any(some_or(weights + i, left, -1) == edge)) continue;
        for (int64_t j = i; j < i + left; j++) {
            if (weights[j] != edge) continue;
            if (held >= wanted) weights[j] = 0;
            held += edge;
        }
    }
}

static int filter(const float *logits, int64_t count, const Filter *by, float *probs) {
    exponentials(logits, count, by->temperature, probs);
    const int64_t top_k = by->top_k < count ? by->top_k : 0;
    float *space = NULL;
    if ((top_k > 0 || by->top_p < 1) && !(space = malloc((size_t)count * sizeof(float)))) return -1;
    if (top_k > 0) {
        double above;
        drop_below(probs, count, reaching(probs, 1, count, (double)top_k, space, &above));
    }
    if (by->top_p < 1) keep_nucleus(probs, count, by->top_p, space);
    if (by->min_p > 0) drop_below(probs, count, by->min_p);  // the largest weight is 1
    free(space);
    const float all = (float)sum(probs, count);
    if (!(all > 0)) return -2;
    for (int64_t i = 0; i < count; i += LANES)
        store_some(probs + i, count - i, some_or(probs + i, count - i, 0) / all);
    return 0;
}

static void mask(float *logits, int64_t count, const uint32_t *mask) {
    Words bits;
    for (int64_t lane = 0; lane < LANES; lane++) bits[lane] = 1u << lane;
    for (int64_t i = 0; i < count; i += LANES) {
        const uint32_t word = mask[i / 32] >> (i & LANES);
        const Ints kept = (bits & word) != 0;
        store_some(logits + i, count - i, choose(kept, some_or(logits + i, count - i, 0), splat(-INFINITY)));
    }
}

static int64_t draw(const float *weights, int64_t count, double uniform) {
    double left = uniform * sum(weights, count);
    int64_t start = 0;
    for (; start + RUN < count; start += RUN) {
        const double run = sum(weights + start, RUN);
        if (left < run) break;
        left -= run;
    }
    int64_t i = start;
    for (; i < count; i++) {
        if (left < weights[i]) return i;
        left -= weights[i];
    }
    while (i > 0 && !(weights[--i] > 0)) {}  // by rounding, a little was left after the last weight
    return i;
}

// Spreads every bit over the whole word (SplitMix64: Steele, Lea and Flood 2014,
// https://doi.org/10.1145/2660193.2660195). Its n-th number does not need the numbers before it.
static inline uint64_t mixed(uint64_t word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

// The natural logarithm of a normal number above 0, with an error below one unit in the last place and
// the same bits everywhere; a system's function may differ. Method and coefficients: fdlibm, e_log.c (Sun).
static inline double logarithm(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    // x = 2^k m, with m from sqrt(1/2) to sqrt(2)
    const int64_t k = (int64_t)(bits - 0x3FE6A09E00000000u) >> 52;
    bits -= (uint64_t)k << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    const double f = m - 1, s = f / (2 + f), z = s * s, w = z * z, half = 0.5 * f * f;
    const double even = w * (3.999999999940941908e-01 +
                             w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const double odd = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 +
                                 w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    const double n = (double)k;
    return n * 6.93147180369123816490e-01 -
           (half - (s * (half + even + odd) + n * 1.90821492927058770002e-10) - f);
}

static int64_t gumbel_argmax(const float *weights, int64_t count, uint64_t seed, uint64_t position) {
    const uint64_t start = mixed(mixed(seed) + position);
    double best = INFINITY;
    int64_t winner = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t left = least(count - i, LANES);
        if (!any(some_or(weights + i, left, 0) > 0)) continue;
        for (int64_t j = i; j < i + left; j++) {
            if (!(weights[j] > 0)) continue;
            const uint64_t word = mixed(start + ((uint64_t)j + 1) * 0x9E3779B97F4A7C15u);
            const double uniform = ((double)(word >> 11) + 0.5) * 0x1p-53;  // never 0 or 1
            if (1 - uniform >= best * weights[j]) continue;  // -log(u) is never less than 1 - u
            const double time = -logarithm(uniform) / weights[j];
            if (time < best) best = time, winner = j;
        }
    }
    return winner;
}

static double top(const float *logits, int64_t count, int64_t wanted, int64_t *indices) {
    Floats most = splat(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES)
        most = larger(some_or(logits + i, count - i, -INFINITY), most);
    const float highest = largest(most);
    double all = 0;
    for (int64_t start = 0; start < count; start += RUN) {
        const int64_t end = least(start + RUN, count);
        Floats lanes = {0};
        for (int64_t i = start; i < end; i += LANES)
            lanes += exponential(some_or(logits + i, end - i, -INFINITY) - highest);
        all += total(lanes);
    }
    // The largest so far, in order: a logit that is larger than the last of them replaces it.
    int64_t found = 0;
    for (int64_t i = 0; wanted && i < count; i += LANES) {
        const int64_t left = least(count - i, LANES);
        if (found == wanted && !any(some_or(logits + i, left, -INFINITY) > logits[indices[wanted - 1]]))
            continue;
        for (int64_t j = i; j < i + left; j++) {
            if (found == wanted && !(logits[j] > logits[indices[wanted - 1]])) continue;
            int64_t place = found < wanted ? found++ : wanted - 1;
            for (; place > 0 && logits[j] > logits[indices[place - 1]]; place--)
                indices[place] = indices[place - 1];
            indices[place] = j;
        }
    }
    return all >= 1 ? (double)highest + logarithm(all) : NAN;  // no number among the logits, or not only
}

const SamplingKernel SAMPLING = {filter, mask, draw, gumbel_argmax, top};
