// The operator of attention, for ONNX Runtime's graphs. It checks all its inputs.
//
//   specops.Attention(query, key, value, spans, block_tables, cache, cos, sin, q_norm, k_norm,
//                     long_cos, long_sin, v_norm) -> float32 [..., T, num_heads * head_size]
//   query         float32 [..., T, num_heads * head_size]; without `key` and `value` it contains these,
//                 too, one after the other: [..., T, (num_heads + 2 * kv_num_heads) * head_size], or
//                 else the layer reads the keys and values that an earlier node of `layer` wrote
//   key, value    float32 [..., T, kv_num_heads * head_size], optional
//   spans         int64 [S, 3]: slot, first position, number of tokens; their tokens are the T
//   block_tables  int64 [slots, max_blocks]: number of the cache's block for each 64 positions
//   cache         int64 [4]: address, number of blocks, bytes of a block, type of elements
//   cos, sin      float32 [positions, rotated / 2], optional; or only cos, frequencies [rotated / 2],
//                 from which the kernel computes cosines and sines, times rotary_factor
//   q_norm, k_norm, v_norm  float32 [head_size], optional
//   long_cos, long_sin  as cos and sin, optional: they replace them for all positions if the slots
//                 have room for more positions than cos and sin have, or than rotary_within
//   attributes: kv_num_heads and head_size, lists with a number for each layer of the cache; layer, the
//   index into them; num_heads, rotary_interleaved, rotary_factor, rotary_within, window, scale, softcap,
//   epsilon; see attention.h
//
// The operator gets the cache's address, so ONNX Runtime binds and copies nothing per layer. The
// address must come from the engine: do not load an untrusted graph with this operator.

#include "attention.h"
#include "operators.h"
#include "processor.h"

#include <math.h>
enum { QUERY, KEY, VALUE, SPANS, TABLES, CACHE, COS, SIN, QUERY_NORM, KEY_NORM, LONG_COS, LONG_SIN,
       VALUE_NORM, INPUTS };
enum { CACHE_NUMBERS = 4 };

typedef struct {
    const AttentionKernel *kernel;
    Layer layer;
} Kernel;

typedef struct {
    Tensor inputs[INPUTS];
    Span spans[MAX_SLOTS];
    Pass pass;
    int64_t tokens;
} Arguments;

// Finds the layer's offset in a block of a cache of layers with these heads and sizes.
static const char *place(Layer *layer, int64_t number, int64_t layers, const int64_t *kv_heads,
                         const int64_t *sizes) {
    if (number < 0 || number >= layers) return "Attention: layer is not one of the cache's";
    for (int64_t i = 0; i < layers; i++) {
        if (kv_heads[i] < 1 || kv_heads[i] > MAX_HEADS) return "Attention: 1 to 1024 heads";
        if (sizes[i] < 8 || sizes[i] > MAX_SIZE || sizes[i] % 8)
            return "Attention: head_size is a multiple of 8, up to 512";
        for (int type = 0; type < TYPES; type++) {
            if (i == number) layer->before[type] = layer->block[type];
            layer->block[type] += kv_heads[i] * part_bytes(sizes[i], type);
        }
    }
    layer->kv_heads = kv_heads[number], layer->size = sizes[number];
    return NULL;
}

static const char *check_layer(const Layer *layer, int64_t interleaved) {
    if (layer->heads < 1 || layer->heads > MAX_HEADS) return "Attention: 1 to 1024 heads";
    if (layer->heads % layer->kv_heads)
        return "Attention: num_heads is not a multiple of kv_num_heads";
    if (interleaved != 0 && interleaved != 1) return "Attention: rotary_interleaved is 0 or 1";
    if (layer->rotary_within < 0 || !isfinite(layer->rotary_factor))
        return "Attention: rotary_within is below 0 or rotary_factor not finite";
    if (layer->window < 0 || layer->window > MAX_POSITIONS)
        return "Attention: window is too large or below 0";
    if (!isfinite(layer->scale)) return "Attention: scale is not finite";
    if (!(layer->softcap >= 0) || isinf(layer->softcap))
        return "Attention: softcap is below 0 or not finite";
    return check_epsilon(layer->epsilon);
}

OrtStatus *create_attention(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info,
                            void **out) {
    (void)op, (void)given;
    Kernel self = {.kernel = choose_processor()->attention};
    Layer *layer = &self.layer;
    int64_t number, interleaved, layers, as_many, kv_heads[MAX_LAYERS], sizes[MAX_LAYERS];
    const AttributeTo attributes[] = {
        {"layer", &number, NULL}, {"num_heads", &layer->heads, NULL},
        {"window", &layer->window, NULL}, {"rotary_interleaved", &interleaved, NULL},
        {"rotary_within", &layer->rotary_within, NULL},
        {"rotary_factor", NULL, &layer->rotary_factor},
        {"scale", NULL, &layer->scale}, {"softcap", NULL, &layer->softcap},
        {"epsilon", NULL, &layer->epsilon}};
    OrtStatus *status = read_attributes(info, attributes, sizeof attributes / sizeof *attributes);
    if (!status) status = read_list(info, "kv_num_heads", MAX_LAYERS, kv_heads, &layers);
    if (!status) status = read_list(info, "head_size", MAX_LAYERS, sizes, &as_many);
    if (status) return status;
    if (layers > MAX_LAYERS || layers != as_many)
        return failure("Attention: kv_num_heads and head_size have as many numbers, at most 1024");
    const char *wrong = place(layer, number, layers, kv_heads, sizes);
    if (!wrong) wrong = check_layer(layer, interleaved);
    if (wrong) return failure(wrong);
    layer->interleaved = (int)interleaved;
    return keep(&self, sizeof self, out);
}

// Reads queries, keys and values from three tensors or one.
static const char *read_projections(Arguments *arguments) {
    const Tensor *inputs = arguments->inputs, *query = inputs + QUERY;
    Pass *pass = &arguments->pass;
    const int64_t size = pass->layer.size, keys = pass->layer.kv_heads * size;
    const int64_t queries = pass->layer.heads * size;
    if (!query->data) return "Attention: there is no query";
    if (!inputs[KEY].data != !inputs[VALUE].data)
        return "Attention: key and value are given both or not at all";
    arguments->tokens = rows_of_tensor(query);
    pass->query = query->data;
    pass->query_stride = query->dimensions[query->count - 1];
    const int packed = !inputs[KEY].data && pass->query_stride == queries + 2 * keys;
    if (!packed && pass->query_stride != queries)
        return "Attention: the query's last dimension does not fit the heads";
    if (packed) {
        pass->key = pass->query + queries;
        pass->value = pass->key + keys;
        pass->key_stride = pass->query_stride;
        return NULL;
    }
    for (int i = KEY; inputs[KEY].data && i <= VALUE; i++) {
        const Tensor *input = inputs + i;
        if (input->dimensions[input->count - 1] != keys)
            return "Attention: the last dimension of key or value does not fit the heads";
        if (rows_of_tensor(input) != arguments->tokens)
            return "Attention: key or value has another number of tokens than the query";
    }
    pass->key = inputs[KEY].data;
    pass->value = inputs[VALUE].data;
    pass->key_stride = keys;
    return NULL;
}

// The choice depends on the capacity of the slots, not on their tokens, so a token's key does not depend
// on later tokens.
static void choose_tables(Tensor *inputs, const Layer *layer) {
    const Tensor *blocks = inputs + TABLES, *cos = inputs + COS;
    if (!inputs[LONG_COS].data || blocks->count != 2 || !cos->count) return;
    const int64_t rows = cos->count == 2 ? cos->dimensions[0] : layer->rotary_within;
    if (!rows || blocks->dimensions[1] <= rows / BLOCK + (rows % BLOCK > 0)) return;
    inputs[COS] = inputs[LONG_COS], inputs[SIN] = inputs[LONG_SIN];
}

static const char *read_tables(Arguments *arguments) {
    choose_tables(arguments->inputs, &arguments->pass.layer);
    const Tensor *inputs = arguments->inputs, *cos = inputs + COS, *sin = inputs + SIN;
    Pass *pass = &arguments->pass;
    const int64_t size = pass->layer.size;
    const int frequencies = cos->data && cos->count == 1;
    if (!cos->data != !sin->data && (!frequencies || sin->data))
        return "Attention: cos and sin are given both or not at all";
    if (frequencies) pass->frequencies = cos->data;
    else pass->cos = cos->data, pass->sin = sin->data;
    pass->pairs = cos->data ? cos->dimensions[cos->count - 1] : 0;
    if (cos->data && (cos->count > 2 || pass->pairs < 1 || pass->pairs > size / 2))
        return "Attention: cos is not [positions, rotated / 2] with at most head_size rotated";
    if (sin->data && !has_shape(sin, 2, cos->dimensions[0], pass->pairs))
        return "Attention: sin has another shape than cos";
    static const int NORMS[] = {QUERY_NORM, KEY_NORM, VALUE_NORM};
    for (size_t i = 0; i < sizeof NORMS / sizeof *NORMS; i++)
        if (inputs[NORMS[i]].data && !has_shape(inputs + NORMS[i], 1, size, size))
            return "Attention: q_norm, k_norm and v_norm have head_size numbers";
    pass->query_norm = inputs[QUERY_NORM].data, pass->key_norm = inputs[KEY_NORM].data;
    pass->value_norm = inputs[VALUE_NORM].data;
    return NULL;
}

static const char *read_cache(const Arguments *arguments, Pass *pass, int64_t *blocks) {
    const Tensor *tables = arguments->inputs + TABLES, *cache = arguments->inputs + CACHE;
    if (!has_shape(cache, 1, CACHE_NUMBERS, CACHE_NUMBERS))
        return "Attention: cache has four numbers";
    if (!tables->data || tables->count != 2)
        return "Attention: block_tables is [slots, max_blocks]";
    if (tables->dimensions[0] > MAX_SLOTS) return "Attention: at most 1024 slots";
    const int64_t *numbers = cache->data;
    *blocks = numbers[1];
    if (numbers[3] < 0 || numbers[3] >= TYPES) return "Attention: the cache's type is 0, 1 or 2";
    pass->type = (int)numbers[3];
    if (numbers[2] != pass->layer.block[pass->type])
        return "Attention: the cache's blocks have another size than the model's";
    if (*blocks < 0 || *blocks > INT64_MAX / numbers[2])
        return "Attention: the cache's number of blocks is impossible";
    if (!numbers[0] || numbers[0] % 4) return "Attention: the cache's address is 0 or not aligned";
    pass->cache = (char *)(intptr_t)numbers[0] + pass->layer.before[pass->type];
    pass->block_tables = tables->data;
    pass->max_blocks = tables->dimensions[1];
    return NULL;
}

// Checks the blocks that a span writes or reads; blocks before its window may be missing.
static const char *check_blocks(const Pass *pass, const Span *span, int64_t blocks) {
    const int64_t *table = table_of(pass, span), last = (span->start + span->tokens - 1) / BLOCK;
    for (int64_t block = first_seen(pass, span) / BLOCK; block <= last; block++)
        if (table[block] < 0 || table[block] >= blocks) return "Attention: a block is not in the cache";
    return NULL;
}

static const char *read_places(Arguments *arguments) {
    const Tensor *inputs = arguments->inputs, *cos = inputs + COS;
    Pass *pass = &arguments->pass;
    int64_t blocks;
    const char *wrong = read_cache(arguments, pass, &blocks);
    if (!wrong)
        wrong = read_spans(inputs + SPANS, inputs[TABLES].dimensions[0], arguments->tokens,
                           arguments->spans, &pass->count);
    for (const Span *span = pass->spans; !wrong && span < pass->spans + pass->count; span++) {
        if (span->start + span->tokens > pass->max_blocks * BLOCK)
            return "Attention: a position is beyond the block tables";
        if (pass->cos && span->start + span->tokens > cos->dimensions[0])
            return "Attention: a position is beyond the rotary table";
        wrong = check_blocks(pass, span, blocks);
    }
    return wrong;
}

OrtStatus *compute_attention(void *kernel, OrtKernelContext *context) {
    const Kernel *self = kernel;
    Arguments arguments;
    OrtStatus *status = read_inputs(context, INPUTS, arguments.inputs);
    if (status) return status;
    Pass *pass = &arguments.pass;
    *pass = (Pass){.layer = self->layer, .spans = arguments.spans};
    const char *wrong = read_projections(&arguments);
    if (!wrong) wrong = read_tables(&arguments);
    if (!wrong) wrong = read_places(&arguments);
    if (wrong) return failure(wrong);
    status = output_of(context, 0, arguments.inputs + QUERY, pass->layer.heads * pass->layer.size, &pass->out);
    if (status) return status;
    Call call = {context, NULL};
    attend(self->kernel, pass, threads_of(&call));
    return call.status;
}
