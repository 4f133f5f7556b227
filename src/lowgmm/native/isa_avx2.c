/* AVX2. Bytes are multiplied exactly: INT8 widened to 16 bits (vpmaddubsw would saturate), INT4 with vpmaddubsw, whose sums of
 * two products stay below 2 * 15 * 128. */
#if defined(__x86_64__) && defined(__GNUC__)
#define TARGET __attribute__((target("avx2")))
enum { CHANNELS = 16 };
#include "rows.h"
#include <immintrin.h>

static int supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}

enum { ROWS = 3, AHEAD = 1024 };

FN int32_t four_at(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, 4);
    return four;
}

FN void dot_steps(int32_t (*acc)[CHANNELS], const struct tile *t, int64_t from, int64_t to, const int rows, const int bits)
{
    const uint8_t *w = t->w + from * 64;
    if (bits == 8) {
        /* sums[r][i]: channels 4i … 4i+3, each as two neighbouring partial sums */
        __m256i sums[ROWS][4];
#pragma GCC unroll 3
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) sums[r][i] = _mm256_setzero_si256();
        for (int64_t step = from; step < to; ++step, w += 64) {
            _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            __m256i x[ROWS];
#pragma GCC unroll 3
            for (int r = 0; r < rows; ++r)
                x[r] = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four_at(t->x[r] + 4 * step))));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(w + 16 * i)));
#pragma GCC unroll 3
                for (int r = 0; r < rows; ++r) sums[r][i] = _mm256_add_epi32(sums[r][i], _mm256_madd_epi16(wide, x[r]));
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                int32_t pairs[8];
                _mm256_storeu_si256((void *)pairs, sums[r][i]);
                for (int c = 0; c < 4; ++c) acc[r][4 * i + c] += pairs[2 * c] + pairs[2 * c + 1];
            }
        return;
    }
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i sums[ROWS][2];
#pragma GCC unroll 3
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) sums[r][i] = _mm256_loadu_si256((const void *)&acc[r][8 * i]);
    for (int64_t step = from; step < to; ++step, w += 64) {
        _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            __m256i v = _mm256_loadu_si256((const void *)(w + 32 * i));
            __m256i first = _mm256_and_si256(v, low), second = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
#pragma GCC unroll 3
            for (int r = 0; r < rows; ++r) {
                __m256i a = _mm256_set1_epi32(four_at(t->x[r] + 8 * step));
                __m256i b = _mm256_set1_epi32(four_at(t->x[r] + 8 * step + 4));
                __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(first, a), _mm256_maddubs_epi16(second, b));
                sums[r][i] = _mm256_add_epi32(sums[r][i], _mm256_madd_epi16(both, ones));
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) _mm256_storeu_si256((void *)&acc[r][8 * i], sums[r][i]);
}

#define MOST_ROWS 3
#include "narrow_tile.h"

const struct isa lowgmm_avx2 = {"avx2", supported, CHANNELS, ROWS, 0, 4, 8, tile, quantize_row, activate_row, combine_row};
#endif
