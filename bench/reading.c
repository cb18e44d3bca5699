// How fast two threads get a file's bytes from memory, and what a kernel that computes with them
// could do about it: where one token of a model goes, MatMulNBits has 4-bit weights to read and
// little to compute. Needs a processor with AVX512-VNNI and a file in the page cache:
//
//     gcc -O3 -march=native -pthread bench/reading.c -o /tmp/reading
//     /tmp/reading .cache/bench/tinyllama-*/prepacked/model-int4-128-[0-9a-f]*/model.onnx.data
//
// Prints GB/s, the median of as many rounds as a second argument says (15), ways in turn:
//   loads       nothing but loads
//   computing   as onnxruntime 1.31 does for one token and blocks of 128: four columns side by
//               side, 64 bytes of each at a time, unpacked, multiplied with int8 and scaled
//   ahead       the same, asking for the lines 4 KiB further on: a processor reads ahead by
//               itself within a page of that size only

#if !defined(__AVX512VNNI__)
#error "AVX512-VNNI is needed: -march=native on a processor that has it"
#endif

#include <fcntl.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

enum { LOADS, COMPUTING, AHEAD, WAYS };
enum { STEP = 256, LINE = 64, PAGE = 4096, MOST_ROUNDS = 101, BLOCKS = 16 };
static const char *const NAMES[WAYS] = {"loads", "computing", "ahead"};
static const size_t MOST = 600u << 20;  // bytes: what a token of TinyLlama-1.1B's shape reads

typedef struct {
    const char *start;
    size_t size;
    int way;
    int result;  // of all that was read, so that no load can be left out
} Part;

static __m512i loads(const char *at, size_t size) {
    __m512i sums[4] = {0};
    for (size_t i = 0; i + STEP <= size; i += STEP)
        for (int line = 0; line < 4; line++)
            sums[line] = _mm512_add_epi32(sums[line], _mm512_loadu_si512(at + i + line * LINE));
    return _mm512_add_epi32(_mm512_add_epi32(sums[0], sums[1]),
                            _mm512_add_epi32(sums[2], sums[3]));
}

static inline __m512i computing(const char *at, size_t size, size_t ahead) {
    static const char activations[BLOCKS * 128];
    static const float scales[BLOCKS * 4];
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sums[4] = {0};
    for (size_t i = 0, block = 0; i + STEP <= size; i += STEP, block = (block + 1) % BLOCKS) {
        if (ahead)
            for (int line = 0; line < 4; line++)
                _mm_prefetch(at + i + ahead + line * LINE, _MM_HINT_T0);
        const __m512i first = _mm512_loadu_si512(activations + block * 128);
        const __m512i second = _mm512_loadu_si512(activations + block * 128 + LINE);
        for (int column = 0; column < 4; column++) {
            const __m512i codes = _mm512_loadu_si512(at + i + column * LINE);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
            __m512i dot = _mm512_setzero_si512();
            dot = _mm512_dpbusd_epi32(dot, _mm512_and_si512(codes, low), first);
            dot = _mm512_dpbusd_epi32(dot, high, second);
            const __m512 scale = _mm512_set1_ps(scales[block * 4 + column] + 1);
            sums[column] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sums[column]);
        }
    }
    return _mm512_castps_si512(
        _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

static void *work(void *argument) {
    Part *part = argument;
    __m512i found;
    if (part->way == LOADS) found = loads(part->start, part->size);
    else found = computing(part->start, part->size, part->way == AHEAD ? PAGE : 0);
    part->result = _mm512_reduce_add_epi32(found);
    return NULL;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int count, char **arguments) {
    const int file = count > 1 ? open(arguments[1], O_RDONLY) : -1;
    const int rounds = count > 2 ? atoi(arguments[2]) : 15;
    struct stat status;
    if (file < 0 || fstat(file, &status) || rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "usage: %s FILE [ROUNDS, up to %d]\n", arguments[0], MOST_ROUNDS);
        return 2;
    }
    const size_t size = (size_t)status.st_size < MOST ? (size_t)status.st_size : MOST;
    const char *bytes = mmap(NULL, size, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
    if (bytes == MAP_FAILED) {
        perror(arguments[1]);
        return 1;
    }
    static double rates[WAYS][MOST_ROUNDS];
    for (int round = -1; round < rounds; round++)  // the first is not counted
        for (int way = 0; way < WAYS; way++) {
            const size_t half = size / 2;
            Part one = {bytes, half, way, 0}, other = {bytes + half, size - half, way, 0};
            pthread_t thread;
            const double start = seconds();
            if (pthread_create(&thread, NULL, work, &other)) return 1;
            work(&one);
            pthread_join(thread, NULL);
            if (round >= 0) rates[way][round] = size / (seconds() - start) / 1e9;
        }
    for (int way = 0; way < WAYS; way++) {
        qsort(rates[way], rounds, sizeof(double), ascending);
        printf("%-10s %5.1f GB/s [%.1f-%.1f]\n", NAMES[way], rates[way][rounds / 2],
               rates[way][rounds / 4], rates[way][3 * rounds / 4]);
    }
    return 0;
}
