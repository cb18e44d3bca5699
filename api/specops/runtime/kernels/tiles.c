// Writes codes into tiles, for the module that prepares graphs; `matmul.h` describes the tiles.

#include "matmul.h"

// Eight codes of 4 bits, a word as MatMulNBits has them: the first four go into the low halves of its
// bytes, the others into the high halves.
static inline uint32_t in_halves(uint32_t word) {
    uint32_t moved = (word ^ word >> 8) & 0x0000ff00;  // the middle bytes change places,
    word ^= moved ^ moved << 8;
    moved = (word ^ word >> 4) & 0x00f000f0;  // then the middle halves of each two bytes
    return word ^ moved ^ moved << 4;
}

// codes [columns, blocks, bytes] of a MatMulNBits; its missing columns stay as they are. A tile begins
// every `tile_bytes`, and in it the codes of block b at places[b].
void specops_fill_tiles(const uint8_t *codes, int64_t columns, int64_t blocks, int64_t bytes,
                        int bits, const int64_t *places, uint8_t *tiles, int64_t tile_bytes) {
    for (int64_t column = 0; column < columns; column++) {
        uint8_t *lane = tiles + column / TILE * tile_bytes + column % TILE * 4;
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t at = 0; at < bytes; at += 4, codes += 4) {
                uint32_t word;
                memcpy(&word, codes, sizeof word);
                if (bits == 4) word = in_halves(word);
                memcpy(lane + places[block] + at * TILE, &word, sizeof word);
            }
    }
}
