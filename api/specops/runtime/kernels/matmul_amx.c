// Kernel for passes of many rows on processors with AMX, whose instruction multiplies matrices of 8
// bits: 16 rows by 16 columns by up to 64 of K. AVX512-VNNI computes passes of fewer rows.
//
// Two tiles of weights are computed at a time, for two matrices of rows: four matrices are read for four
// products. A span of K of both tiles is unpacked once for all rows of a panel, into lines of signed
// numbers that stay in the first cache; a line of 8 bits is a row of a matrix. Each block has scales of
// its own, for columns as for rows, so a matrix of sums cannot hold more than a block: its sums are added
// to the totals while the unit multiplies the next block.
//
// With EMULATED, for tests, plain C replaces the instructions, since few processors have them.

#define REGISTER 64  // a line
#include "matmul_kernel.h"

#define UNPACK(LOW, TWOS, ONES, TABLE, KIND)                                              \
    case PLANES_KEY(LOW, TWOS, ONES, TABLE, KIND):                                        \
        unpack_unit((Planes){LOW, TWOS, ONES, TABLE, KIND}, work->table, unit, (uint8_t *)lines); \
        break;

// A matrix has ROWS rows, and a group of rows takes two. The totals of PANEL rows stay in the first cache.
enum { ROWS = 16, MOST = 2 * ROWS, PANEL = 4 * MOST, SPAN = MOST_BLOCK, MOST_STEP = 64 };
enum { LOWERED = 128 };  // what codes of 8 bits are less by, as signed numbers
enum { FIRST_PALETTE = 1, MATRICES = 8 };
// Matrices 0 to 3 are sums: of the first tile and the other one with the first rows, then with the others.
#define ACTIVATIONS 4
#define OTHER_ACTIVATIONS 5
#define WEIGHTS 6
#define OTHER_WEIGHTS 7

// The processor's configuration: rows of each matrix, and bytes of a row.
typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

#if defined(EMULATED)
static _Thread_local Config config;
static _Thread_local uint8_t matrices[MATRICES][ROWS][LINE];
// How often each was done, for tests: configurations, matrices read, products, and lines unpacked.
int64_t amx_configured, amx_fetched, amx_multiplied, amx_unpacked;
#define COUNT_ONE(WHAT) __atomic_fetch_add(&(WHAT), 1, __ATOMIC_RELAXED)

static void configure(const Config *given) {
    COUNT_ONE(amx_configured);
    config = *given;
    memset(matrices, 0, sizeof matrices);
}
static void release(void) { config = (Config){0}; }
static void zero(int out) { memset(matrices[out], 0, sizeof *matrices); }
static void fetch(int out, const void *from, int64_t stride) {
    COUNT_ONE(amx_fetched);
    for (int row = 0; row < config.rows[out]; row++)
        memcpy(matrices[out][row], (const char *)from + row * stride, config.bytes[out]);
}
static void put(int of, void *to, int64_t stride) {
    for (int row = 0; row < config.rows[of]; row++)
        memcpy((char *)to + row * stride, matrices[of][row], config.bytes[of]);
}
static void add_product(int out, int a, int b) {
    COUNT_ONE(amx_multiplied);
    for (int row = 0; row < config.rows[out]; row++)
        for (int k = 0; k < config.bytes[a] / 4; k++)
            for (int column = 0; column < config.bytes[out] / 4; column++) {
                int32_t sum;
                memcpy(&sum, matrices[out][row] + 4 * column, 4);
                for (int i = 0; i < 4; i++)
                    sum += (int8_t)matrices[a][row][4 * k + i] * (int8_t)matrices[b][k][4 * column + i];
                memcpy(matrices[out][row] + 4 * column, &sum, 4);
            }
}
#define NARROW MATMUL_PLAIN
#else
#define COUNT_ONE(WHAT) ((void)0)
#define configure _tile_loadconfig
#define release _tile_release
#define zero _tile_zero
#define fetch _tile_loadd
#define put _tile_stored
#define add_product _tile_dpbssd
#define NARROW MATMUL_VNNI512
#endif

static void configure_for(int step) {
    Config needed = {.palette = FIRST_PALETTE};
    for (int matrix = 0; matrix < MATRICES; matrix++)
        needed.rows[matrix] = ROWS, needed.bytes[matrix] = LINE;
    needed.bytes[ACTIVATIONS] = needed.bytes[OTHER_ACTIVATIONS] = (uint16_t)step;
    needed.rows[WEIGHTS] = needed.rows[OTHER_WEIGHTS] = (uint8_t)(step / 4);
    configure(&needed);
}

// A tile of weights while it is computed.
typedef struct {
    const uint8_t *weights;  // the next codes
    Header header;           // of their group
    Bytes lines[SPAN / 4];   // a span's codes as signed numbers
    Floats totals[PANEL], parts[MOST], less[MOST];
    Ints dots[2 * MOST + ROWS];
} Strip;

// A block whose sums are in `dots`, but not in the totals.
typedef struct {
    int count;           // rows of the group of rows; 0: no block waits
    int64_t row, block;  // the first of these rows in the panel; the block in its group of blocks
    const float *s;
    const Term *terms;
} Waiting;

// How a piece is computed, and where it stands.
typedef struct {
    const Piece *piece;
    Planes planes;
    int key;   // of the planes
    int kind;  // of the terms that blocks add
    Bytes table;
    int scales;  // form of the scales; without zero points, where unpacked codes are less by them
    int middle;  // what unpacked codes are less by, where there are no zero points
    int halves;  // sums of a block
    int step;    // K of a matrix
    int tiles;
    Strip *strips;  // of these tiles
    Waiting waiting;
} Work;

// Unpacks the next block, number `b` of its group.
static void unpack(const Work *work, Strip *strip, int64_t b, Bytes *lines) {
    const Planes planes = work->planes;
    const int form = work->piece->segment->form.scales;
    Bytes less = (Bytes){0} + (uint8_t)work->middle;
    if (form != work->scales) {  // a column's zero point, for each of four numbers
        const int64_t before = (form == HALF_ZERO ? 32 : 64) * strip->header.blocks;
        const PointsAt points = *(const PointsAt *)(strip->header.at + before + 16 * b);
        less = (Bytes)(__builtin_convertvector(points, Words) * 0x01010101u);
    }
    for (int64_t k = 0; k < work->piece->x->block; k += UNIT, lines += UNIT / 4) {
        const uint8_t *unit = strip->weights;
        strip->weights += unit_bytes(planes);
        for (const uint8_t *line = unit; line < strip->weights; line += LINE)
            prefetch(line);
        switch (work->key) { EACH_PLANES(UNPACK) }
        for (int line = 0; line < UNIT / 4; line++) lines[line] -= less;
        COUNT_ONE(amx_unpacked);
    }
}

// Adds the block that waits.
static void add_waiting(Work *work) {
    const Waiting *w = &work->waiting;
    if (!w->count) return;
    for (Strip *s = work->strips; s < work->strips + work->tiles; s++) {
        const Header *header = &s->header;
        Floats *totals = s->totals + w->row;
        if (work->halves == 1) {
            add_block(work->kind, LOWERED, w->count, work->scales, header, w->block, s->dots, w->s,
                      w->terms, totals);
            continue;
        }
        if (!w->block)
            for (int row = 0; row < w->count; row++) s->parts[row] = s->less[row] = (Floats){0};
        add_sixteens(work->kind, w->count, header, w->block, s->dots, w->s, w->terms, s->parts, s->less);
        if (w->block == header->blocks - 1)
            add_group(work->kind, w->count, header, s->parts, s->less, totals);
    }
    work->waiting.count = 0;
}

// Multiplies `size` of K, from line `line` on, and then adds the block that waits: the unit works while the
// processor adds. Sums of the first rows go to dots[at].
static void multiply_span(Work *work, int count, const int8_t *codes, int64_t line, int64_t size, int at) {
    Strip *one = work->strips, *other = one + 1;
    const int64_t pitch = work->piece->x->pitch, below = ROWS * pitch;
    const int wide = work->tiles > 1, high = count > ROWS;
    zero(0);
    zero(1);
    zero(2);
    zero(3);
    for (int64_t k = 0; k < size; k += work->step, codes += work->step, line += work->step / 4) {
        fetch(WEIGHTS, one->lines + line, LINE);
        fetch(ACTIVATIONS, codes, pitch);
        add_product(0, ACTIVATIONS, WEIGHTS);
        if (wide) {
            fetch(OTHER_WEIGHTS, other->lines + line, LINE);
            add_product(1, ACTIVATIONS, OTHER_WEIGHTS);
        }
        if (high) {
            fetch(OTHER_ACTIVATIONS, codes + below, pitch);
            add_product(2, OTHER_ACTIVATIONS, WEIGHTS);
        }
        if (wide && high) add_product(3, OTHER_ACTIVATIONS, OTHER_WEIGHTS);
    }
    add_waiting(work);
    put(0, one->dots + at, LINE);
    if (wide) put(1, other->dots + at, LINE);
    if (high) put(2, one->dots + at + ROWS, LINE);
    if (wide && high) put(3, other->dots + at + ROWS, LINE);
}

// Multiplies a group of rows by a span of `blocks` blocks, from number `b` of their group on, number
// `first` of all. `row` of the panel; the panel begins at row `top`.
static void group(Work *work, int64_t top, int64_t row, int count, int64_t first, int64_t b, int64_t blocks) {
    const Piece *p = work->piece;
    const Activations *x = p->x;
    const int halves = work->halves;
    const int64_t size = x->block / halves, begin = (top + row) * x->blocks;
    const int8_t *codes = x->codes + (top + row) * x->pitch + first * x->block;
    for (int64_t i = 0; i < blocks; i++) {
        for (int half = 0; half < halves; half++, codes += size)
            multiply_span(work, count, codes, (i * halves + half) * size / 4, size, half * count);
        const int64_t place = begin + (first + i) * count;
        const Term *terms = x->terms[p->segment->terms].at + place * halves;
        work->waiting = (Waiting){count, row, b + i, x->scales + place, terms};
    }
}

// Computes one or two tiles for up to PANEL rows.
static void panel(Work *work, int64_t tile, int64_t top, int64_t rows) {
    const Piece *p = work->piece;
    const Segment *segment = p->segment;
    const int64_t width = p->x->width, span = SPAN / p->x->block;
    Strip *const behind = work->strips + work->tiles;
    for (Strip *s = work->strips; s < behind; s++) {
        s->weights = p->weights + (tile + (s - work->strips)) * segment->size;
        for (int64_t row = 0; row < rows; row++) s->totals[row] = (Floats){0};
    }
    for (int64_t first = 0; first < p->x->blocks; first += GROUP_BLOCKS) {
        const int64_t blocks = group_blocks(p->x->blocks, first);
        for (Strip *s = work->strips; s < behind; s++) {
            s->header = header_at(&segment->form, s->weights, blocks);
            s->weights += s->header.lines * LINE;
        }
        for (int64_t b = 0; b < blocks; b += span) {
            const int64_t count = blocks - b < span ? blocks - b : span;
            for (Strip *s = work->strips; s < behind; s++)
                for (int64_t i = 0; i < count; i++)
                    unpack(work, s, b + i, s->lines + i * p->x->block / 4);
            for (int64_t row = 0; row < rows; row += width)
                group(work, p->first + top, row, (int)(rows - row < width ? rows - row : width),
                      first + b, b, count);
        }
        add_waiting(work);
    }
    for (Strip *s = work->strips; s < behind; s++, tile++) {
        const int64_t columns = p->columns - tile * TILE;
        put_rows(p->stride, (int)rows, s->totals, p->bias ? p->bias + tile * TILE : NULL,
                 p->y + top * p->stride + tile * TILE, (int)(columns < TILE ? columns : TILE));
    }
}

static void piece(const Piece *p) {
    const Form *f = &p->segment->form;
    const int halves = halves_of(*f), kind = p->x->terms[p->segment->terms].kind;
    const int64_t size = p->x->block / halves, most = PANEL / p->x->width * p->x->width;
    Strip strips[2];
    Work work = {.piece = p, .planes = {f->low, f->twos, f->ones, f->table != NO_TABLE, kind}, .key = planes_key(f, kind),
                 .kind = kind,
                 .table = table_of(f->table, f->middle), .scales = f->scales, .halves = halves,
                 .middle = f->low == 8 ? LOWERED : f->table ? 0 : f->middle, .strips = strips,
                 .step = (int)(size % MOST_STEP == 0 ? MOST_STEP : size < UNIT ? size : UNIT)};
    if (f->low == 4 && kind == SUMS) {  // zero points
        work.scales = f->scales == HALF_ZERO ? HALF : FLOAT;
        work.kind = STARTS;
    }
    configure_for(work.step);
    for (int64_t tile = 0; tile < p->tiles; tile += work.tiles) {
        work.tiles = p->tiles - tile < 2 ? 1 : 2;
        for (int64_t top = 0; top < p->rows; top += most)
            panel(&work, tile, top, p->rows - top < most ? p->rows - top : most);
    }
    release();
}

const MatmulKernel MATMUL = {MOST, ROWS, 2, 1, 1, 1, activate_row, quantize_row, piece, &NARROW};
