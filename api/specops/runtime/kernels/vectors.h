// Sixteen lanes of float32, written with the compiler's vector extensions: one source for every
// processor, so that the order of sums and each rounding are the same by construction.
//
// Nothing here may be fused or reordered: multiply, then add (-ffp-contract=off, no -ffast-math).
// On processors of 512 bits a vector is one register, on others two or four.

#ifndef SPECOPS_VECTORS_H
#define SPECOPS_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Codes __attribute__((vector_size(16)));

// The same where memory is not aligned and holds other types as well.
typedef float FloatsAt __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t HalvesAt __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t CodesAt __attribute__((vector_size(16), aligned(1), may_alias));

INLINE Floats load(const float *from) { return *(const FloatsAt *)from; }
INLINE void store(float *to, Floats values) { *(FloatsAt *)to = values; }

// The first `count` numbers, at most 16; the others are 0, or stay in memory as they are.
INLINE Floats load_first(const float *from, int count) {
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
    Floats values = {0};
    memcpy(&values, from, (size_t)count * sizeof(float));
    return values;
#endif
}

INLINE void store_first(float *to, int count, Floats values) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)values);
#else
    if (count == LANES) store(to, values);
    else memcpy(to, &values, (size_t)count * sizeof(float));
#endif
}

INLINE Floats splat(float value) { return value - (Floats){0}; }  // -0 stays -0

INLINE Floats choose(Ints condition, Floats yes, Floats no) {
    return (Floats)((condition & (Ints)yes) | (~condition & (Ints)no));
}

INLINE Words choose_words(Ints condition, Words yes, Words no) {
    return ((Words)condition & yes) | (~(Words)condition & no);
}

// a > b ? a : b, so b where one is NaN.
INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE Floats magnitude(Floats a) { return (Floats)((Ints)a & INT32_MAX); }

#if defined(__clang__)
#define LANES_OF(VALUES, ...) __builtin_shufflevector(VALUES, VALUES, __VA_ARGS__)
#else
#define LANES_OF(VALUES, ...) __builtin_shuffle(VALUES, (Ints){__VA_ARGS__})
#endif
#define HALVES_SWAPPED(V) LANES_OF(V, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define FOURS_SWAPPED(V) LANES_OF(V, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define TWOS_SWAPPED(V) LANES_OF(V, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define ONES_SWAPPED(V) LANES_OF(V, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)

// The sum of all lanes, halves onto halves.
INLINE float total(Floats v) {
    v += HALVES_SWAPPED(v);
    v += FOURS_SWAPPED(v);
    v += TWOS_SWAPPED(v);
    return v[0] + v[1];
}

INLINE float largest(Floats v) {
    v = larger(HALVES_SWAPPED(v), v);
    v = larger(FOURS_SWAPPED(v), v);
    v = larger(TWOS_SWAPPED(v), v);
    v = larger(ONES_SWAPPED(v), v);
    return v[0];
}

// Whether a condition holds in any lane.
INLINE int any(Ints condition) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)condition) != 0;
#else
    Ints all = condition;
    all |= HALVES_SWAPPED(all);
    all |= FOURS_SWAPPED(all);
    all |= TWOS_SWAPPED(all);
    return (all[0] | all[1]) != 0;
#endif
}

// Store the lanes in which a condition holds, one after another. Returns their number.
INLINE int store_where(float *to, Ints condition, Floats values) {
#if defined(__AVX512F__)
    const __mmask16 mask = _mm512_movepi32_mask((__m512i)condition);
    const int count = __builtin_popcount(mask);
    store_first(to, count, (Floats)_mm512_maskz_compress_ps(mask, (__m512)values));
    return count;
#else
    int count = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (condition[lane]) to[count++] = values[lane];
    return count;
#endif
}

// Adding it leaves a number's nearest integer, ties to even, in the lowest bits: the same on all
// processors and defined for every input, which a conversion is not.
#define ROUNDER 12582912.0f  // 1.5 * 2^23

// e^x for x <= 0, with an error of 2 units in the last place; 0 below -86.5, where float32's
// normal numbers end. Coefficients: Cephes, expf (S. L. Moshier).
INLINE Floats exponential(Floats x) {
    const Floats shifted = x * 1.44269504f + ROUNDER;
    const Floats n = shifted - ROUNDER;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = (y * (r * r) + r) + 1.0f;
    const Floats power = (Floats)(((Words)shifted + 127) << 23);  // 2^n
    return choose(x < -86.5f, (Floats){0}, y * power);
}

// tanh, by a series where 1 - e^(-2x) would lose its digits.
INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats e = exponential(magnitude(x) * -2.0f), s = x * x;
    const Floats far = (1.0f - e) / (1.0f + e);
    Floats y = s * 0.0218694885f - 0.0539682540f;
    y = y * s + 0.133333333f;
    y = y * s - 0.333333333f;
    const Floats near = x + x * (s * y);
    const Floats sign = (Floats)((Words)x & 0x80000000u);
    return choose(s < 0.0625f, near, (Floats)((Ints)far | (Ints)sign));
}

INLINE Floats silu(Floats x) {  // x * sigmoid(x)
    const Floats e = exponential(magnitude(x) * -1.0f);
    return x * (choose(x < 0.0f, e, (Floats){0} + 1.0f) / (1.0f + e));
}

INLINE Floats gelu(Floats x) {  // by its approximation with tanh
    const Floats inner = (x + x * x * x * 0.044715f) * 0.797884561f;
    return x * 0.5f * (1.0f + hyperbolic_tangent(inner));
}

// 1 / sqrt(mean + epsilon) of so many squares, added up lane by lane.
INLINE float inverse_rms(Floats squares, int64_t count, float epsilon) {
    return 1.0f / sqrtf(total(squares) / (float)count + epsilon);
}

// float16 to float32, exact; a NaN becomes a quiet one, as processors do it.
INLINE Floats from_halves(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    const __m256 parts[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + 1))};
    Floats all;
    memcpy(&all, parts, sizeof all);
    return all;
#elif defined(__aarch64__) && defined(__clang__)
    typedef __fp16 Native __attribute__((vector_size(32), aligned(2), may_alias));
    return __builtin_convertvector(*(const Native *)from, Floats);
#else
    const Words half = __builtin_convertvector(*(const HalvesAt *)from, Words);
    const Words exponent = half & 0x7c00, digits = (half & 0x7fff) << 13;
    const Floats denormal = (Floats)(digits + (113u << 23)) - (Floats)((Words){0} + (113u << 23));
    const Words quiet = choose_words((half & 0x03ff) != 0, (Words){0} + 0x400000, (Words){0});
    Words bits = choose_words(exponent == 0, (Words)denormal, digits + (112u << 23));
    bits = choose_words(exponent == 0x7c00, (digits + (224u << 23)) | quiet, bits);
    return (Floats)(bits | (half & 0x8000) << 16);
#endif
}

// float32 to float16: to the nearest, ties to even; what is too large becomes infinite.
INLINE void to_halves(uint16_t *to, Floats values) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)values, 0));
#elif defined(__F16C__)
    __m256 parts[2];
    memcpy(parts, &values, sizeof parts);
    for (int part = 0; part < 2; part++)
        _mm_storeu_si128((__m128i *)to + part, _mm256_cvtps_ph(parts[part], 0));
#elif defined(__aarch64__) && defined(__clang__)
    typedef __fp16 Native __attribute__((vector_size(32), aligned(2), may_alias));
    typedef __fp16 Numbers __attribute__((vector_size(32)));
    *(Native *)to = __builtin_convertvector(values, Numbers);
#else
    const Words sign = (Words)values & 0x80000000u, bits = (Words)values ^ sign;
    // Adding a half rounds what float16 has no normal number for.
    const Words denormal = (Words)((Floats)bits + 0.5f) - (Words)((Floats){0} + 0.5f);
    const Words normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    const Words nan = (bits >> 13 & 0x3ff) | 0x7e00;
    Words half = choose_words((Ints)bits < (Ints)((Words){0} + (113u << 23)), denormal, normal);
    half = choose_words((Ints)bits >= (Ints)((Words){0} + (143u << 23)), (Words){0} + 0x7c00, half);
    half = choose_words((Ints)bits > (Ints)((Words){0} + 0x7f800000), nan, half);
    *(HalvesAt *)to = __builtin_convertvector(half | sign >> 16, Halves);
#endif
}

INLINE Floats from_codes(const int8_t *from) {
    return __builtin_convertvector(__builtin_convertvector(*(const CodesAt *)from, Ints), Floats);
}

// The nearest integers, ties to even, of numbers within 127 of 0; returns them, too.
INLINE Ints to_codes(int8_t *to, Floats values) {
    const Ints rounded = (Ints)(values + ROUNDER) - (Ints)((Floats){0} + ROUNDER);
    *(CodesAt *)to = __builtin_convertvector(rounded, Codes);
    return rounded;
}

#endif
