// Chooses the kernels for the processor that this runs on. All compute the same bits.

#include "processor.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tiles of weights are little-endian"
#endif

static const Processor PLAIN = {"plain C", &MATMUL_PLAIN, &ATTENTION_PLAIN, &SAMPLING_PLAIN};
static const Processor *_Atomic chosen;  // by force, else once it has been asked for

#if defined(__x86_64__)

#include <cpuid.h>

static const Processor AVX2 = {"AVX2", &MATMUL_AVX2, &ATTENTION_AVX2, &SAMPLING_AVX2};
static const Processor AVX512 = {"AVX512-VNNI", &MATMUL_AVX512, &ATTENTION_AVX512,
                                 &SAMPLING_AVX512};

enum { AVX_STATE = 0x6, AVX512_STATE = 0xe6 };  // registers that the system saves

static inline int has(unsigned bits, int bit) { return bits >> bit & 1; }

// By hand: not every compiler comes with what __builtin_cpu_supports needs.
static const Processor *best(void) {
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return &PLAIN;
    if (!has(c, 27) || !has(c, 29)) return &PLAIN;  // XSAVE, F16C
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (saved & AVX_STATE) != AVX_STATE)
        return &PLAIN;
    const int avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // F, DQ, BW, VL
    if (avx512 && has(c, 11) && (saved & AVX512_STATE) == AVX512_STATE) return &AVX512;
    return has(b, 5) ? &AVX2 : &PLAIN;
}

static const Processor *const ALL[] = {&AVX512, &AVX2, &PLAIN};

#else

static const Processor *best(void) { return &PLAIN; }

static const Processor *const ALL[] = {&PLAIN};

#endif

const Processor *choose_processor(void) {
    if (!chosen) chosen = best();
    return chosen;
}

// The name of what new sessions compute with.
const char *specops_kernel(void) { return choose_processor()->name; }

// Has new sessions compute with the kernels of that name; NULL: with the best again. Returns 0 and
// changes nothing where there are none or this processor lacks what they need. For tests.
int specops_force_kernel(const char *name) {
    const Processor *most = best();
    int within = 0;
    for (size_t i = 0; i < sizeof ALL / sizeof *ALL; i++) {
        within |= ALL[i] == most;
        if (within && (!name || !strcmp(ALL[i]->name, name))) {
            chosen = ALL[i];
            return 1;
        }
    }
    return 0;
}
