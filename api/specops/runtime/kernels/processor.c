// Chooses the kernels for this processor. All kernels compute the same bits.

#define _GNU_SOURCE  // syscall

#include "processor.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tiles of weights are little-endian"
#endif

// The fastest first. An entry without kernels of its own uses those of an entry that needs less.
static const Processor ALL[] = {
#if defined(__x86_64__)
    {"AMX-INT8", HAS_AVX512 | HAS_VNNI512 | HAS_AMX, &MATMUL_AMX, &ATTENTION_VNNI512, AVX512},
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

// The reason against AMX; NULL: none; "": the processor does not name AMX. `kept`: the system saves its
// registers; `agrees`: it passed the test.
const char *specops_amx_refusal(int named, int vnni, int kept, int permitted, int agrees) {
    if (!named) return "";
    if (!vnni) return "there is no AVX512-VNNI for passes of few tokens";
    if (!kept) return "the system does not save its registers";
    if (!permitted) return "the system does not permit it (arch_prctl)";
    if (!agrees) return "its results differed from plain C's when it was tested";
    return NULL;
}

static const char *_Atomic refusal = "";  // the reason against AMX here

#if defined(__x86_64__)

#include <cpuid.h>

enum { AVX_STATE = 0x6, AVX512_STATE = 0xe6 };  // registers that the system saves

static inline unsigned has(unsigned bits, int bit) { return bits >> bit & 1; }

#if defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

enum { AMX_STATE = 0x60000, REQUEST_PERMISSION = 0x1023, MATRIX_DATA = 18 };

// Weights that a trial multiplies, for each size of sums.
typedef struct {
    int type;
    int64_t block;
} Trial;
static const Trial TRIALS[SUM_SIZES] = {{Q6_K, 32}, {INT4, 32}, {INT8, 128}};

// HAS_AMX or 0; tested once. Each step needs the one before it.
static unsigned has_amx(unsigned saved, unsigned d, int vnni) {
    enum { UNKNOWN, NO, YES };
    static _Atomic int known = UNKNOWN;
    if (known == UNKNOWN) {
        const int named = has(d, 24) && has(d, 25), kept = (saved & AMX_STATE) == AMX_STATE;
        const int permitted = named && vnni && kept &&
                              !syscall(SYS_arch_prctl, REQUEST_PERMISSION, MATRIX_DATA);
        int agrees = permitted;
        for (const Trial *trial = TRIALS; agrees && trial < TRIALS + SUM_SIZES; trial++)
            agrees = specops_agree(&MATMUL_AMX, &MATMUL_PLAIN, trial->type, trial->block);
        for (int size = 0; agrees && size < SUM_SIZES; size++)
            use_wide_from(size, measure_fewest_rows(&MATMUL_AMX, &MATMUL_VNNI512, TRIALS[size].type,
                                                    TRIALS[size].block));
        refusal = specops_amx_refusal(named, vnni, kept, permitted, agrees);
        known = refusal ? NO : YES;
    }
    return known == YES ? HAS_AMX : 0;
}

#else

static unsigned has_amx(unsigned saved, unsigned d, int vnni) {
    return (void)saved, (void)d, (void)vnni, 0;
}

#endif

// By hand: some compilers lack the library that __builtin_cpu_supports needs.
static unsigned features(void) {
    unsigned a, b, c, d, saved, high, next_a = 0, most;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!has(c, 27) || !has(c, 29)) return 0;  // XSAVE, F16C
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &most, &b, &c, &d) || (saved & AVX_STATE) != AVX_STATE) return 0;
    const unsigned amx = d;
    if (most) __get_cpuid_count(7, 1, &next_a, &a, &high, &d);
    unsigned found = has(b, 5) * HAS_AVX2;
    if (has(next_a, 4)) found |= HAS_VNNI256;
    if (has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) &&  // F, DQ, BW, VL
        (saved & AVX512_STATE) == AVX512_STATE)
        found |= HAS_AVX512 | (has(c, 11) ? HAS_VNNI512 : 0);
    return found | has_amx(saved, amx, (found & HAS_VNNI512) != 0);
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

// The names of the kernels that a processor with these features can run, by number, the fastest first;
// NULL: there are no more.
const char *specops_kernel_of(unsigned has, int number) {
    const Processor *found = from(0, has);
    while (found && number-- > 0) found = from((int)(found - ALL) + 1, has);
    return found ? found->name : NULL;
}

// Features of this processor.
unsigned specops_features(void) { return features(); }

// The reason against AMX; empty if the processor does not name AMX, or AMX is used.
const char *specops_no_amx(void) {
    features();
    const char *why = refusal;
    return why ? why : "";
}

// Makes new sessions use the kernels of that name; NULL: the fastest again. Returns 0 and changes
// nothing if this processor cannot run such kernels. For tests.
int specops_force_kernel(const char *name) {
    for (const Processor *p = from(0, features()); p; p = from((int)(p - ALL) + 1, features()))
        if (!name || !strcmp(p->name, name)) return use_processor(p), 1;
    return 0;
}
