// Defines `piece` for a kernel: the loops over tiles, groups of rows and blocks. The kernel includes this
// file behind its MOST, BYTES, LOWERED and
//
//   multiply_block(planes, count, table, units, at, starts, dots)
//
// which computes a block's sums of products for `count` rows: `at` has the block's codes, `units` units of 32
// of K, and those of activations, and is moved behind them; `starts` [halves][count] is what the sums begin
// with if terms are STARTS; `dots` [halves][count] gets the sums. Planes and numbers of rows are constants,
// so that the compiler unrolls the loops over rows.

#ifndef SPECOPS_MATMUL_GROUPS_H
#define SPECOPS_MATMUL_GROUPS_H

INLINE void tile(const Planes planes, const int count, const Piece *piece, Bytes table,
                 const uint8_t *weights, int64_t first, const float *bias, float *y, int columns) {
    const Activations *x = piece->x;
    const Form *form = &piece->segment->form;
    const int halves = planes.twos ? 2 : 1, scales = form->scales, lowered = planes.low == 8 ? LOWERED : 0;
    const int64_t units = x->block / UNIT;
    const float *s = x->scales + first * x->blocks;
    const Term *terms = x->terms[piece->segment->terms].at + first * x->blocks * halves;
    Cursor at = {weights, weights + distance_of(count), x->codes + first * x->pitch};
    Floats totals[MOST];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    for (int64_t done = 0; done < x->blocks; done += GROUP_BLOCKS) {
        const Header header = header_at(form, at.weights, group_blocks(x->blocks, done));
        at.weights += header.lines * LINE;
        int64_t due = 0;  // lines of the header, times the group's blocks
        Floats parts[MOST], less[MOST];
        for (int row = 0; halves == 2 && row < count; row++) parts[row] = less[row] = (Floats){0};
        for (int64_t b = 0; b < header.blocks; b++, s += count, terms += halves * count) {
            Ints dots[2 * MOST];
            for (due += header.lines; due >= header.blocks; due -= header.blocks) prefetch_lines(&at, 1);
            multiply_block(planes, count, table, halves == 2 ? 1 : units, &at, terms, dots);
            if (halves == 2) add_sixteens(planes.kind, count, &header, b, dots, s, terms, parts, less);
            else add_block(planes.kind, lowered, count, scales, &header, b, dots, s, terms, totals);
        }
        if (halves == 2) add_group(planes.kind, count, &header, parts, less, totals);
    }
    put_rows(piece->stride, count, totals, bias, y, columns);
}

#define ROWS_OF(COUNT)                                                                    \
    case COUNT:                                                                           \
        if (COUNT <= MOST)                                                                \
            tile(planes, COUNT <= MOST ? COUNT : 1, p, table, weights, first, bias, y, columns); \
        break;

INLINE void piece_of(const Planes planes, const Piece *p) {
    const Form *form = &p->segment->form;
    const Bytes table = planes.table ? table_of(form->table, LOWERED ? lowered_by(*form) : 0) : (Bytes){0};
    for (int64_t t = 0; t < p->tiles; t++) {
        const uint8_t *weights = p->weights + t * p->segment->size;
        const float *bias = p->bias ? p->bias + t * TILE : NULL;
        const int columns = p->columns - t * TILE < TILE ? (int)(p->columns - t * TILE) : TILE;
        for (int64_t row = 0; row < p->rows; row += p->x->width) {
            const int64_t first = p->first + row, left = p->rows - row;
            float *y = p->y + row * p->stride + t * TILE;
            switch (left < p->x->width ? left : p->x->width) {
                ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5)
                ROWS_OF(6) ROWS_OF(7) ROWS_OF(8) ROWS_OF(9) ROWS_OF(10)
            }
        }
    }
}

#define PIECE(LOW, TWOS, ONES, TABLE, KIND)                                               \
    static __attribute__((noinline)) void piece_##LOW##TWOS##ONES##TABLE##_##KIND(const Piece *p) { \
        piece_of((Planes){LOW, TWOS, ONES, TABLE, KIND}, p);                              \
    }
EACH_PLANES(PIECE)

#define CASE(LOW, TWOS, ONES, TABLE, KIND)                                                \
    case PLANES_KEY(LOW, TWOS, ONES, TABLE, KIND): piece_##LOW##TWOS##ONES##TABLE##_##KIND(p); break;

static void piece(const Piece *p) {
    switch (planes_key(&p->segment->form, p->x->terms[p->segment->terms].kind)) { EACH_PLANES(CASE) }
}

#endif
