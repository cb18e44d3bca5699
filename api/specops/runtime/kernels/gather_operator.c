// The operator that looks up rows of a table of weights, for embeddings.
//
//   specops.QuantizedGather(ids, table) -> rows
//   ids       int64 [...], up to 7 dimensions; negative ones count from the end, as in Gather
//   table     uint8: a GGUF's rows [N, bytes of a row], or tiles [bytes]
//   rows      float32 [..., K]: scale * (code - middle), minus or plus an offset; only the last sum is
//             rounded, so they equal the results of ggml's dequantization. With scales in float32, the
//             product is rounded instead.
//   attributes: N, K, type, block_size; tiled (0 or 1); see tiles.h

#include "operators.h"
#include "tiles.h"

#include <stdlib.h>

enum { IDS, TABLE, INPUTS };
enum { MAX_ROWS = 16 };  // per job of a thread

typedef struct {
    int64_t columns, depth, type, block, tiled;
    Form form;
    int64_t row_bytes, tile_bytes;
} Kernel;

typedef struct {
    const Kernel *kernel;
    const int64_t *ids;
    const uint8_t *table;
    float *out;
    int64_t count;
} Work;

static const char *check_table(Kernel *self, int64_t type) {
    const char *wrong = describe_matrix(type, self->columns, self->depth, self->block, &self->form);
    if (wrong) return wrong;
    if (self->tiled >> 1) return "QuantizedGather: tiled is 0 or 1";
    if (!self->form.super) return self->tiled ? NULL : "QuantizedGather: files have no rows of this type";
    return self->depth % self->form.super ? "QuantizedGather: the type's blocks do not divide K" : NULL;
}

OrtStatus *create_gather(const OrtCustomOp *op, const OrtApi *given, const OrtKernelInfo *info, void **out) {
    (void)op, (void)given;
    Kernel self;
    const AttributeTo attributes[] = {{"N", &self.columns, NULL}, {"K", &self.depth, NULL},
                                      {"type", &self.type, NULL}, {"block_size", &self.block, NULL},
                                      {"tiled", &self.tiled, NULL}};
    OrtStatus *status = read_attributes(info, attributes, sizeof attributes / sizeof *attributes);
    if (status) return status;
    const char *wrong = check_table(&self, self.type);
    if (wrong) return failure(wrong);
    self.row_bytes = self.tiled ? 0 : bytes_of_row(self.form, self.depth);
    const int64_t blocks = (self.depth + self.block - 1) / self.block;
    self.tile_bytes = bytes_of_tile(self.form, blocks, self.block);
    return keep(&self, sizeof self, out);
}

static void look_up(const Kernel *self, const uint8_t *table, int64_t row, float *out) {
    const Form f = self->form;
    const int64_t group_depth = GROUP_BLOCKS * self->block;
    const int64_t blocks = (self->depth + self->block - 1) / self->block;
    const uint8_t *group = table + row / TILE * self->tile_bytes;
    uint8_t packed[MAX_GROUP];
    for (int64_t first = 0, k = 0; k < self->depth; first += GROUP_BLOCKS, k += group_depth) {
        const int64_t count = group_blocks(blocks, first);
        const int64_t depth = self->depth - k < group_depth ? self->depth - k : group_depth;
        if (self->tiled) {
            unpack_group(f, self->block, group, count, (int)(row % TILE), depth, out + k);
            group += group_bytes(f, count, self->block);
        } else {
            pack_group((int)self->type, table + row * self->row_bytes, first, count, 0, packed);
            unpack_group(f, self->block, packed, count, 0, depth, out + k);
        }
    }
}

static void look_up_some(void *argument, size_t number) {
    const Work *work = argument;
    const Kernel *self = work->kernel;
    const int64_t first = (int64_t)number * MAX_ROWS;
    for (int64_t i = first; i < first + MAX_ROWS && i < work->count; i++) {
        const int64_t id = work->ids[i];
        look_up(self, work->table, id < 0 ? id + self->columns : id, work->out + i * self->depth);
    }
}

OrtStatus *compute_gather(void *kernel, OrtKernelContext *context) {
    const Kernel *self = kernel;
    Tensor tensors[INPUTS];
    OrtStatus *status = read_inputs(context, INPUTS, tensors);
    if (status) return status;
    Tensor rows = tensors[IDS];
    const Tensor *table = tensors + TABLE;
    if (!rows.data || rows.count == MAX_DIMENSIONS)
        return failure("QuantizedGather: the ids are missing or have too many dimensions");
    const int64_t bytes = (self->columns + TILE - 1) / TILE * self->tile_bytes;
    if (!(self->tiled ? has_shape(table, 1, bytes, bytes)
                      : has_shape(table, 2, self->columns, self->row_bytes)))
        return failure("QuantizedGather: the table has another size than its shape");
    rows.count++;
    const int64_t count = rows_of_tensor(&rows);
    const int64_t *ids = rows.data;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < -self->columns || ids[i] >= self->columns)
            return failure("QuantizedGather: an id is outside of the table");
    Work work = {.kernel = self, .ids = ids, .table = table->data, .count = count};
    status = output_of(context, 0, &rows, self->depth, &work.out);
    if (status || !count) return status;
    Call call = {context, NULL};
    const Threads threads = threads_of(&call);
    const size_t jobs = (size_t)((count + MAX_ROWS - 1) / MAX_ROWS);
    if (jobs == 1) look_up_some(&work, 0);
    else threads.run(threads.context, look_up_some, jobs, &work);
    return call.status;
}
