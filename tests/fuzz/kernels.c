// Calls the kernels with inputs as ONNX Runtime and Python could pass them, right and wrong.
//
//   kernels CASES SECONDS SEED      so many cases; with 0, for so many seconds
//
// A table of functions stands in for ONNX Runtime's. Each tensor has memory of exactly its size, so the
// address sanitizer sees each access beyond it. All kernels of the processor compute each case, in
// different orders or on several threads, into memory filled with different bytes, and must agree to the
// bit; any NaN agrees with any other. A wrong case must be refused or computed. If a case fails, the
// program prints its seed.

#include "attention.h"
#include "lengths.h"
#include "matmul.h"
#include "operators.h"
#include "processor.h"
#include "quantize.h"
#include "sampling.h"
#include "suffixes.h"
#include "tiles.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

const char *specops_kernel_of(unsigned has, int number);
unsigned specops_features(void);
int specops_force_kernel(const char *name);
int specops_filter(const float *, int64_t, int64_t, const Filter *, float *);
void specops_share(int64_t threads);
void specops_mask(float *, int64_t, int64_t, const uint32_t *, int64_t);
int64_t specops_draw(const float *, int64_t, double);
int64_t specops_gumbel_argmax(const float *, int64_t, uint64_t, uint64_t);
double specops_top(const float *, int64_t, int64_t, int64_t *);
void specops_adjust(float *, int64_t, int64_t, const int32_t *, const int64_t *, const int64_t *,
                    const Adjustment *);
void specops_share(int64_t);
int64_t specops_part_bytes(int64_t, int);
void specops_grids(const float *, int64_t, int64_t, const float *, float *, float *);
void specops_codes(const float *, int64_t, int64_t, int, const float *, const float *, uint8_t *);
void specops_compensate(const float *, const float *, int64_t, int64_t, const float *, const float *,
                        const float *, float *, uint8_t *, int64_t);
int64_t specops_tile_bytes(int, int64_t, int64_t, int64_t);
int64_t specops_row_bytes(int, int64_t);
int specops_pack_rows(int, const uint8_t *, int64_t, int64_t, uint8_t *);
void specops_pack_codes(int, const uint8_t *, const uint8_t *, const uint8_t *, int64_t, int64_t,
                        int64_t, uint8_t *);

enum { MAX_KERNELS = 10, MAX_RANK = 10, MAX_TENSORS = 13, MAX_ATTRIBUTES = 16, OUTPUTS = 3 };
static const char *names[MAX_KERNELS];  // plain C, the reference, comes first
static int kernels;

#if defined(__x86_64__)
// AVX-VNNI's kernels from the same sources, with AVX512-VNNI's instructions for 256 bits; kernels for
// processors that few machines have, with plain C in place of their instructions.
extern const MatmulKernel MATMUL_EVEX, MATMUL_AVX512_BY_C, MATMUL_VNNI512_BY_C;
extern const AttentionKernel ATTENTION_EVEX, ATTENTION_AVX512_BY_C, ATTENTION_VNNI512_BY_C;
static const Processor OTHERS[] = {
    {"AVX-VNNI by EVEX", HAS_AVX512 | HAS_VNNI512, &MATMUL_EVEX, &ATTENTION_EVEX, AVX2},
    {"AVX-512 by plain C", 0, &MATMUL_AVX512_BY_C, &ATTENTION_AVX512_BY_C, PLAIN},
    {"AVX512-VNNI by plain C", 0, &MATMUL_VNNI512_BY_C, &ATTENTION_VNNI512_BY_C, PLAIN},
};
enum { OTHER = sizeof OTHERS / sizeof *OTHERS };
#endif

static void list_kernels(void) {
    while ((names[kernels] = specops_kernel_of(specops_features(), kernels))) kernels++;
    for (int i = 0; i < kernels / 2; i++) {
        const char *name = names[i];
        names[i] = names[kernels - 1 - i], names[kernels - 1 - i] = name;
    }
#if defined(__x86_64__)
    for (int i = 0; i < OTHER; i++)
        if (!(OTHERS[i].needs & ~specops_features())) names[kernels++] = OTHERS[i].name;
#endif
}

static void use_kernel(int number) {
    if (specops_force_kernel(names[number])) return;
#if defined(__x86_64__)
    for (int i = 0; i < OTHER; i++)
        if (names[number] == OTHERS[i].name) use_processor(OTHERS + i);
#endif
}

static uint64_t state, seed;
static uint64_t executions, refusals;
static uint64_t digest = 0xcbf29ce484222325u;  // of plain C's results: the same everywhere

static void digest_words(const void *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, (const char *)from + 4 * i, 4);
        if ((word & 0x7fffffff) > 0x7f800000) word = 0x7fc00000;  // all NaNs count as the same
        digest = (digest ^ word) * 0x100000001b3u;
    }
}

static void tell_seed(int number) {  // the sanitizers abort, too
    (void)number;
    fprintf(stderr, "seed of the case: %llu\n", (unsigned long long)seed);
}

static void check(int right, const char *what) {
    if (right) return;
    fprintf(stderr, "kernels disagree: %s\n", what);
    abort();
}

static uint64_t random_word(void) {  // SplitMix64
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int64_t below(int64_t count) { return (int64_t)(random_word() % (uint64_t)count); }
static int64_t from_to(int64_t first, int64_t last) { return first + below(last - first + 1); }
static int one_in(int64_t count) { return below(count) == 0; }

static int64_t odd_number(void) {
    static const int64_t ODD[] = {0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 255, 256, 257, 1024, 1025,
                                  1 << 24, (1 << 24) + 1, 1 << 30, (1ll << 31) - 1, 1ll << 31,
                                  1ll << 32, 1ll << 40, 1ll << 61, INT64_MAX, INT64_MAX - 1};
    const int64_t number = ODD[below(sizeof ODD / sizeof *ODD)];
    return one_in(3) ? -number - one_in(2) : number;
}

static float odd_float(void) {
    static const float ODD[] = {0.0f, -0.0f, NAN, INFINITY, -INFINITY, 1e-45f, 1e-38f, 1e-30f,
                                3.4e38f, -3.4e38f, 1.0f, 127.5f, -86.5f, 88.8f, 65504.0f, 65520.0f};
    if (one_in(4)) {
        const uint32_t bits = (uint32_t)random_word();
        float any;
        memcpy(&any, &bits, sizeof any);
        return any;
    }
    return ODD[below(sizeof ODD / sizeof *ODD)];
}

// How often numbers are odd: 0 is never, n is one in n.
static int64_t oddness(void) { return (int64_t[]){0, 0, 50, 3, 1}[below(5)]; }

static float some_float(int64_t odd) {
    if (odd && one_in(odd)) return odd_float();
    return (float)(int16_t)random_word() / 8192.0f;
}

// -- in place of ONNX Runtime ----------------------------------------------------------------------

struct OrtValue {
    void *data;
    int64_t dimensions[MAX_RANK];
    size_t count;
};
struct OrtStatus { char message[1]; };
typedef struct {
    const char *name;
    int64_t whole;
    float real;
    int64_t list[MAX_SEGMENTS + 1];
    size_t count;
} Attribute;
struct OrtKernelInfo { Attribute attributes[MAX_ATTRIBUTES]; size_t count; };
struct OrtKernelContext {
    OrtValue *inputs[MAX_TENSORS], outputs[OUTPUTS];
    int fill, order, absent;  // absent: outputs that the graph does not have, a bit each
};

static OrtStatus refused;

static OrtStatus *create_status(int code, const char *message) {
    (void)code, (void)message;
    return &refused;
}

static const Attribute *attribute(const OrtKernelInfo *info, const char *name) {
    for (size_t i = 0; i < info->count; i++)
        if (!strcmp(info->attributes[i].name, name)) return info->attributes + i;
    return NULL;
}

static OrtStatus *get_whole(const OrtKernelInfo *info, const char *name, int64_t *out) {
    const Attribute *found = attribute(info, name);
    if (!found) return &refused;
    return *out = found->whole, NULL;
}

static OrtStatus *get_real(const OrtKernelInfo *info, const char *name, float *out) {
    const Attribute *found = attribute(info, name);
    if (!found) return &refused;
    return *out = found->real, NULL;
}

static OrtStatus *get_list(const OrtKernelInfo *info, const char *name, int64_t *out, size_t *count) {
    const Attribute *found = attribute(info, name);
    if (!found) return &refused;
    if (out) memcpy(out, found->list, found->count * sizeof *out);
    return *count = found->count, NULL;
}

static OrtStatus *get_input(const OrtKernelContext *context, size_t index, const OrtValue **out) {
    return *out = context->inputs[index], NULL;
}

static OrtStatus *get_data(OrtValue *value, void **out) { return *out = value->data, NULL; }

static OrtStatus *get_shape(const OrtValue *value, int *type, const int64_t **dimensions, size_t *count) {
    *type = ORT_FLOAT, *dimensions = value->dimensions, *count = value->count;
    return NULL;
}

// Number of elements of a tensor; -1: more than ONNX Runtime could hold.
static int64_t elements(const int64_t *dimensions, size_t count) {
    int64_t all = 1;
    for (size_t i = 0; i < count; i++)
        if (!dimensions[i]) return 0;
    for (size_t i = 0; i < count; i++) {
        if (dimensions[i] < 0 || all > (1 << 22) / dimensions[i]) return -1;
        all *= dimensions[i];
    }
    return all;
}

static OrtStatus *get_output(OrtKernelContext *context, size_t index, const int64_t *shape,
                             size_t count, OrtValue **out) {
    const int64_t bytes = elements(shape, count) * (int64_t)sizeof(float);
    if (index >= OUTPUTS || bytes < 0) return &refused;
    if (context->absent >> index & 1) return *out = NULL, NULL;
    OrtValue *output = context->outputs + index;
    output->count = count;
    memcpy(output->dimensions, shape, count * sizeof *shape);
    output->data = malloc((size_t)bytes);
    memset(output->data, context->fill, (size_t)bytes);
    return *out = output, NULL;
}

typedef struct {
    void (*work)(void *, size_t);
    void *argument;
    size_t count;
    _Atomic size_t next;
} Work;

static void *take(void *given) {
    Work *work = given;
    for (size_t i; (i = work->next++) < work->count;) work->work(work->argument, i);
    return NULL;
}

static OrtStatus *parallel(const OrtKernelContext *context, void (*work)(void *, size_t),
                           size_t count, size_t batches, void *argument) {
    (void)batches;
    Work all = {work, argument, count, 0};
    pthread_t threads[4];
    const int more = context->order > 1 ? context->order - 1 : 0;
    for (int i = 0; i < more; i++)
        if (pthread_create(threads + i, NULL, take, &all)) abort();
    if (context->order == 1) for (size_t i = count; i-- > 0;) work(argument, i);
    else take(&all);
    for (int i = 0; i < more; i++) pthread_join(threads[i], NULL);
    return NULL;
}

static const OrtApi API = {.CreateStatus = create_status,
                           .GetTensorMutableData = get_data,
                           .GetTensorElementTypeAndShapeDataReference = get_shape,
                           .KernelInfoGetAttribute_float = get_real,
                           .KernelInfoGetAttribute_int64 = get_whole,
                           .KernelInfoGetAttributeArray_int64 = get_list,
                           .KernelContext_GetInput = get_input,
                           .KernelContext_GetOutput = get_output,
                           .KernelContext_ParallelFor = parallel};

// -- cases of the operators ------------------------------------------------------------------------

typedef struct {
    const OrtCustomOp *operator;
    OrtKernelInfo info;
    OrtValue inputs[MAX_TENSORS];
    size_t count;
    int absent;   // outputs
    char *cache;  // of attention, or what other layers keep; each kernel gets a copy
    int64_t cache_bytes;
    size_t address;  // the input whose first number is the address of `cache`
} Case;

static void put_attribute(Case *c, const char *name, int64_t whole, float real) {
    c->info.attributes[c->info.count++] = (Attribute){name, whole, real, {0}, 0};
}

static void put_list(Case *c, const char *name, const int64_t *list, int64_t count) {
    Attribute *attribute = c->info.attributes + c->info.count++;
    *attribute = (Attribute){.name = name, .count = (size_t)count};
    memcpy(attribute->list, list, (size_t)count * sizeof *list);
}

static void *put_input(Case *c, size_t index, int64_t size, size_t count, const int64_t *shape) {
    OrtValue *input = c->inputs + index;
    input->count = count;
    memcpy(input->dimensions, shape, count * sizeof *shape);
    input->data = malloc((size_t)(elements(shape, count) * size));
    if (index >= c->count) c->count = index + 1;
    return input->data;
}

static void put_floats(Case *c, size_t index, int64_t odd, size_t count, const int64_t *shape) {
    float *values = put_input(c, index, sizeof(float), count, shape);
    for (int64_t i = 0; i < elements(shape, count); i++) values[i] = some_float(odd);
}

// Changes a tensor's shape and gives it memory of the new size. Its numbers become 0; block numbers
// become -1, because two slots must not write the same block.
static void reshape(OrtValue *input, int64_t size) {
    int64_t shape[MAX_RANK];
    size_t count = input->count;
    memcpy(shape, input->dimensions, sizeof shape);
    if (one_in(3)) {
        count = (size_t)below(MAX_RANK + 1);
        for (size_t i = input->count; i < count; i++) shape[i] = 1;
    }
    if (count) {
        int64_t *one = shape + below((int64_t)count);
        *one = one_in(3) ? odd_number() : *one + from_to(-1, 1);
        if (one_in(4)) shape[below((int64_t)count)] = 1ll << 61;
        if (one_in(4)) shape[below((int64_t)count)] = 0;
    }
    for (size_t i = 0; i < count; i++) if (shape[i] < 0) return;
    const int64_t all = elements(shape, count);
    if (all < 0) return;
    free(input->data);
    input->data = all || one_in(2) ? malloc((size_t)(all * size)) : NULL;
    if (all) memset(input->data, size == 8 ? 0xFF : 0, (size_t)(all * size));
    input->count = count;
    memcpy(input->dimensions, shape, sizeof shape);
}

static void make_wrong(Case *c, const int64_t *sizes) {
    const size_t index = (size_t)below((int64_t)c->count);
    if (one_in(3)) {
        Attribute *one = c->info.attributes + below((int64_t)c->info.count);
        one->whole = odd_number(), one->real = odd_float();
        if (one->count && one_in(4)) one->count = (size_t)below(MAX_SEGMENTS + 2);
        else one->list[one->count ? below((int64_t)one->count) : 0] = odd_number();
        if (one_in(8)) c->info.count--;
    } else if (one_in(4)) {
        free(c->inputs[index].data);
        c->inputs[index] = (OrtValue){0};
    } else if (c->inputs[index].count) reshape(c->inputs + index, sizes[index]);
}

// Replaces the random bits of a group's header by scales that are seldom odd, and zero points that are codes.
static void tame_header(const Form f, uint8_t *at, int64_t blocks, int64_t odd) {
    const int64_t floats = f.scales == FLOAT || f.scales == FLOAT_ZERO ? 16 * blocks : 0;
    int64_t halves = 16, zeros = 0;
    if (floats || f.scales == EXPONENT) halves = 0;
    if (f.scales == HALF || f.scales == HALF_ZERO) halves = 16 * blocks;
    if (f.scales == HALF_PAIR) halves = 32 * blocks;
    if (f.scales == SIX_PAIR || f.scales == SIXTEEN_PAIR) halves = 32;
    if (f.scales == HALF_ZERO || f.scales == FLOAT_ZERO) zeros = 16 * blocks;
    for (int64_t i = 0; i < floats; i++, at += 4) {
        const float scale = some_float(odd);
        memcpy(at, &scale, sizeof scale);
    }
    for (int64_t i = 0; i < halves; i++, at += 2) {
        // A random sign, an exponent near 1 and random digits, or any bits.
        uint16_t half = (uint16_t)random_word();
        if (!odd || !one_in(odd)) half = (half & 0x8fff) | 0x2000;
        memcpy(at, &half, sizeof half);
    }
    for (int64_t i = 0; f.low == 4 && i < zeros; i++) at[i] &= 15;
    for (int64_t i = 0; f.scales == EXPONENT && i < 16 * blocks; i++)
        if (!odd || !one_in(odd)) at[i] = (uint8_t)from_to(120, 135);
}

static void tame_scales(const Weights *w, uint8_t *tiles, int64_t odd) {
    for (const Segment *s = w->segments; s < w->segments + w->count; s++)
        for (int64_t tile = 0; tile < s->tiles; tile++) {
            uint8_t *at = tiles + s->bytes_before + tile * s->size;
            for (int64_t left = w->blocks; left > 0; left -= GROUP_BLOCKS) {
                const int64_t blocks = left < GROUP_BLOCKS ? left : GROUP_BLOCKS;
                tame_header(s->form, at, blocks, odd);
                at += header_bytes(s->form, blocks) + blocks * code_bytes(s->form, w->block);
            }
        }
}

// The inputs of a norm from number `index` on: weight, residual and shift.
static void put_norm(Case *c, int kind, size_t index, int64_t odd, size_t rank, const int64_t *x) {
    const int64_t *depth = x + rank - 1;
    put_floats(c, index, odd, 1, depth);
    if (one_in(2)) put_floats(c, index + 1, odd, rank, x);
    if (kind == LAYER_NORM && one_in(2)) put_floats(c, index + 2, odd, 1, depth);
}

static void norm(Case *c) {
    static const int64_t SIZES[] = {4, 4, 4, 4};
    const int64_t odd = oddness(), depth = from_to(1, one_in(32) ? 1200 : 150);
    const int kind = one_in(4) ? SOFT_CAP : one_in(2) ? NORM : LAYER_NORM;
    c->operator = &NORM_OPERATOR.op;
    put_attribute(c, "input", kind, 0), put_attribute(c, "epsilon", 0, one_in(4) ? 0 : 1e-5f);
    c->absent = 2 * (int)below(2);
    const int64_t x[] = {1, one_in(4) ? from_to(0, 40) : from_to(1, 6), depth};
    const size_t rank = 1 + (size_t)below(3);
    put_floats(c, 0, odd, rank, x + 3 - rank);
    if (kind == SOFT_CAP) put_floats(c, 1, odd, 1, (int64_t[]){1});
    else put_norm(c, kind, 1, odd, rank, x + 3 - rank);
    if (one_in(4)) make_wrong(c, SIZES);
}

static void fill(uint8_t *bytes, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) {
        const uint64_t word = random_word();
        memcpy(bytes + i, &word, count - i < 8 ? (size_t)(count - i) : 8);
    }
}

// A matrix of a random type, those of a file first: N, K and the size of its blocks.
typedef struct { int type; int64_t columns, depth, block; } Matrix;

static Matrix some_matrix(int of_file) {
    static const int KINDS[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL,
                                IQ4_XS, MXFP4, INT4, INT8, INT4_ZERO, INT8_ZERO, INT4_FLOAT,
                                INT8_FLOAT, INT4_ZERO_FLOAT, INT8_ZERO_FLOAT};
    const int type = KINDS[of_file ? below(13) : from_to(13, 20)];
    const int64_t columns = from_to(1, 40), most = one_in(32) ? 1200 : 300;
    if (of_file) {
        const int64_t weights = form_of(type).super;
        return (Matrix){type, columns, weights * from_to(1, 1 + most / weights), UNIT};
    }
    return (Matrix){type, columns, from_to(1, most), UNIT * from_to(1, 8)};
}

static void table(Case *c) {
    static const int64_t SIZES[] = {8, 1};
    const int of_file = one_in(2), tiled = !of_file || one_in(2);
    const Matrix m = some_matrix(of_file);
    c->operator = &GATHER_OPERATOR.op;
    put_attribute(c, "N", m.columns, 0), put_attribute(c, "K", m.depth, 0);
    put_attribute(c, "type", m.type, 0), put_attribute(c, "block_size", m.block, 0);
    put_attribute(c, "tiled", tiled, 0);
    const int64_t shape[] = {from_to(1, 2), 1, one_in(4) ? from_to(0, 40) : from_to(1, 6)};
    const size_t rank = 1 + (size_t)below(3);
    int64_t *ids = put_input(c, 0, sizeof *ids, rank, shape + 3 - rank);
    for (int64_t i = 0; i < elements(shape + 3 - rank, rank); i++)
        ids[i] = one_in(100) ? odd_number() : from_to(-m.columns, m.columns - 1);
    const int64_t bytes[] = {m.columns, specops_row_bytes(m.type, m.depth)};
    const int64_t size = specops_tile_bytes(m.type, m.columns, m.depth, m.block);
    uint8_t *weights = tiled ? put_input(c, 1, 1, 1, &size) : put_input(c, 1, 1, 2, bytes);
    fill(weights, tiled ? size : bytes[0] * bytes[1]);
    if (one_in(4)) make_wrong(c, SIZES);
}

static void product(Case *c) {
    static const int64_t SIZES[] = {4, 1, 4, 4, 4, 4};
    const int64_t odd = oddness(), count = one_in(2) ? 1 : from_to(2, 3);
    const int bias = one_in(2), of_file = one_in(2);
    const Matrix first = some_matrix(of_file);
    specops_share(from_to(1, 16));
    int64_t columns[MAX_SEGMENTS] = {one_in(32) ? 200 : first.columns}, types[MAX_SEGMENTS] = {first.type};
    for (int64_t i = 1; i < count; i++) {
        const Matrix other = some_matrix(of_file);
        columns[i] = other.columns, types[i] = other.type;
    }
    Weights weights;
    check(!describe_weights(&weights, first.depth, first.block, count, columns, types), "a right product");
    c->operator = &MATMUL_OPERATOR.op;
    put_list(c, "N", columns, count), put_list(c, "types", types, count);
    put_attribute(c, "K", first.depth, 0), put_attribute(c, "block_size", first.block, 0);
    put_attribute(c, "bias", bias, 0);
    const int made = one_in(2) ? AS_IT_IS : (int)below(OUTPUT_GATE + 1);
    put_attribute(c, "input", made, 0), put_attribute(c, "epsilon", 0, 1e-5f);
    c->absent = 2 * (int)below(4);
    const int64_t rows = one_in(4) ? from_to(0, 70) : from_to(1, 6);
    const int gated = made == SILU_GATE || made == GELU_GATE;
    const int64_t x[] = {1, rows, gated ? 2 * first.depth : first.depth};
    const size_t rank = one_in(2) ? 2 : 3;
    put_floats(c, 0, odd, rank, x + 3 - rank);
    if (made == NORM || made == LAYER_NORM) put_norm(c, made, 3, odd, rank, x + 3 - rank);
    if (made == OUTPUT_GATE) put_floats(c, 4, odd, rank, x + 3 - rank);
    uint8_t *tiles = put_input(c, 1, 1, 1, &weights.bytes);
    fill(tiles, weights.bytes);
    tame_scales(&weights, tiles, odd ? 10 * odd : 0);
    if (bias) put_floats(c, 2, odd, 1, &weights.columns);
    if (one_in(4)) make_wrong(c, SIZES);
}

static void shuffle(int64_t *numbers, int64_t count) {
    for (int64_t i = count - 1; i > 0; i--) {
        const int64_t other = below(i + 1), number = numbers[i];
        numbers[i] = numbers[other], numbers[other] = number;
    }
}

static void attention(Case *c) {
    static const int64_t SIZES[] = {4, 4, 4, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4};
    const int64_t odd = oddness(), layers = from_to(1, 3), layer = below(layers);
    const int type = (int)below(TYPES);
    int64_t all_heads[3], sizes[3], block = 0;
    for (int64_t i = 0; i < layers; i++) {
        all_heads[i] = from_to(1, 3), sizes[i] = 8 * from_to(1, one_in(32) ? 64 : 5);
        block += all_heads[i] * specops_part_bytes(sizes[i], type);
    }
    const int64_t kv_heads = all_heads[layer], size = sizes[layer], heads = kv_heads * from_to(1, 4);
    c->operator = &ATTENTION_OPERATOR.op;
    specops_share(from_to(1, 8));
    put_attribute(c, "layer", layer, 0), put_attribute(c, "num_heads", heads, 0);
    put_list(c, "kv_num_heads", all_heads, layers), put_list(c, "head_size", sizes, layers);
    put_attribute(c, "rotary_interleaved", one_in(2), 0);
    put_attribute(c, "rotary_within", one_in(2) ? 0 : from_to(1, 4) * BLOCK, 0);
    put_attribute(c, "rotary_factor", 0, one_in(2) ? 1.0f : 1.25f);
    put_attribute(c, "window", one_in(2) ? 0 : from_to(1, 150), 0);
    put_attribute(c, "scale", 0, one_in(8) ? some_float(2) : 0.25f);
    put_attribute(c, "softcap", 0, one_in(2) ? 0 : 5.0f), put_attribute(c, "epsilon", 0, 1e-6f);
    const int64_t slots = from_to(1, 3), most = from_to(1, one_in(4) ? 12 : 4), blocks = slots * most;
    int64_t spans[3 * 3], order[3] = {0, 1, 2}, tokens = 0, count = from_to(0, slots);
    shuffle(order, slots);
    for (int64_t i = 0; i < count; i++) {
        const int64_t longest = one_in(32) ? most * BLOCK : 4;
        const int64_t start = below(most * BLOCK), room = most * BLOCK - start;
        const int64_t length = below(room < longest ? room + 1 : longest + 1);
        memcpy(spans + 3 * i, (int64_t[]){order[i], start, length}, 3 * sizeof *spans);
        tokens += length;
    }
    const int packed = one_in(3), alone = packed || one_in(8);  // it may read another layer's keys
    const int64_t queries = heads * size, keys = kv_heads * size;
    put_floats(c, 0, odd, 3, (int64_t[]){1, tokens, packed ? queries + 2 * keys : queries});
    for (size_t i = 1; !alone && i < 3; i++) put_floats(c, i, odd, 3, (int64_t[]){1, tokens, keys});
    memcpy(put_input(c, 3, 8, 2, (int64_t[]){count, 3}), spans, (size_t)count * 3 * sizeof *spans);
    int64_t *tables = put_input(c, 4, 8, 2, (int64_t[]){slots, most});
    for (int64_t i = 0; i < blocks; i++) tables[i] = i;
    shuffle(tables, blocks);
    c->cache_bytes = blocks * block;
    c->cache = malloc((size_t)c->cache_bytes);
    memset(c->cache, one_in(4) ? 0xFF : 0x3C, (size_t)c->cache_bytes);
    int64_t *cache = put_input(c, c->address = 5, 8, 1, (int64_t[]){4});
    memcpy(cache, (int64_t[]){0, blocks, block, type}, 4 * sizeof *cache);
    if (one_in(3)) {  // by frequencies, of which the kernel makes cosines and sines
        const int64_t turned = from_to(1, size / 2);
        put_floats(c, 6, odd, 1, &turned);
        if (one_in(2)) put_floats(c, 10, odd, 1, &turned);
    } else if (one_in(2)) {
        const int64_t turned = from_to(1, size / 2), known = one_in(2) ? most : from_to(1, most);
        const int64_t table[] = {known * BLOCK, turned}, longer[] = {most * BLOCK, turned};
        put_floats(c, 6, odd, 2, table), put_floats(c, 7, odd, 2, table);
        if (known < most || one_in(4)) put_floats(c, 10, odd, 2, longer), put_floats(c, 11, odd, 2, longer);
    }
    if (one_in(2)) put_floats(c, 8, odd, 1, &size), put_floats(c, 9, odd, 1, &size);
    if (one_in(4)) put_floats(c, 12, odd, 1, &size);
    const int right = one_in(3);
    for (int64_t i = 1; right && i < count; i++) {  // blocks that nobody writes to may be shared
        const int64_t *span = spans + 3 * i, *other = span - 3, least = other[1] < span[1] ? other[1] : span[1];
        for (int64_t block = 0; block < least / BLOCK && block < below(16); block++)
            tables[span[0] * most + block] = tables[other[0] * most + block];
    }
    if (right) return;
    if (one_in(2)) make_wrong(c, SIZES);
    else {  // a wrong number; the engine ensures that all blocks exist and no two slots share a writable one
        const int64_t number = odd_number(), beyond = number < 0 ? number : number / 2 + blocks;
        switch (below(4)) {
            case 0: if (count) ((int64_t *)c->inputs[3].data)[below(count * 3)] = number; break;
            case 1: tables[below(blocks)] = beyond; break;
            case 2: cache[1] = below(blocks); break;
            default: cache[from_to(2, 3)] = number;
        }
    }
}

// Spans of up to so many tokens of some of the slots, in input number `index`; returns all their tokens.
static int64_t put_spans(Case *c, size_t index, int64_t slots, int64_t longest) {
    int64_t spans[3 * 3], order[3] = {0, 1, 2}, tokens = 0, count = from_to(0, slots);
    shuffle(order, slots);
    for (int64_t i = 0; i < count; i++) {
        const int64_t length = below(longest);
        memcpy(spans + 3 * i, (int64_t[]){order[i], below(30), length}, 3 * sizeof *spans);
        tokens += length;
    }
    memcpy(put_input(c, index, 8, 2, (int64_t[]){count, 3}), spans, (size_t)count * 3 * sizeof *spans);
    return tokens;
}

// What the slots keep, of so many floats each, and the input that describes it.
static int64_t *put_kept(Case *c, size_t index, int64_t odd, int64_t slots, int64_t ring, int64_t total,
                         int64_t states) {
    const int64_t floats = slots * (states + ring * total);
    c->cache_bytes = floats * (int64_t)sizeof(float);
    c->cache = malloc((size_t)c->cache_bytes);
    if (one_in(4)) memset(c->cache, 0xFF, (size_t)c->cache_bytes);
    else for (int64_t i = 0; i < floats; i++) ((float *)c->cache)[i] = some_float(odd) / 4;
    int64_t *kept = put_input(c, c->address = index, 8, 1, (int64_t[]){5});
    return memcpy(kept, (int64_t[]){0, slots, ring, total, states}, 5 * sizeof *kept);
}

static void short_conv(Case *c) {
    static const int64_t SIZES[] = {4, 4, 4, 8, 8};
    const int64_t odd = oddness(), channels = 16 * from_to(1, one_in(32) ? 40 : 4);
    const int64_t width = one_in(2) ? 3 * channels : channels;
    const int64_t taps = from_to(1, MAX_KERNEL_SIZE), ring = taps + below(6), slots = from_to(1, 3);
    const int64_t first = below(20), total = first + channels + below(20);
    c->operator = &SHORT_CONV_OPERATOR.op;
    put_attribute(c, "first", first, 0), put_attribute(c, "total", total, 0);
    put_floats(c, 1, odd, 2, (int64_t[]){taps, channels});
    if (one_in(2)) put_floats(c, 2, odd, 1, &channels);
    if (one_in(8)) {  // whole sequences, without a memory
        put_floats(c, 0, odd, 3, (int64_t[]){from_to(0, 3), from_to(0, 9), width});
        if (one_in(4)) make_wrong(c, SIZES);
        return;
    }
    const int64_t tokens = put_spans(c, 3, slots, one_in(32) ? 60 : 5);
    put_floats(c, 0, odd, 3, (int64_t[]){1, tokens, width});
    int64_t *kept = put_kept(c, 4, odd, slots, ring, total, 16 * below(3));
    if (one_in(3)) return;
    if (one_in(2)) make_wrong(c, SIZES);
    else switch (below(4)) {
        case 0: if (c->inputs[3].dimensions[0]) *(int64_t *)c->inputs[3].data = odd_number(); break;
        case 1: kept[1] = below(slots); break;
        case 2: kept[2] = below(ring); break;
        default: kept[3] = odd_number();
    }
}

// The inputs of a layer with a state that do not depend on memory: at first those of each token.
static size_t put_state_layer(Case *c, int delta, int64_t odd, int64_t groups, int64_t heads, int64_t key,
                              int64_t value, int64_t sequences, int64_t tokens) {
    const int64_t sizes[] = {2 * groups * key + heads * value, heads * value, heads, heads};
    size_t index = 0;
    for (; index < (delta ? 4 : 3); index++)
        put_floats(c, index, odd, 3, (int64_t[]){sequences, tokens, sizes[index]});
    float *decay = put_input(c, index++, sizeof *decay, 1, &heads);
    for (int64_t i = 0; i < heads; i++) decay[i] = -fabsf(some_float(odd)) * (one_in(4) ? 100 : 1);
    put_floats(c, index++, odd, 1, &heads), put_floats(c, index++, odd, 1, delta ? &value : &heads);
    return index;
}

static void recurrence(Case *c) {
    static const int64_t DELTA_SIZES[] = {4, 4, 4, 4, 4, 4, 4, 8, 8, 8};
    const int delta = one_in(2);
    const int64_t *sizes = DELTA_SIZES + !delta, odd = oddness();
    const int64_t groups = from_to(1, 2), heads = groups * from_to(1, 3);
    const int64_t key = 16 * from_to(1, one_in(16) ? 16 : 3), value = 32 * from_to(1, 2);
    const int64_t slots = from_to(1, 3), ring = from_to(1, 24);
    const int64_t floats = groups * key + heads * value + (heads + 15) / 16 * 16;
    const int64_t first = below(20), total = first + floats + below(20);
    const int64_t state_first = below(20), states = state_first + heads * key * value + below(20);
    c->operator = delta ? &GATED_DELTA_OPERATOR.op : &STATE_SPACE_OPERATOR.op;
    put_attribute(c, delta ? "key_heads" : "state_size", delta ? groups : key, 0);
    put_attribute(c, "first", first, 0), put_attribute(c, "total", total, 0);
    put_attribute(c, "state_first", state_first, 0), put_attribute(c, "state_total", states, 0);
    put_attribute(c, "tiled", one_in(2), 0), put_attribute(c, "epsilon", 0, 1e-6f);
    if (one_in(8)) {  // whole sequences, without a memory
        put_state_layer(c, delta, odd, groups, heads, key, value, from_to(0, 3), from_to(0, 20));
        if (one_in(4)) make_wrong(c, sizes);
        return;
    }
    const size_t last = delta ? 7 : 6;
    const int64_t tokens = put_spans(c, last, slots, one_in(16) ? 60 : 6);
    put_state_layer(c, delta, odd, groups, heads, key, value, 1, tokens);
    const int64_t count = c->inputs[last].dimensions[0];
    const int64_t *span = c->inputs[last].data;
    int64_t *progress = put_input(c, last + 1, 8, 2, (int64_t[]){count, 2});
    for (int64_t i = 0; i < count; i++, span += 3) {
        const int64_t end = span[1] + span[2], most = span[1] < ring ? span[1] : ring;
        const int64_t applied = one_in(8) && span[1] <= ring ? 0 : span[1] - below(most + 1);
        const int64_t least = end - ring > applied ? end - ring : applied;
        progress[2 * i] = applied, progress[2 * i + 1] = one_in(3) ? end : from_to(least, end);
    }
    int64_t *kept = put_kept(c, last + 2, odd, slots, ring, total, states);
    if (one_in(3)) return;
    if (one_in(2)) make_wrong(c, sizes);
    else switch (below(4)) {
        case 0: if (count) ((int64_t *)c->inputs[last].data)[below(count * 3)] = odd_number(); break;
        case 1:
            if (!count) break;
            progress += below(count * 2);
            *progress = one_in(2) ? odd_number() : *progress + from_to(-2, 2);
            break;
        case 2: kept[1] = below(slots), kept[2] = from_to(0, ring); break;
        default: kept[from_to(3, 4)] = odd_number();
    }
}

static void discard(Case *c) {
    for (size_t i = 0; i < c->count; i++) free(c->inputs[i].data);
    free(c->cache);
}

static int same(const float *one, const float *other, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(one + i, other + i, sizeof *one) && !(isnan(one[i]) && isnan(other[i]))) return 0;
    return 1;
}

// Computes a case; returns 0 if it was refused.
static int run(Case *c, OrtKernelContext *context, char *cache) {
    void *kernel;
    executions++;
    if (c->operator->CreateKernelV2(c->operator, api, &c->info, &kernel)) return refusals++, 0;
    for (size_t i = 0; i < c->count; i++)
        context->inputs[i] = c->inputs[i].data || c->inputs[i].count ? c->inputs + i : NULL;
    OrtValue *number = c->inputs + c->address;
    if (cache && number->data && number->count == 1 && number->dimensions[0] > 0)
        *(int64_t *)number->data = (int64_t)(intptr_t)cache;
    OrtStatus *status = c->operator->KernelComputeV2(kernel, context);
    c->operator->KernelDestroy(kernel);
    return status ? refusals++, 0 : 1;
}

static void try_operator(void (*make)(Case *)) {
    Case c = {0};
    make(&c);
    OrtKernelContext contexts[MAX_KERNELS] = {0};
    int computed[MAX_KERNELS] = {0};
    char *caches[MAX_KERNELS] = {0};
    const int of_floats = c.cache && c.operator != &ATTENTION_OPERATOR.op;
    for (int k = 0; k < kernels; k++) {
        use_kernel(k);
        contexts[k].fill = 0x11 * (k + 1);
        contexts[k].absent = c.absent;
        contexts[k].order = one_in(64) ? (int)from_to(2, 5) : one_in(2);
        if (c.cache) caches[k] = malloc((size_t)c.cache_bytes);
        if (c.cache) memcpy(caches[k], c.cache, (size_t)c.cache_bytes);
        computed[k] = run(&c, contexts + k, caches[k]);
        check(computed[k] == computed[0], "one refuses");
        if (of_floats) check(same((float *)caches[0], (float *)caches[k], c.cache_bytes / 4), "what is kept");
        for (int i = 0; computed[k] && i < OUTPUTS; i++) {
            const OrtValue *out = contexts[k].outputs + i, *expected = contexts[0].outputs + i;
            check(!out->data == !expected->data, "one has no output");
            const int64_t all = out->data ? elements(out->dimensions, out->count) : 0;
            if (!k) digest_words(out->data, all);
            check(same(out->data, expected->data, all), names[k]);
        }
    }
    if (of_floats) digest_words(caches[0], c.cache_bytes / 4);
    for (int k = 0; k < kernels; free(caches[k++]))
        for (int i = 0; i < OUTPUTS; i++) free(contexts[k].outputs[i].data);
    discard(&c);
}

// -- packing ---------------------------------------------------------------------------------------

// A column of packed tiles as numbers, in memory of their size.
static float *column_of(const Matrix *m, const uint8_t *tiles, int64_t column) {
    const Form f = form_of(m->type);
    const int64_t blocks = (m->depth + m->block - 1) / m->block, step = GROUP_BLOCKS * m->block;
    const uint8_t *group = tiles + column / TILE * bytes_of_tile(f, blocks, m->block);
    float *out = malloc((size_t)m->depth * sizeof *out);
    for (int64_t first = 0, k = 0; k < m->depth; first += GROUP_BLOCKS, k += step) {
        const int64_t count = group_blocks(blocks, first);
        const int64_t depth = m->depth - k < step ? m->depth - k : step;
        unpack_group(f, m->block, group, count, (int)(column % TILE), depth, out + k);
        group += group_bytes(f, count, m->block);
    }
    return out;
}

// Rows with any bytes, those of a file: scales that packing calls finite make finite weights.
static void try_rows(void) {
    const Matrix m = some_matrix(1);
    const int64_t size = specops_row_bytes(m.type, m.depth) * m.columns;
    uint8_t *raw = malloc((size_t)size);
    uint8_t *tiles = malloc((size_t)specops_tile_bytes(m.type, m.columns, m.depth, UNIT));
    fill(raw, size);
    for (int64_t i = 0; one_in(2) && i < size; i++) raw[i] &= 0xbb;  // often finite
    const int finite = specops_pack_rows(m.type, raw, m.columns, m.depth, tiles);
    int all = 1;
    for (int64_t column = 0; column < m.columns; column++) {
        float *values = column_of(&m, tiles, column);
        for (int64_t k = 0; k < m.depth; k++) all &= isfinite(values[k]) != 0;
        digest_words(values, m.depth);
        free(values);
    }
    executions++;
    // MXFP4's smaller codes may be finite with a scale that the larger ones are not.
    check(finite ? all : !all || m.type == MXFP4, "whether scales are finite");
    free(raw), free(tiles);
}

static float half_at(const uint8_t *at) {
    const int exponent = at[1] >> 2 & 31, digits = (at[1] & 3) << 8 | at[0];
    float size = ldexpf((float)(exponent ? digits + 1024 : digits), exponent ? exponent - 25 : -24);
    if (exponent == 31) size = digits ? NAN : INFINITY;
    return at[1] >> 7 ? -size : size;
}

// MatMulNBits' weights with any bytes: a weight is scale * (code - zero point).
static void try_codes(void) {
    Matrix m = some_matrix(0);
    const Form f = form_of(m.type);
    const int64_t blocks = (m.depth + m.block - 1) / m.block, all = m.columns * blocks;
    const int64_t size = m.block * f.low / 8, width = f.scales >= FLOAT ? 4 : 2;
    const int64_t points = (blocks * f.low + 7) / 8;
    uint8_t *codes = malloc((size_t)(all * size)), *scales = malloc((size_t)(all * width));
    uint8_t *zero_points = malloc((size_t)(m.columns * points));
    uint8_t *tiles = malloc((size_t)specops_tile_bytes(m.type, m.columns, m.depth, m.block));
    fill(codes, all * size), fill(scales, all * width), fill(zero_points, m.columns * points);
    const int stored = f.scales == HALF_ZERO || f.scales == FLOAT_ZERO;
    specops_pack_codes(m.type, codes, scales, stored ? zero_points : NULL, m.columns, blocks, m.block,
                       tiles);
    for (int64_t column = 0; column < m.columns; column++) {
        float *values = column_of(&m, tiles, column), *expected = malloc((size_t)m.depth * 4);
        for (int64_t k = 0; k < m.depth; k++) {
            const int64_t block = k / m.block, number = column * blocks + block;
            const uint8_t *bytes = codes + number * size, *pairs = zero_points + column * points;
            const int64_t at = k % m.block;
            const int code = f.low == 8 ? bytes[at] : bytes[at / 2] >> at % 2 * 4 & 15;
            const int zero = f.low == 8 ? pairs[block] : pairs[block / 2] >> block % 2 * 4 & 15;
            float scale = 0;
            if (width == 2) scale = half_at(scales + number * 2);
            else memcpy(&scale, scales + number * 4, 4);
            expected[k] = scale * (float)(code - (stored ? zero : f.middle));
        }
        check(same(values, expected, m.depth), "weights of MatMulNBits");
        digest_words(values, m.depth);
        free(values), free(expected);
    }
    executions++;
    free(codes), free(scales), free(zero_points), free(tiles);
}

// -- sampling --------------------------------------------------------------------------------------

// Changes [rows, count] logits, with tokens that may be the same ones.
static void try_adjusting(float *logits, int64_t rows, int64_t count) {
    enum { MOST = 40 };
    int32_t banned[2 * MOST], biased[MOST], known[MOST];
    float biases[MOST], counts[MOST], before[MOST], in_prompt[MOST];
    int64_t ends[2], drafted[1] = {0}, end = 0;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t more = below(MOST); more > 0; more--) banned[end++] = (int32_t)below(count);
        ends[row] = end;
    }
    for (int64_t i = 0; i < MOST; i++) {
        biased[i] = (int32_t)below(count), known[i] = (int32_t)below(count);
        biases[i] = some_float(3), counts[i] = before[i] = (float)below(3);
        in_prompt[i] = (float)below(2);
    }
    const Adjustment by = {0.5f + fabsf(some_float(3)), some_float(3), some_float(3), below(MOST), biased,
                           biases, from_to(1, MOST), known, counts, in_prompt};
    if (rows > 1) drafted[0] = below(by.num_known);
    specops_adjust(logits, rows, count, banned, ends, drafted, &by);
    executions++;
    check(!memcmp(counts, before, sizeof counts), "counts of tokens are as before");
    digest_words(logits, rows * count);
}

static void try_sampling(void) {
    const int64_t count = one_in(64) ? from_to(1, 5000) : from_to(1, 100), rows = from_to(1, 2);
    const int64_t odd = oddness(), all = rows * count;
    float *logits = malloc((size_t)all * sizeof *logits), *probs[MAX_KERNELS] = {0};
    const float spread = one_in(3) ? 30.0f : 1.0f;
    for (int64_t i = 0; i < all; i++) logits[i] = some_float(odd) * spread;
    Filter filter = {one_in(4) ? fabsf(some_float(3)) : 0.7f, one_in(2) ? 0 : from_to(1, count),
                     one_in(2) ? 1.0 : (double)below(1001) / 1000,
                     one_in(2) ? 0.0f : (float)below(101) / 100};
    if (one_in(8)) filter.top_k = odd_number(), filter.top_p = (double)odd_float();
    if (one_in(8)) filter.min_p = odd_float();
    const double uniform = one_in(8) ? (double)odd_float() : (double)below(1 << 20) / (1 << 20);
    const uint64_t word = random_word(), position = (uint64_t)below(1000);
    const int64_t words = (count + 31) / 32 + below(2);
    uint32_t *mask = malloc((size_t)(rows * words) * sizeof *mask);
    for (int64_t i = 0; i < rows * words; i++) mask[i] = (uint32_t)random_word();
    float *masked[MAX_KERNELS] = {0};
    int refused_logits = 0;
    int64_t drawn[MAX_KERNELS], raced[MAX_KERNELS], tops[MAX_KERNELS][21];
    double sums[MAX_KERNELS];
    const int64_t top = below((count < 20 ? count : 20) + 1);
    for (int k = 0; k < kernels; k++) {
        use_kernel(k);
        probs[k] = malloc((size_t)all * sizeof(float));
        memset(probs[k], 0x11 * (k + 1), (size_t)all * sizeof(float));
        const int status = specops_filter(logits, rows, count, &filter, probs[k]);
        if (!k) refused_logits = status;
        check(status == refused_logits && (!status || status == -2), "logits that are not finite");
        for (int64_t i = 0; status && i < all; i++) probs[k][i] = 1;  // for what follows
        drawn[k] = specops_draw(probs[k], count, uniform);
        raced[k] = specops_gumbel_argmax(probs[k], count, word, position);
        masked[k] = malloc((size_t)all * sizeof(float));
        memcpy(masked[k], logits, (size_t)all * sizeof(float));
        specops_mask(masked[k], rows, count, mask, words);
        sums[k] = specops_top(logits, count, top, tops[k]);
        for (int64_t i = 0; i < top; i++)
            check(tops[k][i] >= 0 && tops[k][i] < count, "a likely token is no index");
        check(!memcmp(tops[0], tops[k], (size_t)top * sizeof(int64_t)), "likely tokens");
        check(sums[0] == sums[k] || (isnan(sums[0]) && isnan(sums[k])), "sums of probabilities");
        executions += 5;
        check(drawn[k] >= 0 && drawn[k] < count, "a draw is no index");
        check(raced[k] >= 0 && raced[k] < count, "a race is won by no index");
        check(same(probs[0], probs[k], all), "probabilities");
        check(same(masked[0], masked[k], all), "masked logits");
        check(drawn[0] == drawn[k] && raced[0] == raced[k], "tokens");
    }
    digest_words(probs[0], all), digest_words(masked[0], all);
    digest_words(drawn, sizeof *drawn / 4), digest_words(raced, sizeof *raced / 4);
    digest_words(tops[0], top * (int64_t)sizeof(int64_t) / 4);
    try_adjusting(logits, rows, count);
    for (int k = 0; k < kernels; k++) free(probs[k]), free(masked[k]);
    free(mask);
    free(logits);
}

// -- counted suffixes ------------------------------------------------------------------------------

// Requests and a history with random texts of few different tokens, some of them odd, and a table of
// random n-grams. Predictions must have a right length and probabilities.
static void try_suffixes(void) {
    const int64_t kinds = from_to(1, 6), steps = from_to(1, 40);
    float *estimate = calloc((size_t)specops_estimate_floats(), sizeof *estimate);
    Text *history = specops_text_new(from_to(2, 64), from_to(1, 4), from_to(1, 3));
    uint64_t table[64] = {(uint64_t)from_to(1, 62)};  // and a zero at the end
    for (int place = 1; place < 63; place++)
        if (one_in(2)) table[place] = (uint64_t)odd_number() << 32 | (uint64_t)from_to(1, 0xFFFFFFF);
    for (int request = 0; request < 3; request++) {
        Lookups *lookups = specops_lookups_new(from_to(2, 64));
        int32_t seen[1200];
        int64_t length = 0;
        for (int64_t step = 0; step < steps; step++) {
            const int64_t count = from_to(0, 30), begin = length, most = from_to(0, 20);
            while (length < begin + count)
                seen[length++] = one_in(16) ? (int32_t)odd_number() : (int32_t)below(kinds);
            int32_t tokens[SUFFIX_MAX_DRAFT], found_in;
            float promised[SUFFIX_MAX_DRAFT];
            const float line = one_in(8) ? odd_float() : (float)below(100) / 100;
            const Text *const past = one_in(2) ? history : NULL;
            const uint64_t *const known = one_in(2) ? table : NULL;
            const int64_t found = specops_look_up(lookups, past, known, estimate, seen + begin, count,
                                                  most, line, tokens, promised, &found_in);
            executions++;
            check(found >= 0 && found <= most && found <= SUFFIX_MAX_DRAFT, "a draft's length");
            check(found_in >= 0 && found_in <= (known ? 2 : past ? 1 : 0), "a draft's source");
            digest_words(tokens, found), digest_words(promised, found);
            for (int64_t i = 0; i < found; i++)
                check(promised[i] >= 0 && promised[i] <= 1, "a promise is no probability");
        }
        specops_teach(history, lookups);
        specops_lookups_free(lookups);
    }
    specops_text_free(history);
    free(estimate);
}

// -- draft lengths ---------------------------------------------------------------------------------

static double *some_seconds(int64_t count, int64_t odd) {
    double *seconds = malloc((size_t)count * sizeof *seconds);
    for (int64_t i = 0; i < count; i++)
        seconds[i] = odd && one_in(odd) ? (double)odd_float() : (double)below(1000) * 1e-5;
    return seconds;
}

// Drafts of some requests with random probabilities and costs, some of them odd. No draft gets longer.
static void try_lengths(void) {
    const int64_t requests = from_to(1, 12), odd = oddness();
    int64_t *offsets = malloc((size_t)(requests + 1) * sizeof *offsets);
    int64_t *lengths = malloc((size_t)requests * sizeof *lengths);
    offsets[0] = 0;
    for (int64_t i = 0; i < requests; i++) offsets[i + 1] = offsets[i] + below(9);
    const int64_t places = offsets[requests];
    double *probs = malloc((size_t)places * sizeof *probs);
    for (int64_t i = 0; i < places; i++)
        probs[i] = odd && one_in(odd) ? (double)odd_float() : (double)below(101) / 100;
    double *by_place = some_seconds(requests, odd), *by_token = some_seconds(requests, odd);
    double *costs = some_seconds(places + 1, odd), *prompt = some_seconds(places + 1, odd);
    const StepCosts step = {.requests = requests, .seconds = 1e-3, .drafting = (double)below(100) * 1e-5,
                            .place_seconds = by_place, .token_seconds = by_token, .costs = costs,
                            .prompt_costs = one_in(2) ? prompt : NULL,
                            .least = one_in(8) ? (double)odd_float() : 0.02};
    specops_choose_lengths(&step, offsets, probs, lengths);
    executions++;
    for (int64_t i = 0; i < requests; i++)
        check(lengths[i] >= 0 && lengths[i] <= offsets[i + 1] - offsets[i], "a draft's chosen length");
    digest_words(lengths, 2 * requests);
    free(offsets), free(lengths), free(probs), free(by_place), free(by_token), free(costs), free(prompt);
}

// -- quantization ----------------------------------------------------------------------------------

// `count` finite numbers, some of them odd.
static float *finite(int64_t count, float largest) {
    const int64_t odd = oddness();
    float *numbers = malloc((size_t)count * sizeof *numbers);
    for (int64_t i = 0; i < count; i++) {
        do numbers[i] = some_float(odd);
        while (!(fabsf(numbers[i]) <= largest));
    }
    return numbers;
}

static void try_blocks(void) {
    const int64_t block = 16 << below(5), blocks = from_to(1, 6), all = blocks * block;
    float *weights = finite(all, INFINITY), *importance = one_in(2) ? finite(block, 1) : NULL;
    for (int64_t i = 0; i < all; i++)
        if (isinf(weights[i])) weights[i] = 0;
    for (int64_t i = 0; importance && i < block; i++) importance[i] = fabsf(importance[i]);
    float *grids[MAX_KERNELS];  // scales, zero points
    uint8_t *codes[MAX_KERNELS];
    for (int k = 0; k < kernels; k++) {
        use_kernel(k);
        grids[k] = malloc((size_t)(2 * blocks) * sizeof(float));
        codes[k] = malloc((size_t)(all + all / 2));
        specops_grids(weights, blocks, block, importance, grids[k], grids[k] + blocks);
        specops_codes(weights, blocks, block, 8, grids[k], NULL, codes[k]);
        specops_codes(weights, blocks, block, 4, grids[k], grids[k] + blocks, codes[k] + all);
        executions += 3;
        check(same(grids[0], grids[k], 2 * blocks), "grids of blocks");
        check(!memcmp(codes[0], codes[k], (size_t)(all + all / 2)), "codes of blocks");
        for (int64_t i = 0; i < blocks; i++)
            check(grids[k][blocks + i] >= 0 && grids[k][blocks + i] <= 15, "a zero point");
    }
    digest_words(grids[0], 2 * blocks), digest_words(codes[0], (all + all / 2) / 4);
    for (int k = 0; k < kernels; k++) free(grids[k]), free(codes[k]);
    free(weights), free(importance);
}

static void try_compensation(void) {
    const int64_t columns = from_to(1, one_in(4) ? MAX_BLOCK : 20), rows = from_to(1, 70);
    const int64_t all = columns * rows, pitch = columns + below(20);
    float *weights = finite(all, 1000), *wanted = finite(all, 1000);
    float *feedback = finite(columns * columns, 1), *grids = finite(2 * rows, 15);
    for (int64_t i = 0; i < columns * columns; i++) feedback[i] /= (float)columns;
    for (int64_t i = 0; i < 2 * rows; i++) grids[i] = i < rows ? grids[i] : truncf(fabsf(grids[i]));
    float *errors[MAX_KERNELS];
    uint8_t *codes[MAX_KERNELS];
    for (int k = 0; k < kernels; k++) {
        use_kernel(k);
        errors[k] = malloc((size_t)all * sizeof(float));
        codes[k] = calloc((size_t)(rows * pitch), 1);
        specops_compensate(weights, wanted, columns, rows, feedback, grids, grids + rows, errors[k],
                           codes[k], pitch);
        executions++;
        check(same(errors[0], errors[k], all), "errors of columns");
        check(!memcmp(codes[0], codes[k], (size_t)(rows * pitch)), "codes of columns");
    }
    digest_words(errors[0], all), digest_words(codes[0], rows * pitch / 4);
    for (int k = 0; k < kernels; k++) free(errors[k]), free(codes[k]);
    free(weights), free(wanted), free(feedback), free(grids);
}

int main(int count, char **arguments) {
    if (count != 4) return fprintf(stderr, "kernels CASES SECONDS SEED\n"), 2;
    const uint64_t cases = strtoull(arguments[1], NULL, 10);
    const time_t end = time(NULL) + atol(arguments[2]);
    const uint64_t first = seed = strtoull(arguments[3], NULL, 10);
    api = &API;
    signal(SIGABRT, tell_seed);
    list_kernels();
    do {
        state = seed;
        const int64_t kind = below(14);
        if (kind < 3) try_operator(product);
        else if (kind < 6) try_operator(attention);
        else if (kind < 7) try_operator(norm);
        else if (kind < 9) try_sampling();
        else if (kind < 10) one_in(2) ? try_suffixes() : try_lengths();
        else if (kind < 11 && one_in(2)) try_operator(table);
        else if (kind < 11) one_in(2) ? try_rows() : try_codes();
        else if (kind < 12) try_operator(short_conv);
        else if (kind < 13) try_operator(recurrence);
        else if (one_in(2)) try_blocks();
        else try_compensation();
        seed++;
    } while (cases ? seed - first < cases : time(NULL) < end);
    printf("kernels: %llu cases from seed %llu, %llu executions, %llu of them refused\n",
           (unsigned long long)(seed - first), (unsigned long long)first,
           (unsigned long long)executions, (unsigned long long)refusals);
    for (int k = 0; k < kernels; k++) printf("%s%s", k ? ", " : "", names[k]);
    printf("\ndigest %016llx\n", (unsigned long long)digest);
    return 0;
}
