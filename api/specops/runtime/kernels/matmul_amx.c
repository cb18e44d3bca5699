// Kernel for passes of many rows on processors with AMX, whose instruction multiplies matrices of 8
// bits: 16 rows by 16 columns by 64 of K. AVX512-VNNI computes passes of fewer rows. A line of weights
// with 8 bits is a row of such a matrix; codes of 4 bits are unpacked once for all rows of a group.
//
// With EMULATED, for tests, plain C replaces the instructions, since few processors have them.

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

typedef uint8_t Line __attribute__((vector_size(LINE)));
typedef uint8_t LineAt __attribute__((vector_size(LINE), aligned(1), may_alias));

static void tile(const Shape *shape, const uint8_t *weights, const uint8_t *end,
                 const Activations *x, int64_t first, int count, const float *bias, float *y,
                 int columns) {
    const int64_t blocks = blocks_of(shape), pitch = blocks * shape->block + LINE;
    const int step = shape->block % MOST_STEP ? MOST_STEP / 2 : MOST_STEP;
    Operands at = operands_of(shape, weights, x, first, 1);
    at.codes += first * LINE;
    Floats totals[MOST];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    configure_for(count, step);
    for (int64_t block = 0; block < blocks; block++) {
        zero(0);
        if (count > ROWS) zero(1);
        if (count > 2 * ROWS) zero(2);
        for (int64_t k = 0; k < shape->block; k += step, at.codes += step) {
            const uint8_t *lines = weights;
            Line unpacked[MOST_STEP / 4];
            for (int line = 0; line < step * shape->bits / 32; line++, weights += LINE) {
                prefetch(weights, end);
                if (shape->bits == 8) continue;
                const Line both = *(const LineAt *)weights;
                unpacked[2 * line] = both & 15;
                unpacked[2 * line + 1] = both >> 4;
            }
            fetch(WEIGHTS, shape->bits == 4 ? (const uint8_t *)unpacked : lines, LINE);
            fetch(3, at.codes, pitch);
            add_product(0, 3, WEIGHTS);
            if (count > ROWS) {
                fetch(4, at.codes + ROWS * pitch, pitch);
                add_product(1, 4, WEIGHTS);
            }
            if (count > 2 * ROWS) {
                fetch(5, at.codes + 2 * ROWS * pitch, pitch);
                add_product(2, 5, WEIGHTS);
            }
        }
        Ints dots[PARTS * ROWS];
        put(0, dots, LINE);
        if (count > ROWS) put(1, dots + ROWS, LINE);
        if (count > 2 * ROWS) put(2, dots + 2 * ROWS, LINE);
        weights = add_block(shape, count, block, dots, weights, &at, totals);
    }
    release();
    put_rows(shape, count, totals, bias, y, columns);
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

const MatmulKernel MATMUL = {MOST, ROWS, 1, {1, 1}, activate_row, quantize_row, piece, &NARROW};
