// The layout of weights in memory: tiles of 16 columns, one scheme for every type of weights.
//
// A matrix [N, K] is divided along K into blocks of `block` weights: 32 for GGUF types, 32 to 256 for our
// own. Tiles have 16 columns and follow each other. A tile consists of groups of 8 blocks, the last group
// of the rest; a group is a header with its blocks' scales, then the codes of its blocks. All parts start
// at a multiple of 64 bytes (LINE). Columns and K beyond the matrix are zeros.
//
// Codes: for each block its planes, one after the other, each for 32 weights at a time:
//   FOURS  low 4 bits    4 lines for 32 of K: byte 4 c + i of line l has k = 8 l + i of column c in its low
//                        half and k + 4 in its high half
//   EIGHTS 8 bits        8 lines: byte 4 c + i of line l has k = 4 l + i
//   TWOS   2 bits        2 lines: bits 2 j, 2 j + 1 of byte 4 c + i of line h are for k = 16 h + 4 j + i
//   ONES   1 bit         1 line: bit j of byte 4 c + i is for k = 4 j + i
// A code is the planes' bits, the first plane's lowest: FOURS and TWOS give 6 bits, TWOS and ONES 3.
// Only our own types have blocks of more than 32; they have a single plane.
//
// Header of a group of n blocks, filled up to whole lines:
//   HALF         16 float16 a block
//   HALF_ZERO    16 float16 a block; then 16 uint8 a block, the zero points, which are codes
//   HALF_PAIR    16 float16 scales and 16 float16 offsets a block
//   FLOAT        16 float32 a block
//   FLOAT_ZERO   16 float32 a block; then 16 uint8 a block, the zero points, which are codes
//   EXPONENT     16 uint8 a block: 2^(e - 128), as in ggml for doubled codes
//   BYTE         16 float16 d; 16 int8 scales a block
//   SIX_PAIR     16 float16 d, 16 float16 dmin; 16 uint8 scales a block; then 16 uint8 minima a block
//   SIXTEEN      16 float16 d, 32 bytes of zeros; 2 x 16 int8 scales a block, for its first and last 16 of K
//   SIXTEEN_PAIR 16 float16 d, 16 float16 dmin; 2 x 16 uint8 a block: the scale in the low half, the
//                minimum in the high one, for its first and last 16 of K
//
// A block adds to a row's total, where s is the scale of the row's activations of the block, `sum` the sum
// of their codes, and `dot` the sum of their codes times (code - middle), both integers that float32
// holds; each step is rounded to float32:
//   HALF, FLOAT, EXPONENT, BYTE   total = dot * (f * s) + total
//   HALF_ZERO, FLOAT_ZERO         the same; the zero point stands in place of the middle
//   HALF_PAIR                     total = (dot * (f * s) + o * y) + total, with y = s * sum
//   SIX_PAIR                      total = (dot * (f * s) - o * y) + total
//   SIXTEEN                       part = (dot0 * scale0 + dot1 * scale1) * s + part; the integer sum is exact
//   SIXTEEN_PAIR                  the same, and less = (sum0 * minimum0 + sum1 * minimum1) * s + less
// f is the scale: the float16 or float32, or d times the block's scale, which float32 holds exactly; o
// likewise. After a group of SIXTEEN total = part * d + total; of SIXTEEN_PAIR total = (part * d - less *
// dmin) + total; the next group's part and less start at 0.

#ifndef SPECOPS_TILES_H
#define SPECOPS_TILES_H

#include <stddef.h>
#include <stdint.h>

enum { TILE = 16, LINE = 64, GROUP_BLOCKS = 8, UNIT = 32, MAX_BLOCK = 256, MAX_SIDE = 1 << 24 };
enum { MAX_GROUP = GROUP_BLOCKS * (UNIT + 4) * TILE };  // bytes of a group of a type of GGUF

// Types of weights; GGUF types have their GGUF numbers. Q4_0 is INT4 and Q8_0 is INT8 in blocks of 32.
enum {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39,
    INT4 = 256, INT8, INT4_ZERO, INT8_ZERO,             // scales are float16
    INT4_FLOAT, INT8_FLOAT, INT4_ZERO_FLOAT, INT8_ZERO_FLOAT  // scales are float32
};
enum { HALF, HALF_ZERO, HALF_PAIR, FLOAT, FLOAT_ZERO, EXPONENT, BYTE, SIX_PAIR, SIXTEEN, SIXTEEN_PAIR };
enum { NO_TABLE, IQ4, E2M1 };

typedef struct {
    int low, twos, ones;  // planes: bits of the first (4, 8, or 0), then 2 or 0, then 1 or 0
    int table;            // the table of codes' values
    int middle;           // the kernels subtract it; with a table, it has been added to the table
    int scales;
    int super;            // weights of a block in the file: 32, or 256; 0: not a type of GGUF
    int bytes;            // and its bytes
} Form;

// Numbers of the tables, plus the middle.
#define IQ4_VALUES 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241
#define E2M1_VALUES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

static inline const uint8_t *numbers_of_table(int table) {
    static const uint8_t NUMBERS[][16] = {{0}, {IQ4_VALUES}, {E2M1_VALUES}};
    return NUMBERS[table];
}

// A type that does not exist has no planes.
static inline Form form_of(const int type) {
    switch (type) {
        case Q4_0: return (Form){4, 0, 0, NO_TABLE, 8, HALF, 32, 18};
        case Q4_1: return (Form){4, 0, 0, NO_TABLE, 0, HALF_PAIR, 32, 20};
        case Q5_0: return (Form){4, 0, 1, NO_TABLE, 16, HALF, 32, 22};
        case Q5_1: return (Form){4, 0, 1, NO_TABLE, 0, HALF_PAIR, 32, 24};
        case Q8_0: return (Form){8, 0, 0, NO_TABLE, 128, HALF, 32, 34};
        case Q2_K: return (Form){0, 2, 0, NO_TABLE, 0, SIXTEEN_PAIR, 256, 84};
        case Q3_K: return (Form){0, 2, 1, NO_TABLE, 4, SIXTEEN, 256, 110};
        case Q4_K: return (Form){4, 0, 0, NO_TABLE, 0, SIX_PAIR, 256, 144};
        case Q5_K: return (Form){4, 0, 1, NO_TABLE, 0, SIX_PAIR, 256, 176};
        case Q6_K: return (Form){4, 2, 0, NO_TABLE, 32, SIXTEEN, 256, 210};
        case IQ4_NL: return (Form){4, 0, 0, IQ4, 128, HALF, 32, 18};
        case IQ4_XS: return (Form){4, 0, 0, IQ4, 128, BYTE, 256, 136};
        case MXFP4: return (Form){4, 0, 0, E2M1, 12, EXPONENT, 32, 17};
        case INT4: return (Form){4, 0, 0, NO_TABLE, 8, HALF, 0, 0};
        case INT8: return (Form){8, 0, 0, NO_TABLE, 128, HALF, 0, 0};
        case INT4_ZERO: return (Form){4, 0, 0, NO_TABLE, 0, HALF_ZERO, 0, 0};
        case INT8_ZERO: return (Form){8, 0, 0, NO_TABLE, 0, HALF_ZERO, 0, 0};
        case INT4_FLOAT: return (Form){4, 0, 0, NO_TABLE, 8, FLOAT, 0, 0};
        case INT8_FLOAT: return (Form){8, 0, 0, NO_TABLE, 128, FLOAT, 0, 0};
        case INT4_ZERO_FLOAT: return (Form){4, 0, 0, NO_TABLE, 0, FLOAT_ZERO, 0, 0};
        case INT8_ZERO_FLOAT: return (Form){8, 0, 0, NO_TABLE, 0, FLOAT_ZERO, 0, 0};
        default: return (Form){0};
    }
}

static inline int bits_of(const Form f) { return f.low + f.twos + f.ones; }

// Fills in the form of a matrix [columns, depth] of weights. Returns an error message, or NULL.
static inline const char *describe_matrix(int64_t type, int64_t columns, int64_t depth, int64_t block,
                                          Form *form) {
    *form = form_of(type < 0 || type > INT8_ZERO_FLOAT ? -1 : (int)type);
    if (!bits_of(*form)) return "there is no such type of weights";
    if (columns < 1 || columns > MAX_SIDE || depth < 1 || depth > MAX_SIDE)
        return "N and K of weights are 1 to 16777216";
    if (block < UNIT || block % UNIT || block > MAX_BLOCK) return "blocks are multiples of 32, up to 256";
    return form->super && block != UNIT ? "GGUF's types have blocks of 32" : NULL;
}

static inline int64_t header_bytes(const Form f, int64_t blocks) {
    int64_t bytes = 0;
    switch (f.scales) {
        case HALF: bytes = blocks * 32; break;
        case HALF_ZERO: bytes = blocks * 48; break;
        case HALF_PAIR: case FLOAT: bytes = blocks * 64; break;
        case FLOAT_ZERO: bytes = blocks * 80; break;
        case EXPONENT: bytes = blocks * 16; break;
        case BYTE: bytes = 32 + blocks * 16; break;
        default: bytes = 64 + blocks * 32;
    }
    return (bytes + LINE - 1) / LINE * LINE;
}

// Bytes of the codes of a block.
static inline int64_t code_bytes(const Form f, int64_t block) {
    return block * bits_of(f) / 8 * TILE;
}

// Blocks of the group that starts with block `first`, and the group's bytes.
static inline int64_t group_blocks(int64_t blocks, int64_t first) {
    return blocks - first < GROUP_BLOCKS ? blocks - first : GROUP_BLOCKS;
}
static inline int64_t group_bytes(const Form f, int64_t blocks, int64_t block) {
    return header_bytes(f, blocks) + blocks * code_bytes(f, block);
}

// Bytes of a tile of a type, with `blocks` blocks along K.
static inline int64_t bytes_of_tile(const Form f, int64_t blocks, int64_t block) {
    const int64_t whole = blocks / GROUP_BLOCKS, rest = blocks % GROUP_BLOCKS;
    return whole * header_bytes(f, GROUP_BLOCKS) + (rest ? header_bytes(f, rest) : 0) +
           blocks * code_bytes(f, block);
}

// Bytes of a row of K weights in a file; `f` is a type of GGUF.
static inline int64_t bytes_of_row(const Form f, int64_t depth) { return depth / f.super * f.bytes; }

// Writes a row's blocks, in a file's format, into a column of the group of `count` blocks that starts
// with block `first`, a multiple of 8. Returns whether all scales are finite.
int pack_group(int type, const uint8_t *row, int64_t first, int64_t count, int column, uint8_t *group);

// Computes `depth` weights of a column of a group of `count` blocks.
void unpack_group(Form f, int64_t block, const uint8_t *group, int64_t count, int column,
                  int64_t depth, float *out);

#endif
