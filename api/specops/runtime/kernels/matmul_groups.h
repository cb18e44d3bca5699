// Defines `piece` for a kernel: the loops over tiles, groups of rows and blocks. The kernel includes this
// file after its MOST, BYTES, LOWERED and
//
//   multiply_block(planes, count, table, units, at, starts, dots)
//
// which computes a block's sums of products for `count` rows: `at` points to the block's codes, `units` units
// of 32 of K, and to those of activations, and is moved past them; `starts` [halves][count] are the initial
// sums if terms are STARTS; `dots` [halves][count] gets the sums. Planes and numbers of rows are constants, so
// that the compiler unrolls the loops over rows. A kernel that unpacks weights once for many rows also defines
// ONCE, the minimum number of rows for that, GROUP, PASS, HELD and unpack_unit.

#ifndef SPECOPS_MATMUL_GROUPS_H
#define SPECOPS_MATMUL_GROUPS_H

INLINE void tile(const Planes planes, const int count, const Piece *piece, Bytes table,
                 const uint8_t *weights, int64_t first, const float *bias, float *y, int columns) {
    const Activations *x = piece->x;
    const Form *form = &piece->segment->form;
    const int halves = planes.twos ? 2 : 1;
    const int64_t units = x->block / UNIT;
    const float *s = x->scales + first * x->blocks;
    const Term *terms = x->terms[piece->segment->terms].at + first * x->blocks * halves;
    Cursor at = {weights, weights + distance_of(count), x->codes + first * x->pitch, NULL};
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
            const Factors f = factors_of(planes, form->scales, &header, b);
            if (halves == 2) add_sixteens(planes.kind, count, &f, dots, s, terms, parts, less);
            else add_block(planes.kind, count, &f, dots, s, terms, totals);
        }
        if (halves == 2) add_group(planes.kind, count, &header, parts, less, totals);
    }
    put_rows(piece->stride, count, totals, bias, y, columns);
}

#if defined(ONCE)
// A tile for up to PASS rows in groups of GROUP: the codes of HELD of K are unpacked once for all of them.
// Prompts took 1.1 to 1.25 times as long when each group unpacked separately (AVX2; AMD EPYC, Zen 5).
INLINE void pass(const Planes packed, const Piece *piece, Bytes table, const uint8_t *weights, int64_t first,
                 int64_t rows, const float *bias, float *y, int columns) {
    const Activations *x = piece->x;
    const Form *form = &piece->segment->form;
    const Planes planes = {packed.low, packed.twos, packed.ones, packed.table, packed.kind, 1};
    const int halves = planes.twos ? 2 : 1;
    const int64_t units = halves == 2 ? 1 : x->block / UNIT, groups = rows / GROUP;
    const uint8_t *ahead = weights + distance_of(GROUP);
    _Alignas(LINE) uint8_t lines[2 * HELD * TILE];
    Floats totals[PASS] = {{0}};
    for (int64_t done = 0; done < x->blocks; done += GROUP_BLOCKS) {
        const Header header = header_at(form, weights, group_blocks(x->blocks, done));
        weights += header.lines * LINE;
        int64_t due = 0;  // lines to prefetch, times the groups of rows
        for (int64_t start = 0, some; start < header.blocks; start += some) {
            some = HELD / x->block < header.blocks - start ? HELD / x->block : header.blocks - start;
            Factors factors[GROUP_BLOCKS];
            uint8_t *line = lines;
            for (Factors *f = factors; f < factors + some; f++) {
                *f = factors_of(planes, form->scales, &header, start + (f - factors));
                for (int64_t n = 0; n < units; n++, weights += unit_bytes(packed), line += unit_bytes(planes))
                    unpack_unit(packed, table, weights, line, &f->missing);
            }
            const int64_t behind = (weights + distance_of(GROUP) - ahead) / LINE;
            for (int64_t row = 0; row < rows; row += GROUP) {
                const int64_t from = (first + row) * x->blocks + (done + start) * GROUP;
                const float *s = x->scales + from;
                const Term *terms = x->terms[piece->segment->terms].at + from * halves;
                Cursor at = {lines, NULL, x->codes + from * x->block, NULL};
                Floats parts[GROUP] = {{0}}, less[GROUP] = {{0}};
                for (const Factors *f = factors; f < factors + some; f++, s += GROUP, terms += halves * GROUP) {
                    Ints dots[2 * GROUP];
                    at.missing = &f->missing;
                    if (units == 1) multiply_block(planes, GROUP, table, 1, &at, terms, dots);
                    else multiply_block(planes, GROUP, table, units, &at, terms, dots);
                    if (halves == 2) add_sixteens(planes.kind, GROUP, f, dots, s, terms, parts, less);
                    else add_block(planes.kind, GROUP, f, dots, s, terms, totals + row);
                }
                if (halves == 2) add_group(planes.kind, GROUP, &header, parts, less, totals + row);
                for (due += behind; due >= groups; due -= groups, ahead += LINE) __builtin_prefetch(ahead);
            }
        }
    }
    put_rows(piece->stride, rows, totals, bias, y, columns);
}
#endif

#define ROWS_OF(COUNT)                                                                    \
    case COUNT:                                                                           \
        if (COUNT <= MOST)                                                                \
            tile(planes, COUNT <= MOST ? COUNT : 1, p, table, weights, first, bias, y, columns); \
        break;

INLINE void piece_of(const Planes planes, const Piece *p) {
    const Bytes table = planes.table ? table_of(p->segment->form) : (Bytes){0};
    for (int64_t t = 0; t < p->tiles; t++) {
        const uint8_t *weights = p->weights + t * p->segment->size;
        const float *bias = p->bias ? p->bias + t * TILE : NULL;
        const int columns = p->columns - t * TILE < TILE ? (int)(p->columns - t * TILE) : TILE;
        int64_t row = 0;
#if defined(ONCE)
        for (int64_t rows; p->x->rows >= ONCE && (rows = p->rows - row) >= GROUP; row += rows) {
            rows = rows < PASS ? rows / GROUP * GROUP : PASS;
            pass(planes, p, table, weights, p->first + row, rows, bias,
                 p->y + row * p->stride + t * TILE, columns);
        }
#endif
        for (; row < p->rows; row += p->x->width) {
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
        piece_of((Planes){LOW, TWOS, ONES, TABLE, KIND, 0}, p);                              \
    }
EACH_PLANES(PIECE)

#define CASE(LOW, TWOS, ONES, TABLE, KIND)                                                \
    case PLANES_KEY(LOW, TWOS, ONES, TABLE, KIND): piece_##LOW##TWOS##ONES##TABLE##_##KIND(p); break;

static void piece(const Piece *p) {
    switch (planes_key(&p->segment->form, p->x->terms[p->segment->terms].kind)) { EACH_PLANES(CASE) }
}

#endif
