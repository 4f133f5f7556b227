/* AVX512-VNNI: tiles of 7 rows by 64 channels fill the 32 registers (28 sums, 4 of weights; rows come as broadcast operands). */
#if defined(__x86_64__) && defined(__GNUC__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")))
enum { CHANNELS = 64 };
#include "rows.h"
#include <immintrin.h>

enum { ROWS = 7, COLUMNS = 4, STEP = 256, FEW = 4, AHEAD = 2048 };

static int supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

FN __m512i row_at(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}

/* Few rows: the stream itself, a little ahead, and on to the next block at its end, so that none starts by waiting for memory.
 * Many rows: the next block, into L2; four tiles fetch the four cache lines of each step. */
FN void fetch(const struct tile *t, const uint8_t *w, int64_t step, const int rows)
{
    if (rows <= FEW) {
        int64_t over = (step + AHEAD / STEP - t->steps) * STEP;
        const uint8_t *from = over < 0 ? w + AHEAD : t->next + over;
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) _mm_prefetch((const char *)from + 64 * c, _MM_HINT_T0);
    } else if (t->quarter >= 0) {
        _mm_prefetch((const char *)t->next + STEP * step + 64 * t->quarter, _MM_HINT_T1);
    }
}

FN void dot_step(__m512i (*acc)[COLUMNS], const struct tile *t, int64_t step, const int rows, const int bits)
{
    const uint8_t *w = t->w + step * STEP;
    fetch(t, w, step, rows);
    if (bits == 8) {
        __m512i b[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) b[c] = _mm512_loadu_si512(w + 64 * c);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            __m512i a = row_at(t->x[r] + 4 * step);
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], b[c], a);
        }
        return;
    }
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; ++c) {
        __m512i v = _mm512_loadu_si512(w + 64 * c);
        __m512i first = _mm512_and_si512(v, low), second = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], first, row_at(t->x[r] + 8 * step));
            acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], second, row_at(t->x[r] + 8 * step + 4));
        }
    }
}

FN void dot(const struct tile *t, union sums *s, const int rows, const int bits)
{
    const int one_group = t->steps <= t->group_steps;
    for (int64_t group = 0, step = 0; step < t->steps; ++group) {
        int64_t end = step + t->group_steps < t->steps ? step + t->group_steps : t->steps;
        __m512i acc[ROWS][COLUMNS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) acc[r][c] = _mm512_set1_epi32(t->start[r][group]);
        for (; step < end; ++step) dot_step(acc, t, step, rows, bits);
        if (one_group) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; ++c) _mm512_storeu_si512(&s->i[r][16 * c], acc[r][c]);
            return;
        }
        const float *scales = t->scales_w + group * t->scale_group;
        _mm_prefetch((const char *)(scales + t->scale_group), _MM_HINT_T0);
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) {
            __mmask16 m = t->channels - 16 * c >= 16 ? 0xffff : t->channels <= 16 * c ? 0 : (1u << (t->channels - 16 * c)) - 1;
            __m512 scale = m == 0xffff ? _mm512_loadu_ps(scales + 16 * c) : _mm512_maskz_loadu_ps(m, scales + 16 * c);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][c]), scale);
                if (group) v = _mm512_add_ps(_mm512_loadu_ps(&s->f[r][16 * c]), v);
                _mm512_storeu_ps(&s->f[r][16 * c], v);
            }
        }
    }
}

#define CASE(n) case n: dot(t, &s, n, bits); break;
FN void tile_of(const struct tile *t, int rows, const int bits)
{
    union sums s;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) }
    store_tile(t, rows, &s);
}

TARGET static void tile8(const struct tile *t, int rows) { tile_of(t, rows, 8); }
TARGET static void tile4(const struct tile *t, int rows) { tile_of(t, rows, 4); }
static void tile(const struct tile *t, int rows) { t->bits == 8 ? tile8(t, rows) : tile4(t, rows); }

const struct isa lowgmm_avx512vnni = {
    "avx512vnni", supported, CHANNELS, ROWS, 1, 4, 8, tile, quantize_row, activate_row, combine_row,
};
#endif
