/* AVX-VNNI: 256-bit vpdpbusd on CPUs without AVX512. -DLOWGMM_AVXVNNI_AS_VL compiles the same loops for AVX512VL's encoding of
 * that instruction, so that a CPU with AVX512 can test them. */
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef LOWGMM_AVXVNNI_AS_VL
#define TARGET __attribute__((target("avx2,avx512f,avx512vl,avx512vnni")))
#define DOT _mm256_dpbusd_epi32
#define FEATURE "avx512vnni"
#else
#define TARGET __attribute__((target("avx2,avxvnni")))
#define DOT _mm256_dpbusd_avx_epi32
#endif
enum { CHANNELS = 16 };
#include "rows.h"
#include <cpuid.h>
#include <immintrin.h>

static int supported(void)
{
    __builtin_cpu_init();
#ifdef LOWGMM_AVXVNNI_AS_VL
    return __builtin_cpu_supports("avx512vnni");
#else
    unsigned a, b, c, d; /* __builtin_cpu_supports does not know this one in every compiler */
    return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#endif
}

enum { ROWS = 6, AHEAD = 1024 };

FN __m256i row_at(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

FN void dot_steps(int32_t (*acc)[CHANNELS], const struct tile *t, int64_t from, int64_t to, const int rows, const int bits)
{
    const uint8_t *w = t->w + from * 64;
    const __m256i low = _mm256_set1_epi8(15);
    __m256i sums[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) sums[r][i] = _mm256_loadu_si256((const void *)&acc[r][8 * i]);
    for (int64_t step = from; step < to; ++step, w += 64) {
        _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
        __m256i v[2] = {_mm256_loadu_si256((const void *)w), _mm256_loadu_si256((const void *)(w + 32))};
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                if (bits == 8) {
                    sums[r][i] = DOT(sums[r][i], v[i], row_at(t->x[r] + 4 * step));
                    continue;
                }
                __m256i first = _mm256_and_si256(v[i], low), second = _mm256_and_si256(_mm256_srli_epi16(v[i], 4), low);
                sums[r][i] = DOT(sums[r][i], first, row_at(t->x[r] + 8 * step));
                sums[r][i] = DOT(sums[r][i], second, row_at(t->x[r] + 8 * step + 4));
            }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) _mm256_storeu_si256((void *)&acc[r][8 * i], sums[r][i]);
}

#define MOST_ROWS 6
#include "narrow_tile.h"

const struct isa lowgmm_avxvnni = {
    "avxvnni", supported, CHANNELS, ROWS, 1, 4, 8, tile, quantize_row, activate_row, combine_row,
};
#endif
