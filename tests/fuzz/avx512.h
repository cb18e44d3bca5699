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

// Behind the compiler's own headers, which would take these for its flags.
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1
#undef _mm512_set1_epi32
#undef _mm512_maddubs_epi16
#undef _mm512_madd_epi16
#undef _mm512_dpbusd_epi32
#define _mm512_set1_epi32 set1_epi32
#define _mm512_maddubs_epi16 maddubs_epi16
#define _mm512_madd_epi16 madd_epi16
#define _mm512_dpbusd_epi32 dpbusd_epi32

#endif
