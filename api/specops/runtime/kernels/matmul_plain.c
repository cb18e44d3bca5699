// Kernel for any processor, and the reference for all others. It is plain C, with one instruction for
// x86-64 and two for arm64, which all these processors have: products of 16 bits added in 32.

#include "matmul_kernel.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// A register has COLUMNS columns of a tile, four bytes each: two pairs of numbers of 16 bits. A single
// row computes a whole tile at once, to share the activations; several rows share the weights.
enum { MOST = 5, COLUMNS = 4, PARTS = TILE / COLUMNS, REGISTER = 4 * COLUMNS };
#define TOGETHER(COUNT) ((COUNT) == 1 ? PARTS : 1)

typedef int16_t Pairs __attribute__((vector_size(REGISTER)));
typedef uint16_t Lines __attribute__((vector_size(REGISTER)));
typedef uint16_t LinesAt __attribute__((vector_size(REGISTER), aligned(1), may_alias));
typedef int32_t Four __attribute__((vector_size(REGISTER)));
typedef uint32_t FourWords __attribute__((vector_size(REGISTER)));

// Sums of a register's columns. On arm64 the two products of a pair have a lane each until `added`: two
// columns in `first` and two in `last`.
#if defined(__aarch64__)
typedef struct { int32x4_t first, last; } Sums;
#else
typedef Four Sums;
#endif

// Adds the products of a register's pairs to its columns' sums.
INLINE Sums add(Sums sums, Lines codes, Pairs x) {
#if defined(__x86_64__)
    return sums + (Four)_mm_madd_epi16((__m128i)codes, (__m128i)x);
#elif defined(__aarch64__)
    return (Sums){vmlal_s16(sums.first, vget_low_s16((int16x8_t)codes), vget_low_s16(x)),
                  vmlal_high_s16(sums.last, (int16x8_t)codes, x)};
#else
    const Four c = (Four)codes, four = (Four)x;
    return sums + ((Four)((FourWords)c << 16) >> 16) * ((Four)((FourWords)four << 16) >> 16) +
           (c >> 16) * (four >> 16);
#endif
}

INLINE Four added(Sums sums) {
#if defined(__aarch64__)
    return vpaddq_s32(sums.first, sums.last);
#else
    return sums;
#endif
}

// Four codes of activations, k to k + 3, in the form in which registers are multiplied: k and k + 2 for
// each column, then k + 1 and k + 3. They are stored in this form: making it for each tile again took a
// quarter of the time.
typedef struct {
    Pairs even, odd;
} Word;

enum { BYTES = sizeof(Word) / 4 };

static void quantize_words(const Input *input, int64_t row, const Shape *shape, int8_t *codes,
                           int64_t stride, float *scales, int32_t *sums, int64_t step) {
    quantize_row(input, row, shape, codes, stride, scales, sums, step);
    for (int64_t k = 0; k < blocks_of(shape) * shape->block; k += 4, codes += stride) {
        const Lines four = (Lines)((Four){0} + word_at(codes));
        Word *word = (Word *)codes;
        word->even = (Pairs)(four << 8) >> 8, word->odd = (Pairs)four >> 8;
        // The products of `odd` use a byte b with two weights as it is, without masking the low one:
        // b * x + (b >> 4) * (y - 16 * x) is (b & 15) * x + (b >> 4) * y.
        if (shape->bits == 4 && k % 8) word->odd -= ((const Word *)(codes - stride))->odd * 16;
    }
}

INLINE void group(const int bits, const int count, const Shape *shape, const uint8_t *weights,
                  const uint8_t *end, const Activations *x, int64_t first, const float *bias,
                  float *y, int columns) {
    const int64_t blocks = blocks_of(shape);
    const int together = TOGETHER(count);
    Operands at = operands_of(shape, weights, x, first, BYTES);
    const Word *words = (const Word *)at.codes;
    Floats totals[MOST];
    for (int row = 0; row < count; row++) totals[row] = (Floats){0};
    for (int64_t block = 0; block < blocks; block++, words += count * shape->block / 4) {
        Ints dots[MOST];
        for (int start = 0; start < PARTS; start += together) {
            Sums sums[MOST][PARTS], sixteens[MOST][PARTS];
            for (int row = 0; row < count; row++)
                for (int part = 0; part < together; part++)
                    sums[row][part] = sixteens[row][part] = (Sums){0};
            const uint8_t *from = weights + start * REGISTER;
            const Word *word = words;
            for (int64_t k = 0; k < shape->block; k += 8, word += 2 * count) {
                prefetch(from, end);
                if (bits == 8) prefetch(from + LINE, end);
                for (int part = 0; part < together; part++) {
                    const Lines codes = *(const LinesAt *)(from + part * REGISTER);
                    if (bits == 4) {
                        // The upper half of an even byte is not shifted: it counts 16 times.
                        const Lines low = codes & 15, sixteen = codes & 240;
                        const Lines both = codes >> 8, high = codes >> 12;
                        for (int row = 0; row < count; row++) {
                            const Word *one = word + row, *other = one + count;
                            Sums *sum = &sums[row][part], *times16 = &sixteens[row][part];
                            *sum = add(*sum, low, one->even);
                            *sum = add(*sum, both, one->odd);
                            *sum = add(*sum, high, other->odd);
                            *times16 = add(*times16, sixteen, other->even);
                        }
                    } else {
                        const Lines next = *(const LinesAt *)(from + part * REGISTER + LINE);
                        const Lines even = codes & 255, odd = codes >> 8;
                        const Lines next_even = next & 255, next_odd = next >> 8;
                        for (int row = 0; row < count; row++) {
                            const Word *one = word + row, *other = one + count;
                            Sums *sum = &sums[row][part];
                            *sum = add(*sum, even, one->even);
                            *sum = add(*sum, odd, one->odd);
                            *sum = add(*sum, next_even, other->even);
                            *sum = add(*sum, next_odd, other->odd);
                        }
                    }
                }
                from += bits == 4 ? LINE : 2 * LINE;
            }
            for (int row = 0; row < count; row++)
                for (int part = 0; part < together; part++) {
                    Four dot = added(sums[row][part]);
                    if (bits == 4) dot += added(sixteens[row][part]) >> 4;
                    memcpy((char *)(dots + row) + (start + part) * REGISTER, &dot, sizeof dot);
                }
        }
        weights = add_block(shape, count, block, dots, weights + code_bytes(shape), &at, totals);
    }
    put_rows(shape, count, totals, bias, y, columns);
}

#include "matmul_groups.h"

const MatmulKernel MATMUL = {MOST, 2, 0, {BYTES, BYTES}, activate_row, quantize_words, piece, NULL};
