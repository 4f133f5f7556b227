/* AVX512-VNNI: tiles of 7 rows by 64 channels fill the 32 registers (28 sums, 4 of weights; rows come as broadcast operands). */
#if defined(__x86_64__) && defined(__GNUC__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")))
enum { CHANNELS = 64 };
#include "rows.h"
#include <immintrin.h>

enum { ROWS = 7, COLUMNS = 4, STEP = 256, FEW = 4, AHEAD = 4096 };

static int supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* acc + w · x, the same four bytes of x for each of the 16 channels. The broadcast is an operand from memory: GCC would rather spend
 * a register on it, of which 28 sums and 4 vectors of weights leave none. */
FN __m512i dot_at(__m512i acc, __m512i w, const int8_t *x)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    int32_t four; /* sanitizers do not see what assembly reads */
    memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
#else
    typedef struct __attribute__((packed, may_alias)) { int32_t four; } bytes;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const bytes *)x));
    return acc;
#endif
}

/* What to fetch at each step, into L2. Few rows: at the end of a block the next one's start, so that none begins by waiting for
 * memory; the stream itself is the processor's to fetch, and fetching it here too is slower. Many rows: the next block, all of it;
 * four tiles fetch the four cache lines of each step, and four more an expert's rows; two or three tiles, also of few rows, fetch
 * two lines each, or what is left would be waited for in every step.
 *
 * The sums stay in one function, under constant indices: handed to another one, GCC keeps a copy in memory. */
#define FETCH()                                                                                                                \
    if (rows <= FEW && !also) {                                                                                                \
        if (step >= turn)                                                                                                      \
            for (int c = 0; c < COLUMNS; ++c) _mm_prefetch((const char *)t->next + (step - turn) * STEP + 64 * c, _MM_HINT_T1);\
    } else {                                                                                                                   \
        _mm_prefetch(fetch + step * STEP, _MM_HINT_T1);                                                                        \
        if (also) _mm_prefetch(also + step * STEP, _MM_HINT_T1);                                                               \
    }
#define START(from)                                                                                                            \
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; ++r)                                                                     \
        _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) acc[r][c] = _mm512_set1_epi32(from)

#define PLAN()                                                                                                                 \
    if (t->scales_w) /* needed at the end of the block, or of its first group */                                               \
        for (int c = 0; c < COLUMNS; ++c) _mm_prefetch((const char *)(t->scales_w + 16 * c), _MM_HINT_T0);                     \
    const char *fetch = t->fetch[0], *also = t->fetch[1];                                                                      \
    const int64_t turn = t->steps > AHEAD / STEP ? t->steps - AHEAD / STEP : 0;                                                \
    (void)fetch, (void)also, (void)turn

FN void dot8(const struct tile *t, union sums *s, const int rows)
{
    __m512i acc[ROWS][COLUMNS];
    START(t->start[r][0]);
    PLAN();
    const int64_t steps = t->steps;
    const uint8_t *w = t->w;
    const int8_t *x[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) x[r] = t->x[r];
    for (int64_t step = 0; step < steps; ++step, w += STEP) {
        FETCH();
        __m512i b[COLUMNS];
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) b[c] = _mm512_loadu_si512(w + 64 * c);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) acc[r][c] = dot_at(acc[r][c], b[c], x[r] + 4 * step);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) _mm512_storeu_si512(&s->i[r][16 * c], acc[r][c]);
}

FN __m512 scales_at(const struct tile *t, const float *scales, int c)
{
    if (t->channels >= CHANNELS) return _mm512_loadu_ps(scales + 16 * c); /* masked accesses are many times slower on Zen 4 */
    int64_t left = t->channels - 16 * c;
    return _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1), scales + 16 * c);
}

FN void dot4(const struct tile *t, union sums *s, const int rows)
{
    const int one_group = t->steps <= t->group_steps;
    const __m512i low = _mm512_set1_epi8(15);
    /* High halves left in place are 16 times too large: with sums of their own (|sum| <= 240 · 128 · K/2 fits, MAX_EXACT_K says) they
     * need no shift by step, but one at the end. */
    const int apart = rows <= 3;
    PLAN();
    const int64_t steps = t->steps, group_steps = t->group_steps;
    const float *next_scales = t->next_scales;
    const uint8_t *w = t->w;
    const int8_t *x[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) x[r] = t->x[r];
    for (int64_t group = 0, step = 0; step < steps; ++group) {
        const int64_t end = step + group_steps < steps ? step + group_steps : steps;
        const float *scales = t->scales_w + group * t->scale_group;
        if (!one_group) { /* a few groups ahead, and on to the next block's first */
            const float *soon = end + 3 * group_steps < steps ? scales + 4 * t->scale_group : next_scales;
            if (soon == next_scales) next_scales += t->scale_group;
            for (int c = 0; c < COLUMNS; ++c) _mm_prefetch((const char *)(soon + 16 * c), _MM_HINT_T0);
        }
        __m512i acc[ROWS][COLUMNS];
        START(t->start[r][group]);
        __m512i high[ROWS][COLUMNS];
        if (apart)
            _Pragma("GCC unroll 8") for (int r = 0; r < rows; ++r)
                _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c) high[r][c] = _mm512_setzero_si512();
        for (; step < end; ++step, w += STEP) {
            FETCH();
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) {
                __m512i first = _mm512_and_si512(_mm512_loadu_si512(w + 64 * c), low);
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) acc[r][c] = dot_at(acc[r][c], first, x[r] + 8 * step);
            }
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; ++c) {
                __m512i both = _mm512_loadu_si512(w + 64 * c);
                __m512i second = apart ? _mm512_andnot_si512(low, both) : _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) {
                    if (apart) high[r][c] = dot_at(high[r][c], second, x[r] + 8 * step + 4);
                    else acc[r][c] = dot_at(acc[r][c], second, x[r] + 8 * step + 4);
                }
            }
        }
        if (apart)
            _Pragma("GCC unroll 8") for (int r = 0; r < rows; ++r)
                _Pragma("GCC unroll 4") for (int c = 0; c < COLUMNS; ++c)
                    acc[r][c] = _mm512_add_epi32(acc[r][c], _mm512_srai_epi32(high[r][c], 4));
        if (one_group) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; ++c) _mm512_storeu_si512(&s->i[r][16 * c], acc[r][c]);
            return;
        }
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c) {
            const __m512 scale = scales_at(t, scales, c);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][c]), scale);
                if (group) v = _mm512_add_ps(_mm512_loadu_ps(&s->f[r][16 * c]), v);
                _mm512_storeu_ps(&s->f[r][16 * c], v);
            }
        }
    }
}

FN __m512i as_bf16(__m512 v) /* in the upper halves: to_bf16 */
{
    const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}

/* store_tile's BF16, past the caches: a store that misses would first read the line that it overwrites, and hold up those behind it. */
FN void stream_tile(const struct tile *t, int rows, const union sums *s)
{
    const float *scales_w = t->scales_w ? t->scales_w : one, *bias = t->bias ? t->bias : nothing;
    const int one_group = t->steps <= t->group_steps;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i upper = _mm512_add_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x40004)), _mm512_set1_epi32(0x30001));
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < CHANNELS; c += 32) {
            __m512i half[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const int at = c + 16 * i;
                __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(&s->i[r][at])), _mm512_loadu_ps(scales_w + at));
                if (!one_group) v = _mm512_loadu_ps(&s->f[r][at]);
                half[i] = as_bf16(_mm512_add_ps(_mm512_mul_ps(v, _mm512_set1_ps(t->scales_x[r])), _mm512_loadu_ps(bias + at)));
            }
            _mm512_stream_si512((__m512i *)(t->out[r] + 2 * c), _mm512_permutex2var_epi16(half[0], upper, half[1]));
        }
}

/* Not inlined: beside it GCC would keep sums of the loops in memory. */
TARGET static __attribute__((noinline)) void finish_tile(const struct tile *t, int rows, const union sums *s)
{
    if (t->stream && t->out_kind == BF16 && t->channels >= CHANNELS) stream_tile(t, rows, s);
    else store_tile(t, rows, s);
}

#define CASE(n) case n: bits == 8 ? dot8(t, &s, n) : dot4(t, &s, n); break;
FN void tile_of(const struct tile *t, int rows, const int bits)
{
    union sums s;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) }
    finish_tile(t, rows, &s);
}

TARGET static void tile8(const struct tile *t, int rows) { tile_of(t, rows, 8); }
TARGET static void tile4(const struct tile *t, int rows) { tile_of(t, rows, 4); }
static void tile(const struct tile *t, int rows) { t->bits == 8 ? tile8(t, rows) : tile4(t, rows); }

const struct isa lowgmm_avx512vnni = {
    "avx512vnni", supported, CHANNELS, ROWS, 1, 4, 8, tile, quantize_row, activate_row, combine_row,
};
#endif
