// Defines `piece`, which calls a kernel's `group` with a constant number of rows, so that the compiler
// unrolls the loops over them. A kernel includes this file behind its `group` and MOST.

#ifndef SPECOPS_MATMUL_GROUPS_H
#define SPECOPS_MATMUL_GROUPS_H

#define GROUP(COUNT)                                                                      \
    case COUNT:                                                                           \
        if (COUNT > MOST) break;                                                          \
        if (shape->bits == 4)                                                             \
            group(4, COUNT, shape, weights, end, x, first, bias, y, columns);             \
        else group(8, COUNT, shape, weights, end, x, first, bias, y, columns);            \
        break;

static void tile(const Shape *shape, const uint8_t *weights, const uint8_t *end,
                 const Activations *x, int64_t first, int count, const float *bias, float *y,
                 int columns) {
    switch (count) {
        GROUP(1) GROUP(2) GROUP(3) GROUP(4) GROUP(5) GROUP(6) GROUP(7) GROUP(8) GROUP(9) GROUP(10)
    }
}

static void piece(const Piece *p) {
    for (int64_t t = 0; t < p->tiles; t++)
        for (int64_t row = 0; row < p->rows; row += p->width) {
            const int64_t count = p->rows - row, columns = p->columns - t * TILE;
            tile(p->shape, p->weights + t * tile_bytes(p->shape), p->end, p->x, p->first + row,
                 (int)(count < p->width ? count : p->width), p->bias ? p->bias + t * TILE : NULL,
                 p->y + row * p->shape->columns + t * TILE, (int)(columns < TILE ? columns : TILE));
        }
}

#endif
