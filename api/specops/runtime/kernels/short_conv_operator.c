// The operator of the short convolution, for ONNX Runtime's graphs. It checks all its inputs.
//
//   specops.ShortConv(x, weight, bias, spans, kept_inputs) -> float32 [..., T, channels]
//   x            float32 [..., T, 3 * channels]: B, C and x one after the other; or [..., T, channels],
//                without gates
//   weight       float32 [kernel_size, channels]
//   bias         float32 [channels], optional
//   spans        int64 [S, 3]: slot, first position, number of tokens; their tokens are the T
//   kept_inputs  int64 [5]: address, number of slots, positions of a ring, floats of a position, floats
//                of a slot's states
//   attributes: first, total: this layer's offset in the floats of a position; see short_conv.h
//
// Without spans and kept_inputs, as in an export, each [T, ...] is a whole sequence. The address must come
// from the engine, which refuses exports whose operators have these inputs.

#include "operators.h"
#include "processor.h"
#include "short_conv.h"

enum { X, WEIGHT, BIAS, SPANS, KEPT, INPUTS };
enum { PARTS = 3, LANES = 16, CHUNK = 256 };

typedef struct {
    ShortConvKernel *kernel;
    int64_t first, total;
} Kernel;

typedef struct {
    ShortConvKernel *kernel;
    const ConvPass *pass;
    int64_t chunks;
} Job;

OrtStatus *create_short_conv(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                             void **out) {
    (void)op, (void)given;
    Kernel self = {.kernel = choose_processor()->short_conv};
    const AttributeTo attributes[] = {{"first", &self.first, NULL}, {"total", &self.total, NULL}};
    OrtStatus *status = read_attributes(info, attributes, 2);
    if (status) return status;
    if (self.first < 0 || self.first > self.total || self.total > MAX_FLOATS)
        return failure("ShortConv: first is not among the total");
    return keep(&self, sizeof self, out);
}

static const char *read_sizes(const Tensor *inputs, ConvPass *pass) {
    const Tensor *x = inputs + X, *weight = inputs + WEIGHT, *bias = inputs + BIAS;
    if (!x->data || x->count < 2 || !weight->data || weight->count != 2)
        return "ShortConv: x is [..., T, channels or 3 * channels] and weight [kernel_size, channels]";
    pass->kernel_size = weight->dimensions[0], pass->channels = weight->dimensions[1];
    if (pass->kernel_size < 1 || pass->kernel_size > MAX_KERNEL_SIZE)
        return "ShortConv: a kernel size of 1 to 8";
    if (pass->channels < LANES || pass->channels % LANES || pass->channels > MAX_FLOATS)
        return "ShortConv: channels are a multiple of 16";
    pass->gated = x->dimensions[x->count - 1] == PARTS * pass->channels;
    if (!pass->gated && x->dimensions[x->count - 1] != pass->channels)
        return "ShortConv: x has another number of channels than the weight";
    if (bias->data && !has_shape(bias, 1, pass->channels, pass->channels))
        return "ShortConv: the bias has another number of channels than the weight";
    pass->x = x->data, pass->weight = weight->data, pass->bias = bias->data;
    return NULL;
}

static const char *read_pass(const Tensor *inputs, int64_t total, ConvPass *pass, Span *spans) {
    const Tensor *x = inputs + X;
    const char *wrong = read_sizes(inputs, pass);
    if (wrong) return wrong;
    if (!inputs[SPANS].data != !inputs[KEPT].data)
        return "ShortConv: spans and kept_inputs are given both or not at all";
    const int64_t rows = rows_of_tensor(x);
    if (!inputs[SPANS].data) {
        pass->tokens = x->dimensions[x->count - 2];
        pass->count = pass->tokens ? rows / pass->tokens : 0;
        return NULL;
    }
    wrong = read_kept(inputs + KEPT, total, &pass->kept);
    if (!wrong && pass->kept.ring < pass->kernel_size)
        wrong = "ShortConv: a slot keeps at least as many positions as the kernel size";
    if (!wrong && pass->channels > total - pass->first)
        wrong = "ShortConv: the channels are not among the floats of a position";
    if (!wrong) wrong = read_spans(inputs + SPANS, pass->kept.slots, rows, spans, &pass->count);
    pass->spans = spans;
    return wrong;
}

static void piece(void *argument, size_t index) {
    const Job *job = argument;
    const ConvPass *pass = job->pass;
    const int64_t number = (int64_t)index / job->chunks, from = (int64_t)index % job->chunks * CHUNK;
    const Span whole = {.tokens = pass->tokens, .first = number * pass->tokens};
    const int64_t end = from + CHUNK < pass->channels ? from + CHUNK : pass->channels;
    job->kernel(pass, pass->spans ? pass->spans + number : &whole, from, end);
}

OrtStatus *compute_short_conv(void *kernel, OrtKernelContext *context) {
    const Kernel *self = kernel;
    Tensor inputs[INPUTS];
    Span spans[MAX_SLOTS];
    OrtStatus *status = read_inputs(context, INPUTS, inputs);
    if (status) return status;
    ConvPass pass = {.first = self->first};
    const char *wrong = read_pass(inputs, self->total, &pass, spans);
    if (wrong) return failure(wrong);
    status = output_of(context, 0, inputs + X, pass.channels, &pass.out);
    if (status || !pass.out) return status;
    Call call = {context, NULL};
    Threads threads = threads_of(&call);
    if (rows_of_tensor(inputs + X) * pass.channels * pass.kernel_size < FEW_PRODUCTS)
        threads.run = run_in_turn;
    Job job = {self->kernel, &pass, (pass.channels + CHUNK - 1) / CHUNK};
    threads.run(threads.context, piece, (size_t)(pass.count * job.chunks), &job);
    return call.status;
}
