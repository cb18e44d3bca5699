// The operators of layers with a recurrent state, for ONNX Runtime's graphs. They check all their inputs.
//
//   specops.GatedDelta(mixed, gate, a, b, decay, bias, norm, spans, progress, kept_inputs)
//                      -> float32 [..., T, heads * value_size]
//   mixed   float32 [..., T, 2 * key_heads * key_size + heads * value_size]: queries, keys and values one
//           after the other; consecutive value heads read the same key head, but with `tiled` (a GGUF's
//           order) head j reads head j % key_heads
//   gate    float32 [..., T, heads * value_size]
//   a, b    float32 [..., T, heads]: a token's decay is exp(decay * softplus(a + bias)), its rate sigmoid(b)
//   decay, bias  float32 [heads]: decay is below 0
//   norm    float32 [value_size]
//   attributes: key_heads, tiled (0 or 1); epsilon
//
//   specops.StateSpace(mixed, gate, dt, decay, bias, skip, spans, progress, kept_inputs)
//                      -> float32 [..., T, heads * size]
//   mixed   float32 [..., T, heads * size + 2 * groups * state_size]: x, B and C one after the other
//   gate    float32 [..., T, heads * size]
//   dt      float32 [..., T, heads]: a token's rate is softplus(dt + bias), its decay exp(decay * rate)
//   decay, bias, skip  float32 [heads]
//   attributes: state_size
//
// Both:
//   spans        int64 [S, 3]: slot, first position, number of tokens; their tokens are the T
//   progress     int64 [S, 2], for each span: numbers of tokens in the stored state before the pass and
//                after it
//   kept_inputs  int64 [5]: address, number of slots, positions of a ring, floats of a position, floats
//                of a slot's states
//   attributes: first, total: this layer's offset in the floats of a position; state_first, state_total:
//   its offset in the floats of the states; see states.h
//
// Without the last three inputs, as in an export, each [T, ...] is a whole sequence. The address must come
// from the engine, which refuses exports whose operators have these inputs.

#include "operators.h"
#include "processor.h"
#include "states.h"

#include <math.h>

enum { MAX_INPUTS = 10 };
enum { SPANS, PROGRESS, KEPT, LAST };  // the last inputs of both

typedef struct {
    const StatesKernel *kernel;
    StatesPass pass;
    int64_t total, state_total;
} Kernel;

typedef struct {
    const StatesKernel *kernel;
    const StatesPass *pass;
} Job;

static OrtStatus *create(const OrtKernelInfo *info, Kernel *self, void **out) {
    StatesPass *pass = &self->pass;
    self->kernel = choose_processor()->states;
    const AttributeTo attributes[] = {
        {"first", &pass->first, NULL}, {"total", &self->total, NULL},
        {"state_first", &pass->state_first, NULL}, {"state_total", &self->state_total, NULL}};
    OrtStatus *status = read_attributes(info, attributes, sizeof attributes / sizeof *attributes);
    if (status) return status;
    if (pass->first < 0 || pass->first > self->total || self->total > MAX_FLOATS)
        return failure("first is not among the total");
    if (pass->state_first < 0 || pass->state_first > self->state_total || self->state_total > MAX_STATES)
        return failure("state_first is not among state_total");
    return keep(self, sizeof *self, out);
}

OrtStatus *create_gated_delta(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                              void **out) {
    (void)op, (void)given;
    Kernel self = {.pass.delta = 1};
    const AttributeTo attributes[] = {{"key_heads", &self.pass.groups, NULL},
                                      {"tiled", &self.pass.tiled, NULL},
                                      {"epsilon", NULL, &self.pass.epsilon}};
    OrtStatus *status = read_attributes(info, attributes, 3);
    if (status) return status;
    const char *wrong = check_epsilon(self.pass.epsilon);
    return wrong ? failure(wrong) : create(info, &self, out);
}

OrtStatus *create_state_space(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                              void **out) {
    (void)op, (void)given;
    Kernel self = {0};
    const AttributeTo size = {"state_size", &self.pass.key_size, NULL};
    OrtStatus *status = read_attributes(info, &size, 1);
    if (status) return status;
    return self.pass.key_size < 1 ? failure("StateSpace: state_size is below 1") : create(info, &self, out);
}

// Whether a tensor has `size` numbers for each of a pass's tokens.
static int fits(const Tensor *tensor, int64_t rows, int64_t size) {
    return tensor->data && tensor->count > 1 && rows_of_tensor(tensor) == rows &&
           tensor->dimensions[tensor->count - 1] == size;
}

// mixed, gate, the numbers of each head, decay and bias; `value_size` is known.
static const char *read_sizes(const Tensor *inputs, const Tensor *rates, const Tensor *decay,
                              StatesPass *pass) {
    const Tensor *mixed = inputs, *gate = inputs + 1, *decays = inputs + 2, *bias = decay + 1;
    if (!mixed->data || mixed->count < 2) return "a layer with a state has no input of [..., T, sizes]";
    if (pass->heads < 1 || pass->heads > MAX_STATE_HEADS) return "a layer has 1 to 1024 heads";
    if (pass->value_size < 32 || pass->value_size % 32 || pass->value_size > MAX_STATE)
        return "the size of a value's head is a multiple of 32";
    const int64_t rows = rows_of_tensor(mixed), values = pass->heads * pass->value_size;
    pass->width = mixed->dimensions[mixed->count - 1];
    const int64_t keys = (pass->width - values) / 2;
    if (pass->delta) pass->key_size = pass->groups > 0 ? keys / pass->groups : 0;
    else pass->groups = keys / pass->key_size;
    if (pass->groups < 1 || pass->groups > pass->heads || pass->heads % pass->groups)
        return "the number of heads is no multiple of those of keys";
    if (pass->key_size < 16 || pass->key_size % 16 || pass->key_size > MAX_KEY ||
        pass->width != values + 2 * pass->groups * pass->key_size)
        return "the size of a key's head is a multiple of 16, up to 256";
    if (pass->key_size * pass->value_size > MAX_STATE) return "a head's state has more than 32768 numbers";
    if (!fits(gate, rows, values)) return "the gate has another shape than the output";
    if (!fits(decays, rows, pass->heads) || !fits(rates, rows, pass->heads))
        return "rates or decays are not one for each head of each token";
    if (!has_shape(bias, 1, pass->heads, pass->heads)) return "the bias is not one for each head";
    pass->mixed = mixed->data, pass->gate = gate->data;
    pass->decays = decays->data, pass->rates = rates->data;
    pass->decay = decay->data, pass->bias = bias->data;
    return NULL;
}

// Reads progress into the spans that are not empty, which the operator has already read.
static const char *read_progress(const Tensor *spans, const Tensor *progress, int64_t ring, Span *out) {
    if (!has_shape(progress, 2, spans->dimensions[0], 2)) return "progress is [S, 2]";
    const int64_t *numbers = progress->data, *of = spans->data;
    for (int64_t i = 0; i < spans->dimensions[0]; i++, numbers += 2, of += 3) {
        if (!of[2]) continue;
        const int64_t end = out->start + out->tokens;
        out->applied = numbers[0], out->num_committed = numbers[1];
        if (out->applied < 0 || out->applied > out->start)
            return "the state in memory is behind the first token of a span";
        if (out->num_committed < out->applied || out->num_committed > end)
            return "committed tokens are not between those in memory and the end of a span";
        if (out->start - out->applied > ring || end - out->num_committed > ring)
            return "a slot keeps the inputs of fewer positions";
        out++;
    }
    return NULL;
}

static const char *read_places(const Kernel *self, const Tensor *last, StatesPass *pass, Span *spans) {
    const Tensor *given = last + SPANS;
    if (!given->data != !last[PROGRESS].data || !given->data != !last[KEPT].data)
        return "spans, progress and kept_inputs are given all or not at all";
    if (!given->data) {
        pass->count = pass->tokens ? pass->count / pass->tokens : 0;
        return NULL;
    }
    const int64_t rows = pass->count;
    const char *wrong = read_kept(last + KEPT, self->total, &pass->kept);
    if (wrong) return wrong;
    if (pass->kept.states != self->state_total) return "a slot's states have another size than the model's";
    if (ring_floats_per_token(pass) > self->total - pass->first ||
        pass->heads * pass->value_size * pass->key_size > self->state_total - pass->state_first)
        return "a layer's numbers are not among the total";
    wrong = read_spans(given, pass->kept.slots, rows, spans, &pass->count);
    pass->spans = spans;
    return wrong ? wrong : read_progress(given, last + PROGRESS, pass->kept.ring, spans);
}

static void piece(void *argument, size_t index) {
    const Job *job = argument;
    const StatesPass *pass = job->pass;
    const int64_t number = (int64_t)index / pass->heads;
    const int64_t tokens = pass->tokens;
    const Span whole = {.tokens = tokens, .first = number * tokens, .num_committed = tokens};
    job->kernel->head(pass, pass->spans ? pass->spans + number : &whole, (int64_t)index % pass->heads);
}

static OrtStatus *compute(const Kernel *self, OrtKernelContext *context, const Tensor *inputs,
                          const Tensor *last, StatesPass *pass) {
    Span spans[MAX_SLOTS];
    const int64_t rows = rows_of_tensor(inputs);
    pass->tokens = inputs->dimensions[inputs->count - 2], pass->count = rows;
    const char *wrong = read_places(self, last, pass, spans);
    if (wrong) return failure(wrong);
    OrtStatus *status = output_of(context, 0, inputs, pass->heads * pass->value_size, &pass->out);
    if (status || !pass->out) return status;
    Call call = {context, NULL};
    Threads threads = threads_of(&call);
    if (rows * pass->heads * pass->key_size * pass->value_size < FEW_PRODUCTS) threads.run = run_in_turn;
    Job job = {self->kernel, pass};
    threads.run(threads.context, piece, (size_t)(pass->count * pass->heads), &job);
    for (int64_t i = 0; pass->spans && !call.status && i < pass->count; i++)
        self->kernel->keep_keys(pass, spans + i);
    return call.status;
}

OrtStatus *compute_gated_delta(void *kernel, OrtKernelContext *context) {
    enum { MIXED, GATE, A, B, DECAY, BIAS, NORM, OTHERS };
    const Kernel *self = kernel;
    Tensor inputs[MAX_INPUTS];
    OrtStatus *status = read_inputs(context, OTHERS + LAST, inputs);
    if (status) return status;
    const Tensor *decay = inputs + DECAY, *norm = inputs + NORM;
    StatesPass pass = self->pass;
    if (!decay->data || decay->count != 1 || !norm->data || norm->count != 1)
        return failure("GatedDelta: decay is [heads] and norm [value_size]");
    pass.heads = decay->dimensions[0], pass.value_size = norm->dimensions[0], pass.norm = norm->data;
    const char *wrong = read_sizes(inputs, inputs + B, decay, &pass);
    if (wrong) return failure(wrong);
    pass.keys = pass.groups * pass.key_size, pass.values = 2 * pass.keys;
    pass.scale = 1.0f / sqrtf((float)pass.key_size);
    return compute(self, context, inputs, inputs + OTHERS, &pass);
}

OrtStatus *compute_state_space(void *kernel, OrtKernelContext *context) {
    enum { MIXED, GATE, DT, DECAY, BIAS, SKIP, OTHERS };
    const Kernel *self = kernel;
    Tensor inputs[MAX_INPUTS];
    OrtStatus *status = read_inputs(context, OTHERS + LAST, inputs);
    if (status) return status;
    const Tensor *gate = inputs + GATE, *decay = inputs + DECAY, *skip = inputs + SKIP;
    StatesPass pass = self->pass;
    if (!gate->data || !decay->data || decay->count != 1 || decay->dimensions[0] < 1 ||
        !has_shape(skip, 1, decay->dimensions[0], decay->dimensions[0]))
        return failure("StateSpace: decay and skip are [heads], gate is [..., T, heads * size]");
    pass.heads = decay->dimensions[0], pass.skip = skip->data;
    pass.value_size = gate->dimensions[gate->count - 1] / pass.heads;
    const char *wrong = read_sizes(inputs, inputs + DT, decay, &pass);
    if (wrong) return failure(wrong);
    pass.keys = pass.heads * pass.value_size, pass.queries = pass.keys + pass.groups * pass.key_size;
    return compute(self, context, inputs, inputs + OTHERS, &pass);
}
