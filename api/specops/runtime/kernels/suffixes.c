// See suffixes.h.

#include "suffixes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// 64 visits instead of 16 gained nothing on 208 answers of the demo target and of SmolLM2.
enum { ORDERS = 2, VISITS = 16, MAX_NGRAM = 3, MAX_MATCH = 32, NO_TOKEN = -1 };
enum { MATCHES = 11, VOTES = 5, POSITIONS = SUFFIX_MAX_DRAFT, SHARES = 5, DISTANCES = 16 };
enum { FEATURES = 6, OF_RIVALS = 0, OF_VOTES = OF_RIVALS + MATCHES * MATCHES,
       OF_POSITIONS = OF_VOTES + VOTES * VOTES, OF_SHARES = OF_POSITIONS + POSITIONS * MATCHES,
       OF_DISTANCES = OF_SHARES + SHARES * MATCHES, OF_OTHERS = OF_DISTANCES + DISTANCES,
       WEIGHTS = OF_OTHERS + 9 };
enum { PLACES = 3, LEVELS = 12 };  // of chosen predictions: where they were found, and their odds

static const float RATE = 0.35f;       // learning rate of a weight at first; it shrinks with the errors
static const float MAX_ERRORS = 400;  // then it shrinks no further, so learning never ends
static const float OWN_RATE = 0.1f;    // learning rate of a request's own bias and share
static const float MIN_REACH = 0.02f;  // the regression does not learn from rarer tokens

struct Text {
    int64_t capacity, length, contexts[ORDERS];
    uint32_t mask;               // below half the capacity: 16 bytes a token in all
    int32_t *tokens;             // [capacity]
    int32_t *previous[ORDERS];   // [capacity] the previous place with the same context, -1: none
    int32_t *heads[ORDERS];      // [mask + 1] the last place whose context has this hash, -1: none
};

typedef struct {
    int64_t count;
    int32_t tokens[SUFFIX_MAX_DRAFT];
    float odds[SUFFIX_MAX_DRAFT], promised[SUFFIX_MAX_DRAFT];
    int16_t features[SUFFIX_MAX_DRAFT][FEATURES];
    float bias, share;  // of the request: log odds, and the recent share of right first tokens
} Prediction;

typedef struct {
    int64_t count;
    int32_t tokens[SUFFIX_MAX_DRAFT];
    float promised[SUFFIX_MAX_DRAFT];
    int levels[SUFFIX_MAX_DRAFT];
} Told;

struct Lookups {
    Text *text;
    Prediction own, past, known;
    Told told;
};

typedef struct {
    int64_t place;  // of the token that followed
    int64_t match;  // number of matching tokens before it
    double weight;  // of its vote: 4 to the power of the match
} Found;

// -- texts -----------------------------------------------------------------------------------------

void specops_text_free(Text *text) {
    if (!text) return;
    for (int order = 0; order < ORDERS; order++) free(text->previous[order]), free(text->heads[order]);
    free(text->tokens);
    free(text);
}

static void forget_places(Text *text) {
    for (int order = 0; order < ORDERS; order++)
        memset(text->heads[order], 0xFF, ((size_t)text->mask + 1) * sizeof(int32_t));
    text->length = 0;
}

Text *specops_text_new(int64_t capacity, int64_t longer, int64_t shorter) {
    Text *text = calloc(1, sizeof *text);
    if (!text) return NULL;
    text->capacity = capacity;
    text->contexts[0] = longer, text->contexts[1] = shorter;
    for (text->mask = 1; text->mask + 1 < (uint64_t)capacity / 2; text->mask = text->mask * 2 + 1) {}
    int missing = !(text->tokens = malloc((size_t)capacity * sizeof(int32_t)));
    for (int order = 0; order < ORDERS; order++) {
        missing |= !(text->previous[order] = malloc((size_t)capacity * sizeof(int32_t)));
        missing |= !(text->heads[order] = malloc(((size_t)text->mask + 1) * sizeof(int32_t)));
    }
    if (missing) return specops_text_free(text), NULL;
    forget_places(text);
    return text;
}

// Hash of the `count` tokens before `end`.
static uint32_t hash(const int32_t *end, int64_t count) {
    uint64_t word = 0;
    for (int64_t back = 1; back <= count; back++)
        word = (word ^ (uint32_t)end[-back]) * 0x9E3779B97F4A7C15ull;
    return (uint32_t)(word >> 32);
}

static void append(Text *text, int32_t token) {
    if (text->length == text->capacity) {
        const int64_t kept = text->capacity / 2, from = text->length - kept;
        forget_places(text);
        // Each token moves to an earlier place, so the tokens to read next are still there.
        for (int64_t i = 0; i < kept; i++) append(text, text->tokens[from + i]);
    }
    const int64_t place = text->length++;
    text->tokens[place] = token;
    for (int order = 0; order < ORDERS; order++) {
        text->previous[order][place] = -1;
        if (place < text->contexts[order]) continue;
        int32_t *head = text->heads[order]
                        + (hash(text->tokens + place, text->contexts[order]) & text->mask);
        text->previous[order][place] = *head;
        *head = (int32_t)place;
    }
}

// The latest places in `where` that follow the last tokens of a text, of the `length` before `end`.
static int find(const Text *where, const int32_t *end, int64_t length, Found *found) {
    for (int order = 0; order < ORDERS; order++) {
        const int64_t context = where->contexts[order];
        if (length < context) continue;
        int count = 0;
        int64_t place = where->heads[order][hash(end, context) & where->mask];
        for (int visits = 0; place >= 0 && visits < VISITS; visits++) {
            const int64_t most = place < length ? place : length;
            int64_t match = 0;
            while (match < most && match < MAX_MATCH
                   && where->tokens[place - match - 1] == end[-match - 1]) match++;
            if (match >= context) found[count++] = (Found){place, match, ldexp(1, 2 * (int)match)};
            place = where->previous[order][place];
        }
        if (count) return count;
    }
    return 0;
}

// The place in `history` of the token at `end`, after the same MAX_MATCH tokens or, near the text's start,
// all `length`; -1: there is none.
static int64_t taught_place(const Text *history, const int32_t *end, int64_t length) {
    Found found[VISITS];
    const int count = find(history, end, length, found);
    for (int i = 0; i < count; i++) {
        const int long_enough = found[i].match == MAX_MATCH || found[i].match == length;
        if (long_enough && history->tokens[found[i].place] == *end) return found[i].place;
    }
    return -1;
}

void specops_teach(Text *history, const Lookups *lookups) {
    const Text *text = lookups->text;
    int64_t taught = -1 - MAX_MATCH;  // end of the history's last part
    int64_t place = -1;                   // of the token before in the history, if that was known
    for (int64_t i = history->contexts[ORDERS - 1]; i < text->length; i++) {
        const int64_t before = place;
        const int follows = place >= 0 && place + 1 < history->length
                            && history->tokens[place + 1] == text->tokens[i];
        place = follows ? place + 1 : taught_place(history, text->tokens + i, i);
        if (place >= 0) continue;
        if (before >= 0 && before == history->length - 1) {
            taught = i;  // it continues where the history ends
        } else if (i - taught > MAX_MATCH) {  // start with the last known tokens
            append(history, NO_TOKEN);
            taught = i > MAX_MATCH ? i - MAX_MATCH : 0;
        }
        while (taught <= i) append(history, text->tokens[taught++]);
    }
}

// -- how likely ------------------------------------------------------------------------------------

static int bits(int64_t number, int most) {
    int count = 0;
    while (number > 0 && count < most) number >>= 1, count++;
    return count;
}

static int bucket(int64_t match) {
    if (match <= 6) return (int)match;
    return match <= 8 ? 7 : match <= 16 ? 8 : match < MAX_MATCH ? 9 : 10;
}

// Add a token to a prediction; the features of its source are there. `odds`: its log odds without weights.
// Returns 1 / the probability that it is right.
static inline float add(Prediction *guess, int32_t token, int kind, float odds, const float *weights) {
    const int position = (int)guess->count++;
    const int share = guess->share < 1 ? (int)(guess->share * SHARES) : SHARES - 1;
    int16_t *features = guess->features[position];
    features[2] = (int16_t)(OF_POSITIONS + position * MATCHES + kind);
    features[3] = (int16_t)(OF_SHARES + share * MATCHES + kind);
    for (int i = 0; i < FEATURES - 1; i++) odds += weights[features[i]];
    guess->tokens[position] = token;
    guess->odds[position] = odds;
    return 1 + expf(-odds);
}

// Vote on the next token among the places that still match, and add the winner to a prediction; see `add`.
// `next` [count] are the tokens that follow.
static float vote(const Found *found, const int32_t *next, int count, int64_t length, Prediction *guess,
                  const float *weights) {
    int winner = 0;
    double most = 0;
    for (int i = 0; i < count; i++) {
        double sum = 0;
        for (int j = i; j < count; j++) sum += next[j] == next[i] ? found[j].weight : 0;
        if (sum > most) most = sum, winner = i;
    }
    int64_t match = 0, rival = 0, latest = 0;
    int votes = 0;
    for (int i = 0; i < count; i++) {
        if (next[i] != next[winner]) {
            if (found[i].match > rival) rival = found[i].match;
            continue;
        }
        votes++;
        if (found[i].match > match) match = found[i].match, latest = found[i].place;
    }
    const int kind = bucket(match);
    int16_t *into = guess->features[guess->count];
    into[0] = (int16_t)(OF_RIVALS + kind * MATCHES + bucket(rival));
    into[1] = (int16_t)(OF_VOTES + bits(votes, VOTES - 1) * VOTES + bits(count - votes, VOTES - 1));
    into[4] = (int16_t)(OF_DISTANCES + bits(length - latest, DISTANCES - 1));
    return add(guess, next[winner], kind, guess->bias, weights);
}

// Predict tokens while the next one is reached with a probability of at least MIN_REACH, and one more to learn from.
static void predict(const Text *where, const Text *text, const float *weights, int64_t most,
                     Prediction *guess) {
    Found found[VISITS];
    int32_t next[VISITS];
    int count = find(where, text->tokens + text->length, text->length, found);
    float reach = 1;
    guess->count = 0;
    while (count && guess->count < most && reach >= MIN_REACH) {
        const int64_t position = guess->count;
        int known = 0;
        for (int i = 0; i < count; i++) {
            const int64_t place = found[i].place + position, beyond = place - where->length;
            if (beyond >= 0 && where != text) continue;  // the history ends there
            // A match that overlaps the end repeats with its period.
            const int32_t token = beyond < 0 ? where->tokens[place] : guess->tokens[beyond];
            if (token == NO_TOKEN) continue;  // the continuation is elsewhere, or there is none
            found[known] = found[i];
            next[known++] = token;
        }
        if (!known) break;
        reach /= vote(found, next, known, where->length, guess, weights);
        count = 0;
        for (int i = 0; i < known; i++)
            if (next[i] == guess->tokens[position]) found[count++] = found[i];
    }
}

// -- n-grams of texts by the model -----------------------------------------------------------------

// The entry of the last `count` tokens before `end`; 0: there is none.
static uint64_t ngram(const uint64_t *table, const int32_t *end, int64_t count) {
    uint64_t word = (uint64_t)count;
    for (int64_t back = count; back >= 1; back--)
        word = (word ^ (uint32_t)end[-back]) * 0x9E3779B97F4A7C15ull;
    word = (word ^ (word >> 29)) * 0xBF58476D1CE4E5B9ull;
    const uint64_t *entry = table + 1 + ((word >> 32) * table[0] >> 32);
    while (*entry && (*entry >> 32) != (uint32_t)word) entry++;
    return *entry;
}

// `predict` from a table of n-grams.
static void predict_known(const uint64_t *table, const Text *text, const float *weights, int64_t most,
                           Prediction *guess) {
    int32_t tail[MAX_NGRAM + SUFFIX_MAX_DRAFT];
    const int64_t past = text->length < MAX_NGRAM ? text->length : MAX_NGRAM;
    memcpy(tail, text->tokens + text->length - past, (size_t)past * sizeof(int32_t));
    float reach = 1;
    guess->count = 0;
    while (guess->count < most && reach >= MIN_REACH) {
        const int64_t here = past + guess->count;
        uint64_t entry = 0;
        int order = here < MAX_NGRAM ? (int)here : MAX_NGRAM;
        for (; order > 0 && !(entry = ngram(table, tail + here, order)); order--) {}
        if (!entry) break;
        const int share = (int)(entry & 0xFF);
        int16_t *features = guess->features[guess->count];
        features[0] = (int16_t)(OF_RIVALS + order * 16 + share / 16);
        features[1] = (int16_t)OF_VOTES;
        features[4] = (int16_t)OF_DISTANCES;
        const float often = ((float)share + 0.5f) / 256, odds = guess->bias + logf(often / (1 - often));
        tail[here] = (int32_t)(entry >> 8 & 0xFFFFFF);
        reach /= add(guess, tail[here], order, odds, weights);
    }
}

// Weigh a prediction by the evidence of two others. Returns its expected number of right tokens.
static float weigh(Prediction *guess, const Prediction *one, const Prediction *other, const float *weights) {
    const Prediction *others[] = {one, other};
    int same[] = {1, 1};
    float reach = 1, expected = 0;
    for (int64_t i = 0; i < guess->count; i++) {
        int kind = 0;
        for (int j = 0; j < 2; j++) {
            const int silent = !same[j] || i >= others[j]->count;
            same[j] = !silent && others[j]->tokens[i] == guess->tokens[i];
            kind = kind * 3 + (silent ? 0 : 1 + same[j]);
        }
        guess->features[i][FEATURES - 1] = (int16_t)(OF_OTHERS + kind);
        guess->odds[i] += weights[OF_OTHERS + kind];
        guess->promised[i] = 1 / (1 + expf(-guess->odds[i]));
        reach *= guess->promised[i];
        if (reach >= MIN_REACH) expected += reach;
    }
    return expected;
}

static void correct(float *weight, float *errors, float error) {
    *errors = fminf(*errors + error * error, MAX_ERRORS);
    *weight += RATE * error / sqrtf(1 + *errors);
}

// Learn from the verified tokens, up to the first wrong prediction.
static void learn(Prediction *guess, float *weights, const int32_t *verified, int64_t count) {
    float *errors = weights + WEIGHTS;
    for (int64_t i = 0; i < guess->count && i < count; i++) {
        const int right = guess->tokens[i] == verified[i];
        const float error = (float)right - guess->promised[i];
        for (int j = 0; j < FEATURES; j++) {
            const int16_t feature = guess->features[i][j];
            correct(weights + feature, errors + feature, error);
        }
        guess->bias += OWN_RATE * error;
        if (!i) guess->share += OWN_RATE * ((float)right - guess->share);
        if (!right) break;
    }
    guess->count = 0;
}

// The same for chosen predictions. The place with the highest promise often promises too much.
static void learn_told(Told *told, float *weights, const int32_t *verified, int64_t count) {
    for (int64_t i = 0; i < told->count && i < count; i++) {
        const int right = told->tokens[i] == verified[i], level = told->levels[i];
        correct(weights + level, weights + PLACES * LEVELS + level, (float)right - told->promised[i]);
        if (!right) break;
    }
    told->count = 0;
}

// -- requests --------------------------------------------------------------------------------------

void specops_lookups_free(Lookups *lookups) {
    if (!lookups) return;
    specops_text_free(lookups->text);
    free(lookups);
}

Lookups *specops_lookups_new(int64_t capacity) {
    Lookups *lookups = calloc(1, sizeof *lookups);
    if (!lookups) return NULL;
    lookups->own.share = lookups->past.share = lookups->known.share = 0.5f;
    if (!(lookups->text = specops_text_new(capacity, 2, 1))) return free(lookups), NULL;
    return lookups;
}

int64_t specops_estimate_floats(void) { return PLACES * 2 * (WEIGHTS + LEVELS); }

int64_t specops_look_up(Lookups *lookups, const Text *history, const uint64_t *table, float *estimate,
                        const int32_t *more, int64_t count, int64_t most, float least,
                        int32_t *tokens, float *promised, int32_t *found_in) {
    Prediction *own = &lookups->own, *past = &lookups->past, *known = &lookups->known;
    float *of_own = estimate, *of_past = estimate + 2 * WEIGHTS, *of_known = estimate + 4 * WEIGHTS;
    float *of_told = estimate + PLACES * 2 * WEIGHTS;
    learn(own, of_own, more, count);
    learn(past, of_past, more, count);
    learn(known, of_known, more, count);
    learn_told(&lookups->told, of_told, more, count);
    for (int64_t i = 0; i < count; i++) append(lookups->text, more[i]);
    if (most > SUFFIX_MAX_DRAFT) most = SUFFIX_MAX_DRAFT;
    predict(lookups->text, lookups->text, of_own, most, own);
    if (history) predict(history, lookups->text, of_past, most, past);
    if (table) predict_known(table, lookups->text, of_known, most, known);
    const float here = weigh(own, past, known, of_own), there = weigh(past, own, known, of_past);
    const float usual = weigh(known, own, past, of_known);
    const Prediction *best = there > here ? past : own;
    if (usual > here && usual > there) best = known;
    *found_in = best == own ? 0 : best == past ? 1 : 2;
    Told *told = &lookups->told;
    int64_t length = 0;
    float reach = 1;
    for (int64_t i = 0; i < best->count; i++) {
        const float odds = best->odds[i], bounded = fminf(fmaxf(odds, -LEVELS / 2), LEVELS / 2 - 1);
        const int level = *found_in * LEVELS + LEVELS / 2 + (int)floorf(bounded);
        told->tokens[i] = best->tokens[i], told->levels[i] = level;
        told->promised[i] = 1 / (1 + expf(-odds - of_told[level]));
        reach *= told->promised[i];
        if (reach >= least) tokens[i] = told->tokens[i], promised[i] = told->promised[i], length = i + 1;
    }
    told->count = best->count;
    return length;
}
