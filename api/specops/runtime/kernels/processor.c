// Chooses the kernels for this processor. All kernels compute the same bits.

#include "processor.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tiles of weights are little-endian"
#endif

// Fastest first. An entry without specific kernels uses those of an entry with lower requirements.
static const Processor ALL[] = {
#if defined(__x86_64__)
    {"AVX512-VNNI", HAS_AVX512 | HAS_VNNI512, &MATMUL_VNNI512, &ATTENTION_VNNI512, AVX512},
    {"AVX-VNNI", HAS_AVX2 | HAS_VNNI256, &MATMUL_VNNI256, &ATTENTION_VNNI256, AVX2},
    {"AVX-512", HAS_AVX512, &MATMUL_AVX512, &ATTENTION_AVX512, AVX512},
    {"AVX2", HAS_AVX2, &MATMUL_AVX2, &ATTENTION_AVX2, AVX2},
#elif defined(__aarch64__)
    {"NEON-I8MM", HAS_DOTPROD | HAS_I8MM, &MATMUL_I8MM, &ATTENTION_DOTPROD, PLAIN},
    {"NEON-DOTPROD", HAS_DOTPROD, &MATMUL_DOTPROD, &ATTENTION_DOTPROD, PLAIN},
#endif
    {"plain C", 0, &MATMUL_PLAIN, &ATTENTION_PLAIN, PLAIN},
};
enum { COUNT = sizeof ALL / sizeof *ALL };

#if defined(__x86_64__)

#include <cpuid.h>

enum { AVX_STATE = 0x6, AVX512_STATE = 0xe6 };  // registers that the system must save

static inline unsigned has(unsigned bits, int bit) { return bits >> bit & 1; }

// By hand: some compilers lack the library that __builtin_cpu_supports needs.
static unsigned features(void) {
    unsigned a, b, c, d, saved, high, next_a = 0, most;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!has(c, 27) || !has(c, 29)) return 0;  // XSAVE, F16C
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &most, &b, &c, &d) || (saved & AVX_STATE) != AVX_STATE) return 0;
    if (most) __get_cpuid_count(7, 1, &next_a, &a, &high, &d);
    unsigned found = has(b, 5) * HAS_AVX2;
    if (has(next_a, 4)) found |= HAS_VNNI256;
    if (has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) &&  // F, DQ, BW, VL
        (saved & AVX512_STATE) == AVX512_STATE)
        found |= HAS_AVX512 | (has(c, 11) ? HAS_VNNI512 : 0);
    return found;
}

#elif defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

enum { CAPABILITY_DOTPROD = 1 << 20, CAPABILITY2_I8MM = 1 << 13 };  // the kernel's, for AT_HWCAP

static unsigned features(void) {
    return (getauxval(AT_HWCAP) & CAPABILITY_DOTPROD ? HAS_DOTPROD : 0) |
           (getauxval(AT_HWCAP2) & CAPABILITY2_I8MM ? HAS_I8MM : 0);
}

#elif defined(__aarch64__) && defined(__APPLE__)

#include <sys/sysctl.h>

static unsigned feature_if(const char *name, unsigned feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) || !value ? 0 : feature;
}

static unsigned features(void) {
    return feature_if("hw.optional.arm.FEAT_DotProd", HAS_DOTPROD) |
           feature_if("hw.optional.arm.FEAT_I8MM", HAS_I8MM);
}

#else

static unsigned features(void) { return 0; }

#endif

static const Processor *_Atomic chosen;  // NULL before the first choice

// The first kernels from number `index` on that a processor with these features can run; NULL: none.
// The last kernels need no features.
static const Processor *from(int index, unsigned has) {
    for (; index < COUNT; index++)
        if (!(ALL[index].needs & ~has)) return ALL + index;
    return NULL;
}

const Processor *choose_processor(void) {
    if (!chosen) chosen = from(0, features());
    return chosen;
}

void use_processor(const Processor *processor) {
    chosen = processor ? processor : from(0, features());
}

// The name of the kernels for new sessions.
const char *specops_kernel(void) { return choose_processor()->name; }

// The names of the kernels that a processor with these features can run, by number, fastest first; NULL:
// there are no more.
const char *specops_kernel_of(unsigned has, int number) {
    const Processor *found = from(0, has);
    while (found && number-- > 0) found = from((int)(found - ALL) + 1, has);
    return found ? found->name : NULL;
}

// Features of this processor.
unsigned specops_features(void) { return features(); }

// Makes new sessions use the kernels of this name; NULL: the fastest again. Returns 0 and changes nothing if
// this processor cannot run them. For tests.
int specops_force_kernel(const char *name) {
    for (const Processor *p = from(0, features()); p; p = from((int)(p - ALL) + 1, features()))
        if (!name || !strcmp(p->name, name)) return use_processor(p), 1;
    return 0;
}
