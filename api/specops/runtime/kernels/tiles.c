// Writes weights into tiles, for the module that prepares graphs, and reads rows of tiles back;
// `tiles.h` describes tiles. The layouts of GGUF's blocks follow ggml's `ggml-common.h`.
//
// Between file and tile, the codes of 32 weights, a unit, are in words: a byte each, four in a word, the
// first in the lowest byte. A plane of a tile takes some bits of each.

#include "tiles.h"

#include <string.h>

enum { WORDS = UNIT / 4 };
enum { MAX_EXPONENT = 252 };  // 12 * 2^(252 - 128) is finite, the next one is not

// Weights in the format of MatMulNBits: codes [N, blocks, block * bits / 8]; scales [N, blocks], float16 or
// float32 by type; zero points [N, blocks], two per byte if they have 4 bits.
typedef struct {
    const uint8_t *codes, *scales, *zero_points;
    int64_t blocks, block;
} Codes;

static inline uint32_t packed_word(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static inline uint32_t in_each_byte(uint32_t bits) { return bits * 0x01010101u; }

// -- the file's codes ------------------------------------------------------------------------------

// Adds to `count` words the bits `mask` of as many words, moved from bit `from` of each byte to bit `to`.
static inline void take(uint32_t *words, int count, const uint8_t *packed, int from, uint32_t mask, int to) {
    for (int i = 0; i < count; i++)
        words[i] |= (packed_word(packed + 4 * i) >> from & in_each_byte(mask)) << to;
}

// Codes of 4 bits in 16 bytes: all low halves, then all high ones.
static inline void take_halves(uint32_t *words, const uint8_t *packed) {
    take(words, WORDS / 2, packed, 0, 15, 0);
    take(words + WORDS / 2, WORDS / 2, packed, 4, 15, 0);
}

// The fifth bits of 32 codes, the first code's lowest. The product puts four bits into four bytes.
static inline void take_fifths(uint32_t *words, const uint8_t *packed) {
    for (int i = 0; i < WORDS; i++)
        words[i] |= ((packed_word(packed) >> 4 * i & 15) * 0x00204081u & in_each_byte(1)) << 4;
}

// A unit's codes: the block at `at`, or unit `unit` of the block of 256 there.
static void read_unit(int type, const uint8_t *at, int unit, uint32_t *words) {
    memset(words, 0, WORDS * sizeof *words);
    switch (type) {
        case Q4_0: case IQ4_NL: take_halves(words, at + 2); break;
        case Q4_1: take_halves(words, at + 4); break;
        case Q5_0: take_halves(words, at + 6), take_fifths(words, at + 2); break;
        case Q5_1: take_halves(words, at + 8), take_fifths(words, at + 4); break;
        case Q8_0:  // signed codes, plus 128
            for (int i = 0; i < WORDS; i++) words[i] = packed_word(at + 2 + 4 * i) ^ in_each_byte(128);
            break;
        case Q2_K: take(words, WORDS, at + 16 + unit / 4 * 32, unit % 4 * 2, 3, 0); break;
        case Q3_K:
            take(words, WORDS, at + 32 + unit / 4 * 32, unit % 4 * 2, 3, 0);
            take(words, WORDS, at, unit, 1, 2);
            break;
        case Q4_K: take(words, WORDS, at + 16 + unit / 2 * 32, unit % 2 * 4, 15, 0); break;
        case Q5_K:
            take(words, WORDS, at + 48 + unit / 2 * 32, unit % 2 * 4, 15, 0);
            take(words, WORDS, at + 16, unit, 1, 4);
            break;
        case Q6_K:
            take(words, WORDS, at + unit / 4 * 64 + unit % 2 * 32, unit % 4 / 2 * 4, 15, 0);
            take(words, WORDS, at + 128 + unit / 4 * 32, unit % 4 * 2, 3, 4);
            break;
        case IQ4_XS: take_halves(words, at + 8 + 16 * unit); break;
        default: take_halves(words, at + 1);  // MXFP4
    }
}

// A unit's codes in the format of MatMulNBits: a byte each, or two of 4 bits per byte, the first one low.
static void read_codes(int bits, const uint8_t *codes, uint32_t *words) {
    if (bits == 8) {
        memcpy(words, codes, UNIT);
        return;
    }
    for (int i = 0; i < WORDS; i++) {
        uint32_t word = codes[2 * i] | (uint32_t)codes[2 * i + 1] << 8;
        word = (word | word << 8) & 0x00ff00ff;
        words[i] = (word | word << 4) & 0x0f0f0f0f;
    }
}

// -- a tile's codes --------------------------------------------------------------------------------

// Writes a plane of `bits` bits, from bit `from` of the codes on; returns the next plane.
static inline uint8_t *put_plane(const int bits, const uint32_t *words, int from, uint8_t *plane) {
    for (int line = 0; line < bits; line++) {
        uint32_t word = 0;
        for (int i = 0; i < 8 / bits; i++) {
            const uint32_t taken = words[line * 8 / bits + i] >> from;
            word |= (taken & in_each_byte((1u << bits) - 1)) << bits * i;
        }
        memcpy(plane + line * LINE, &word, sizeof word);
    }
    return plane + bits * LINE;
}

static inline const uint8_t *get_plane(const int bits, const uint8_t *plane, int from, uint32_t *words) {
    for (int line = 0; line < bits; line++) {
        const uint32_t word = packed_word(plane + line * LINE);
        for (int i = 0; i < 8 / bits; i++)
            words[line * 8 / bits + i] |= (word >> bits * i & in_each_byte((1u << bits) - 1)) << from;
    }
    return plane + bits * LINE;
}

static void put_unit(const Form f, const uint32_t *words, int column, uint8_t *unit) {
    uint8_t *at = unit + 4 * column;
    if (f.low == 8) at = put_plane(8, words, 0, at);
    if (f.low == 4) at = put_plane(4, words, 0, at);
    if (f.twos) at = put_plane(2, words, f.low, at);
    if (f.ones) put_plane(1, words, f.low + f.twos, at);
}

static void get_unit(const Form f, const uint8_t *unit, int column, uint32_t *words) {
    const uint8_t *at = unit + 4 * column;
    memset(words, 0, WORDS * sizeof *words);
    if (f.low == 8) at = get_plane(8, at, 0, words);
    if (f.low == 4) at = get_plane(4, at, 0, words);
    if (f.twos) at = get_plane(2, at, f.low, words);
    if (f.ones) get_plane(1, at, f.low + f.twos, words);
}

// -- scales ----------------------------------------------------------------------------------------

// Copies a float16; returns whether it is finite.
static inline int put_half(const uint8_t *from, uint8_t *to) {
    memcpy(to, from, 2);
    return (from[1] & 0x7c) != 0x7c;
}

// The bytes that scale the parts of a block of 256, in the order of a tile's header: 16, or 8 of IQ4_XS.
static void read_bytes(int type, const uint8_t *at, uint8_t *bytes) {
    switch (type) {
        case Q2_K: memcpy(bytes, at, 16); break;
        case Q3_K:
            for (int i = 0; i < 16; i++) {
                const int low = at[96 + i % 8] >> i / 8 * 4 & 15;
                bytes[i] = (uint8_t)((low | (at[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
            }
            break;
        case Q6_K: memcpy(bytes, at + 192, 16); break;
        case IQ4_XS:
            for (int i = 0; i < 8; i++) {
                const int low = at[4 + i / 2] >> i % 2 * 4 & 15;
                bytes[i] = (uint8_t)((low | (at[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32);
            }
            break;
        default: {  // Q4_K, Q5_K: 6 bits of four scales, of four minima; 4 bits and 2 of the others
            const uint8_t *scales = at + 4, *minima = at + 8, *others = at + 12;
            for (int i = 0; i < 4; i++) {
                bytes[i] = scales[i] & 63, bytes[8 + i] = minima[i] & 63;
                bytes[4 + i] = (others[i] & 15) | (scales[i] >> 2 & 48);
                bytes[12 + i] = others[i] >> 4 | (minima[i] >> 2 & 48);
            }
        }
    }
}

// The scales of `count` blocks of 32, or of the block of 256 at `at`; returns whether they are finite.
static int put_scales(int type, const uint8_t *at, int64_t count, int column, uint8_t *header) {
    const Form f = form_of(type);
    int finite = 1;
    for (int64_t i = 0; f.super == UNIT && i < count; i++, at += f.bytes)
        switch (f.scales) {
            case HALF: finite &= put_half(at, header + 32 * i + 2 * column); break;
            case HALF_PAIR:
                finite &= put_half(at, header + 64 * i + 2 * column);
                finite &= put_half(at + 2, header + 64 * i + 32 + 2 * column);
                break;
            default: header[16 * i + column] = *at, finite &= *at <= MAX_EXPONENT;
        }
    if (f.super == UNIT) return finite;
    const int place = type == Q2_K ? 80 : type == Q3_K ? 108 : type == Q6_K ? 208 : 0;
    finite = put_half(at + place, header + 2 * column);
    if (f.scales == SIX_PAIR || f.scales == SIXTEEN_PAIR)
        finite &= put_half(at + place + 2, header + 32 + 2 * column);
    uint8_t bytes[16];
    read_bytes(type, at, bytes);
    uint8_t *behind = header + (f.scales == BYTE ? 32 : 64) + column;
    for (int i = 0; i < (f.scales == BYTE ? 8 : 16); i++) behind[16 * i] = bytes[i];
    return finite;
}

// -- groups of blocks ------------------------------------------------------------------------------

int pack_group(int type, const uint8_t *row, int64_t first, int64_t count, int column, uint8_t *group) {
    const Form f = form_of(type);
    const int64_t units = f.super / UNIT;  // of a block
    const uint8_t *at = row + first / units * f.bytes;
    const int finite = put_scales(type, at, count, column, group);
    uint8_t *unit = group + header_bytes(f, count);
    for (int64_t i = 0; i < count; i++, unit += code_bytes(f, UNIT)) {
        uint32_t words[WORDS];
        read_unit(type, at + i / units * f.bytes, (int)(i % units), words);
        put_unit(f, words, column, unit);
    }
    return finite;
}

// Packs MatMulNBits' blocks of a row from number `first` on. Two zero points of 4 bits share a byte.
static void pack_codes(const Form f, const Codes *from, int64_t row, int64_t first, int64_t count,
                       int column, uint8_t *group) {
    const int64_t width = f.scales == FLOAT || f.scales == FLOAT_ZERO ? 4 : 2;
    const int64_t bytes = from->block * f.low / 8;
    uint8_t *unit = group + header_bytes(f, count);
    for (int64_t i = 0; i < count; i++) {
        const int64_t block = first + i, number = row * from->blocks + block;
        memcpy(group + (TILE * i + column) * width, from->scales + number * width, (size_t)width);
        if (f.scales == HALF_ZERO || f.scales == FLOAT_ZERO) {
            const int64_t pair = row * ((from->blocks + 1) / 2) + block / 2;
            group[(count * width + i) * TILE + column] =
                f.low == 8 ? from->zero_points[number]
                           : from->zero_points[pair] >> block % 2 * 4 & 15;
        }
        for (int64_t at = 0; at < bytes; at += UNIT * f.low / 8, unit += code_bytes(f, UNIT)) {
            uint32_t words[WORDS];
            read_codes(f.low, from->codes + number * bytes + at, words);
            put_unit(f, words, column, unit);
        }
    }
}

// float16 to float32, exactly; not through a denormal float32, which a session may treat as 0.
static inline float of_half(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    const uint32_t digits = (uint32_t)(half & 0x7fff) << 13, exponent = half & 0x7c00;
    uint32_t bits = digits + (exponent == 0x7c00 ? 224u << 23 : exponent ? 112u << 23 : 113u << 23);
    float value;
    memcpy(&value, &bits, sizeof value);
    if (!exponent) value -= 0x1p-14f;
    return half & 0x8000 ? -value : value;
}

// A block's weights are scale * (code - middle) + offset, for each half of 16 of a unit. Without an
// offset, -0 leaves all sums as they are.
typedef struct {
    float scales[2], offsets[2];
    int middle;
} Factors;

static Factors factors_of(const Form f, const uint8_t *header, int64_t count, int64_t block, int column) {
    Factors found = {{0}, {-0.0f, -0.0f}, f.middle};
    const uint8_t *byte = header + 16 * block + column, *wide = byte + 16 * block;
    const float d = of_half(header + 2 * column), less = of_half(header + 32 + 2 * column);
    float *scales = found.scales, *offsets = found.offsets;
    uint32_t bits;
    switch (f.scales) {
        case HALF_ZERO: found.middle = byte[32 * count];  // fall through
        case HALF: scales[0] = of_half(header + 32 * block + 2 * column); break;
        case HALF_PAIR:
            scales[0] = of_half(header + 64 * block + 2 * column);
            offsets[0] = of_half(header + 64 * block + 32 + 2 * column);
            break;
        case FLOAT_ZERO: found.middle = byte[64 * count];  // fall through
        case FLOAT: memcpy(scales, header + 64 * block + 4 * column, sizeof *scales); break;
        case EXPONENT:  // below 2^-126 a denormal number
            bits = *byte < 2 ? 0x00200000u << *byte : (*byte - 1u) << 23;
            memcpy(scales, &bits, sizeof *scales);
            break;
        case BYTE: scales[0] = d * (float)(int8_t)byte[32]; break;
        case SIX_PAIR:
            scales[0] = d * (float)byte[64];
            offsets[0] = -(less * (float)byte[64 + 16 * count]);
            break;
        case SIXTEEN:
            for (int i = 0; i < 2; i++) scales[i] = d * (float)(int8_t)wide[64 + 16 * i];
            return found;
        default:  // SIXTEEN_PAIR
            for (int i = 0; i < 2; i++) {
                scales[i] = d * (float)(wide[64 + 16 * i] & 15);
                offsets[i] = -(less * (float)(wide[64 + 16 * i] >> 4));
            }
            return found;
    }
    scales[1] = scales[0], offsets[1] = offsets[0];
    return found;
}

void unpack_group(const Form f, int64_t block, const uint8_t *group, int64_t count, int column,
                  int64_t depth, float *out) {
    const uint8_t *numbers = numbers_of_table(f.table);
    const uint8_t *unit = group + header_bytes(f, count);
    for (int64_t k = 0; k < depth; k += UNIT, unit += code_bytes(f, UNIT)) {
        const Factors factors = factors_of(f, group, count, k / block, column);
        uint32_t words[WORDS];
        uint8_t codes[UNIT];
        float values[UNIT];
        get_unit(f, unit, column, words);
        memcpy(codes, words, UNIT);
        for (int i = 0; f.table && i < UNIT; i++) codes[i] = numbers[codes[i]];
        for (int i = 0; i < UNIT; i++)
            values[i] = factors.scales[i / 16] * (float)(codes[i] - factors.middle) +
                        factors.offsets[i / 16];
        memcpy(out + k, values, (size_t)(depth - k < UNIT ? depth - k : UNIT) * sizeof *out);
    }
}

// -- matrices --------------------------------------------------------------------------------------

// Packs a matrix: with `codes` NULL the rows `raw` of a GGUF type. Returns 1, or 0 if a scale of a row
// is not finite.
static int pack(int type, const uint8_t *raw, const Codes *codes, int64_t columns, int64_t depth,
                int64_t block, uint8_t *tiles) {
    const Form f = form_of(type);
    const int64_t blocks = (depth + block - 1) / block;
    const int64_t width = codes ? 0 : bytes_of_row(f, depth);
    int finite = 1;
    for (int64_t tile = 0; tile < columns; tile += TILE)
        for (int64_t first = 0; first < blocks; first += GROUP_BLOCKS) {
            const int64_t count = group_blocks(blocks, first), bytes = group_bytes(f, count, block);
            memset(tiles, 0, (size_t)bytes);
            for (int column = 0; column < TILE && tile + column < columns; column++)
                if (codes) pack_codes(f, codes, tile + column, first, count, column, tiles);
                else
                    finite &= pack_group(type, raw + (tile + column) * width, first, count, column, tiles);
            tiles += bytes;
        }
    return finite;
}

int specops_pack_rows(int type, const uint8_t *raw, int64_t columns, int64_t depth, uint8_t *tiles) {
    return pack(type, raw, NULL, columns, depth, UNIT, tiles);
}

// Whether all scales of rows of a GGUF type are finite.
int specops_finite_rows(int type, const uint8_t *raw, int64_t columns, int64_t depth) {
    const Form f = form_of(type);
    const int64_t blocks = depth / UNIT, units = f.super / UNIT, width = bytes_of_row(f, depth);
    int finite = 1;
    for (int64_t column = 0; column < columns; column++)
        for (int64_t first = 0; first < blocks; first += GROUP_BLOCKS) {
            uint8_t header[MAX_GROUP];
            finite &= put_scales(type, raw + column * width + first / units * f.bytes,
                                 group_blocks(blocks, first), 0, header);
        }
    return finite;
}

void specops_pack_codes(int type, const uint8_t *codes, const uint8_t *scales,
                        const uint8_t *zero_points, int64_t columns, int64_t blocks, int64_t block,
                        uint8_t *tiles) {
    const Codes from = {codes, scales, zero_points, blocks, block};
    pack(type, NULL, &from, columns, blocks * block, block, tiles);
}

// Bytes of a matrix in tiles; 0: there is no such type, or it has no blocks of this size.
int64_t specops_tile_bytes(int type, int64_t columns, int64_t depth, int64_t block) {
    const Form f = form_of(type);
    if (!bits_of(f) || block < UNIT || block % UNIT || (f.super && block != UNIT)) return 0;
    return (columns + TILE - 1) / TILE * bytes_of_tile(f, (depth + block - 1) / block, block);
}

// Bytes of a row in a file; 0: it is not a GGUF type, or its blocks do not divide a row of `depth` weights.
int64_t specops_row_bytes(int type, int64_t depth) {
    const Form f = form_of(type);
    return f.super && depth % f.super == 0 ? bytes_of_row(f, depth) : 0;
}
