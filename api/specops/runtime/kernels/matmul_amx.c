// Kernel for passes of many rows on processors with AMX, whose instruction multiplies matrices of 8
// bits: 16 rows by 16 columns by 64 of K. AVX512-VNNI computes passes of fewer rows. A line of weights
// with 8 bits is a row of such a matrix; codes of 4 bits are unpacked once for all rows of a group.
//
// With EMULATED, for tests, plain C replaces the instructions, since few processors have them.

#define REGISTER 64
#include "matmul_kernel.h"

// A matrix has 16 ROWS at most; a group of rows takes up to PARTS matrices.
enum { ROWS = 16, PARTS = 3, MOST = 33, MOST_STEP = 64 };
enum { FIRST_PALETTE = 1, MATRICES = 8 };  // 0 to 2 are sums, 3 to 5 activations, and 6
#define WEIGHTS 6

// The processor's configuration: rows of each matrix, and bytes of a row.
typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

#if defined(EMULATED)
static _Thread_local Config config;
static _Thread_local uint8_t matrices[MATRICES][ROWS][LINE];

static void configure(const Config *given) {
    config = *given;
    memset(matrices, 0, sizeof matrices);
}
static void release(void) { config = (Config){0}; }
static void zero(int out) { memset(matrices[out], 0, sizeof *matrices); }
static void fetch(int out, const void *from, int64_t stride) {
    for (int row = 0; row < config.rows[out]; row++)
        memcpy(matrices[out][row], (const char *)from + row * stride, config.bytes[out]);
}
static void put(int of, void *to, int64_t stride) {
    for (int row = 0; row < config.rows[of]; row++)
        memcpy((char *)to + row * stride, matrices[of][row], config.bytes[of]);
}
// The numbers of `a` are signed, those of `b` are not.
static void add_product(int out, int a, int b) {
    for (int row = 0; row < config.rows[out]; row++)
        for (int k = 0; k < config.bytes[a] / 4; k++)
            for (int column = 0; column < config.bytes[out] / 4; column++) {
                int32_t sum;
                memcpy(&sum, matrices[out][row] + 4 * column, 4);
                for (int i = 0; i < 4; i++)
                    sum += (int8_t)matrices[a][row][4 * k + i] * matrices[b][k][4 * column + i];
                memcpy(matrices[out][row] + 4 * column, &sum, 4);
            }
}
#define NARROW MATMUL_PLAIN
#else
#define configure _tile_loadconfig
#define release _tile_release
#define zero _tile_zero
#define fetch _tile_loadd
#define put _tile_stored
#define add_product _tile_dpbsud
#define NARROW MATMUL_VNNI512
#endif

static void configure_for(int count, int step) {
    Config needed = {.palette = FIRST_PALETTE};
    for (int part = 0; part * ROWS < count; part++) {
        const int rows = count - part * ROWS;
        needed.rows[part] = needed.rows[PARTS + part] = (uint8_t)(rows < ROWS ? rows : ROWS);
        needed.bytes[part] = LINE;
        needed.bytes[PARTS + part] = (uint16_t)step;
    }
    needed.rows[WEIGHTS] = (uint8_t)(step / 4);
    needed.bytes[WEIGHTS] = LINE;
    configure(&needed);
}

// Unpacks the codes of a block of any type to lines of 8 bits.
static void unpack_block(const Form *form, Bytes table, const uint8_t *codes, int64_t units, uint8_t *lines) {
#define UNPACK(LOW, TWOS, ONES, TABLE)                                                    \
    case PLANES_KEY(LOW, TWOS, ONES, TABLE): {                                            \
        const Planes planes = {LOW, TWOS, ONES, TABLE};                                   \
        for (int64_t i = 0; i < units; i++)                                               \
            unpack_unit(planes, table, codes + i * unit_bytes(planes), lines + i * (UNIT / 4 * LINE)); \
        break;                                                                            \
    }
    switch (planes_key(form)) { EACH_PLANES(UNPACK) }
}

static void tile(const Piece *p, Bytes table, const uint8_t *weights, int64_t first, int count,
                 const float *bias, float *y, int columns) {
    const Activations *x = p->x;
    const Form *form = &p->segment->form;
    const Terms *given = x->terms + p->segment->terms;
    const Planes any = {4, 0, 0, 0};  // as far as scales are concerned
    const int halves = given->halves, scales = form->scales;
    const int64_t depth = x->block / halves, size = code_bytes(*form, x->block);
    const int step = halves == 2 ? UNIT / 2 : depth % MOST_STEP ? MOST_STEP / 2 : MOST_STEP;
    const int8_t *codes = x->codes + first * x->pitch;
    const float *s = x->scales + first * x->blocks;
    const Term *terms = given->at + first * x->blocks * halves;
    Floats totals[MOST];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    configure_for(count, step);
    for (int64_t left = x->blocks; left > 0; left -= GROUP_BLOCKS) {
        const Header header = header_at(form, weights, left < GROUP_BLOCKS ? left : GROUP_BLOCKS);
        weights += header.lines * LINE;
        Floats parts[MOST] = {{0}}, less[MOST] = {{0}};
        for (int64_t b = 0; b < header.blocks; b++, weights += size) {
            uint8_t lines[MOST_BLOCK / 4 * LINE];
            Ints dots[2 * MOST];
            prefetch_header(&header, b, p->end);
            for (int64_t line = 0; line < size; line += LINE) prefetch(weights + line, p->end);
            unpack_block(form, table, weights, x->block / UNIT, lines);
            const uint8_t *from = lines;
            for (int half = 0; half < halves; half++) {
                zero(0);
                if (count > ROWS) zero(1);
                if (count > 2 * ROWS) zero(2);
                for (int64_t k = 0; k < depth; k += step, codes += step, from += step / 4 * LINE) {
                    fetch(WEIGHTS, from, LINE);
                    fetch(3, codes, x->pitch);
                    add_product(0, 3, WEIGHTS);
                    if (count > ROWS) {
                        fetch(4, codes + ROWS * x->pitch, x->pitch);
                        add_product(1, 4, WEIGHTS);
                    }
                    if (count > 2 * ROWS) {
                        fetch(5, codes + 2 * ROWS * x->pitch, x->pitch);
                        add_product(2, 5, WEIGHTS);
                    }
                }
                put(0, dots + half * count, LINE);
                if (count > ROWS) put(1, dots + half * count + ROWS, LINE);
                if (count > 2 * ROWS) put(2, dots + half * count + 2 * ROWS, LINE);
            }
            for (int i = 0; given->kind == STARTS && i < halves * count; i++) dots[i] += terms[i].start;
            if (halves == 2) add_sixteens(count, scales, &header, b, dots, s, terms, parts, less);
            else add_block(any, 0, count, scales, &header, b, dots, s, terms, totals);
            s += count, terms += halves * count;
        }
        if (halves == 2) add_group(count, scales, &header, parts, less, totals);
    }
    release();
    put_rows(p->stride, count, totals, bias, y, columns);
}

static void piece(const Piece *p) {
    const Form *form = &p->segment->form;
    const Bytes table = table_of(form->table, 0);
    for (int64_t t = 0; t < p->tiles; t++)
        for (int64_t row = 0; row < p->rows; row += p->x->width) {
            const int64_t count = p->rows - row, columns = p->columns - t * TILE;
            tile(p, table, p->weights + t * p->segment->size, p->first + row,
                 (int)(count < p->x->width ? count : p->x->width), p->bias ? p->bias + t * TILE : NULL,
                 p->y + row * p->stride + t * TILE, (int)(columns < TILE ? columns : TILE));
        }
}

const MatmulKernel MATMUL = {MOST, ROWS, 1, 1, 0, activate_row, quantize_row, piece, &NARROW};
