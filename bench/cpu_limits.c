/* What this CPU can do at most: a plain read loop, and vpdpbusd on registers alone. Built and called by cpu_layer.py, on the same
 * threads as the library (it passes GOMP_parallel). */
#include <immintrin.h>
#include <stdint.h>

typedef void (*parallel_t)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

struct job {
    const char *data;
    int64_t bytes, next, sum;
};

enum { CHUNK = 1 << 20 };

/* Read `bytes` (a multiple of CHUNK) once; threads take chunks in turns. Large ones, and no prefetches: both were measured to be
 * faster so, by up to a third where memory gives most. */
__attribute__((target("avx512f"))) static void read_work(void *p)
{
    struct job *j = p;
    __m512i a[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (;;) {
        int64_t at = __atomic_fetch_add(&j->next, CHUNK, __ATOMIC_RELAXED);
        if (at >= j->bytes) break;
        for (int64_t i = at; i < at + CHUNK; i += 256)
            for (int k = 0; k < 4; ++k) a[k] = _mm512_add_epi64(a[k], _mm512_loadu_si512(j->data + i + 64 * k));
    }
    __m512i all = _mm512_add_epi64(_mm512_add_epi64(a[0], a[1]), _mm512_add_epi64(a[2], a[3]));
    __atomic_fetch_add(&j->sum, _mm512_reduce_add_epi64(all), __ATOMIC_RELAXED);
}

int64_t read_once(const char *data, int64_t bytes, parallel_t parallel, unsigned threads)
{
    struct job j = {data, bytes, 0, 0};
    parallel(read_work, &j, threads, 0);
    return j.sum;
}

/* 28 independent sums, `bytes` rounds of them per thread: 28 * 64 * 2 operations a round. */
__attribute__((target("avx512f,avx512vnni"))) static void peak_work(void *p)
{
    struct job *j = p;
    __m512i s[28], x = _mm512_set1_epi8(1), w = _mm512_set1_epi8(3);
#pragma GCC unroll 28
    for (int k = 0; k < 28; ++k) s[k] = _mm512_setzero_si512();
    for (int64_t i = 0; i < j->bytes; ++i) {
#pragma GCC unroll 28
        for (int k = 0; k < 28; ++k) {
            s[k] = _mm512_dpbusd_epi32(s[k], w, x);
            __asm__("" : "+v"(s[k]));
        }
    }
    int64_t sum = 0;
#pragma GCC unroll 28
    for (int k = 0; k < 28; ++k) sum += _mm512_reduce_add_epi32(s[k]);
    __atomic_fetch_add(&j->sum, sum, __ATOMIC_RELAXED);
}

int64_t peak_once(int64_t rounds, parallel_t parallel, unsigned threads)
{
    struct job j = {0, rounds, 0, 0};
    parallel(peak_work, &j, threads, 0);
    return j.sum;
}
