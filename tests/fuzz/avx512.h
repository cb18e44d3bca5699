// Plain C in place of the instructions of AVX-512 that multiply bytes, so that any x86-64 can test the
// kernels that use them. The compiler includes this file before a kernel's source.

#ifndef SPECOPS_AVX512_BY_PLAIN_C_H
#define SPECOPS_AVX512_BY_PLAIN_C_H

#include <immintrin.h>
#include <stdint.h>

typedef union {
    __m512i all;
    uint8_t unsigned8[64];
    int8_t signed8[64];
    int16_t signed16[32];
    int32_t signed32[16];
} Register;

static inline __m512i set1_epi32(int32_t number) {
    Register out;
    for (int i = 0; i < 16; i++) out.signed32[i] = number;
    return out.all;
}

static inline __m512i maddubs_epi16(__m512i one, __m512i other) {
    const Register a = {one}, b = {other};
    Register out;
    for (int i = 0; i < 32; i++) {
        int32_t sum = 0;
        for (int k = 2 * i; k < 2 * i + 2; k++) sum += a.unsigned8[k] * b.signed8[k];
        out.signed16[i] = (int16_t)(sum > INT16_MAX ? INT16_MAX : sum < INT16_MIN ? INT16_MIN : sum);
    }
    return out.all;
}

static inline __m512i madd_epi16(__m512i one, __m512i other) {
    const Register a = {one}, b = {other};
    Register out;
    for (int i = 0; i < 16; i++)
        out.signed32[i] = a.signed16[2 * i] * b.signed16[2 * i] +
                          a.signed16[2 * i + 1] * b.signed16[2 * i + 1];
    return out.all;
}

static inline __m512i dpbusd_epi32(__m512i sums, __m512i one, __m512i other) {
    const Register a = {one}, b = {other};
    Register out = {sums};
    for (int i = 0; i < 64; i++) out.signed32[i / 4] += a.unsigned8[i] * b.signed8[i];
    return out.all;
}

static inline __m512i shuffle_epi8(__m512i one, __m512i other) {  // within each 16 bytes
    const Register a = {one}, b = {other};
    Register out;
    for (int i = 0; i < 64; i++)
        out.unsigned8[i] = b.unsigned8[i] & 128 ? 0 : a.unsigned8[i / 16 * 16 + (b.unsigned8[i] & 15)];
    return out.all;
}

static inline __m512i abs_epi8(__m512i one) {
    Register out = {one};
    for (int i = 0; i < 64; i++)
        if (out.signed8[i] < 0) out.unsigned8[i] = (uint8_t)-out.unsigned8[i];
    return out.all;
}

static inline __mmask64 movepi8_mask(__m512i one) {
    const Register a = {one};
    __mmask64 mask = 0;
    for (int i = 0; i < 64; i++) mask |= (__mmask64)(a.unsigned8[i] >> 7) << i;
    return mask;
}

static inline __m512i mask_sub_epi8(__m512i kept, __mmask64 mask, __m512i one, __m512i other) {
    const Register a = {one}, b = {other};
    Register out = {kept};
    for (int i = 0; i < 64; i++)
        if (mask >> i & 1) out.unsigned8[i] = (uint8_t)(a.unsigned8[i] - b.unsigned8[i]);
    return out.all;
}

static inline __m512i setzero_si512(void) { return (__m512i){0}; }

// Behind the compiler's own headers, which would take these for its flags.
#define __AVX512BW__ 1
#if !defined(PAIRS_ALONE)
#define __AVX512VNNI__ 1
#endif
#undef _mm512_set1_epi32
#undef _mm512_maddubs_epi16
#undef _mm512_madd_epi16
#undef _mm512_dpbusd_epi32
#undef _mm512_shuffle_epi8
#undef _mm512_abs_epi8
#undef _mm512_movepi8_mask
#undef _mm512_mask_sub_epi8
#undef _mm512_setzero_si512
#define _mm512_shuffle_epi8 shuffle_epi8
#define _mm512_abs_epi8 abs_epi8
#define _mm512_movepi8_mask movepi8_mask
#define _mm512_mask_sub_epi8 mask_sub_epi8
#define _mm512_setzero_si512 setzero_si512
#define _mm512_set1_epi32 set1_epi32
#define _mm512_maddubs_epi16 maddubs_epi16
#define _mm512_madd_epi16 madd_epi16
#define _mm512_dpbusd_epi32 dpbusd_epi32

#endif
