/* The CPU backend's inner loops: quantise tokens, and multiply them by their experts' INT8 weights.
 *
 * Plain C with a plain C ABI: no Python, no torch headers. Python loads it with ctypes (native/__init__.py) and passes the
 * address of GOMP_parallel in the OpenMP runtime that torch itself uses, so the work runs on torch's own threads: one pool,
 * as many threads as torch.get_num_threads() says, no oversubscription.
 *
 * Weights are packed as unsigned bytes w + 128 in [E][N/64][K/4][64][4]: one step of the inner loop reads 256 consecutive bytes
 * (4 of K for 64 channels), so an expert is read as one stream. vpdpbusd multiplies unsigned by signed bytes; the surplus
 * 128 * sum(x) is one number per token and is taken away at the end. All sums are exact in INT32.
 *
 * Compiled with -ffp-contract=off: the epilogue rounds after every operation, as the numerics contract says.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define INLINE TARGET static inline __attribute__((always_inline))

enum { CHANNELS = 64, K_STEP = 4, ROWS = 7, ROW_CHUNK = 768, QUANTIZE_ROWS = 8, PREFETCH = 2048 };
enum { F32 = 0, BF16 = 1, F16 = 2, I32 = 3 };

typedef void (*parallel_t)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

int lowgmm_supported(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* ---- quantise ------------------------------------------------------------------------------------------------------------ */

struct quantize_args {
    const void *x;    /* [rows, K] of kind, row stride in elements */
    int8_t *q;        /* [rows, q_stride]: K values, then zeros */
    float *scales;    /* [rows] */
    int32_t *sums;    /* [rows]: sum of the quantised row */
    int64_t rows, K, x_stride, q_stride;
    int32_t kind;     /* F32, BF16, F16, or I32 for a row that is int8 already (scales untouched) */
    float clip;       /* infinity for none */
    int64_t next;     /* ticket */
};

INLINE __m512 load_float(const char *row, int64_t k, __mmask16 m, int32_t kind)
{
    const float *wide = (const float *)row + k;
    const uint16_t *narrow = (const uint16_t *)row + k;
    /* The full case apart: masked accesses are many times slower on some CPUs (Zen 4). */
    if (kind == F32) return m == 0xffff ? _mm512_loadu_ps(wide) : _mm512_maskz_loadu_ps(m, wide);
    __m256i half = m == 0xffff ? _mm256_loadu_si256((const void *)narrow) : _mm256_maskz_loadu_epi16(m, narrow);
    if (kind == F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __mmask16 tail(int64_t k, int64_t K)
{
    return K - k >= 16 ? 0xffff : K <= k ? 0 : (__mmask16)((1u << (K - k)) - 1);
}

INLINE void quantize_row(struct quantize_args *a, int64_t row, int32_t kind)
{
    const char *x = (const char *)a->x + row * a->x_stride * (kind == F32 ? 4 : 2);
    int8_t *q = a->q + row * a->q_stride;
    /* The bits of |x| order like |x| itself, with Inf and then NaN on top: one integer maximum finds all three. */
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i largest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t k = 0; k < a->K; k += 32)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            __m512i bits = _mm512_castps_si512(load_float(x, k + 16 * i, tail(k + 16 * i, a->K), kind));
            largest[i] = _mm512_max_epi32(largest[i], _mm512_and_si512(bits, magnitude));
        }
    const int32_t top_bits = _mm512_reduce_max_epi32(_mm512_max_epi32(largest[0], largest[1])), infinity = 0x7f800000;
    float absmax, floor = 0x1p-100f;
    memcpy(&absmax, &top_bits, 4);
    const int nan = top_bits > infinity, clipped = absmax > a->clip;
    if (clipped) absmax = a->clip;
    const float inverse = 127.0f / (absmax > floor ? absmax : floor);
    a->scales[row] = nan ? __builtin_nanf("") : absmax / 127.0f;
    const __m512 times = _mm512_set1_ps(inverse), top = _mm512_set1_ps(127.0f), bottom = _mm512_set1_ps(-127.0f);
    const int plain = !clipped && top_bits < infinity; /* |x * inverse| rounds to at most 127 */
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < a->q_stride; k += 16) {
        __m512 v = _mm512_mul_ps(load_float(x, k, tail(k, a->K), kind), times);
        if (!plain) {
            __mmask16 number = nan ? 0 : _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
            v = _mm512_maskz_max_ps(number, _mm512_min_ps(v, top), bottom);
        }
        __m512i i = _mm512_cvtps_epi32(v); /* rounds half to even */
        sum = _mm512_add_epi32(sum, i);
        __mmask16 write = tail(k, a->q_stride);
        if (write == 0xffff) _mm_storeu_si128((void *)(q + k), _mm512_cvtepi32_epi8(i));
        else _mm_mask_storeu_epi8(q + k, write, _mm512_cvtepi32_epi8(i));
    }
    a->sums[row] = _mm512_reduce_add_epi32(sum);
}

INLINE void sum_row(struct quantize_args *a, int64_t row)
{
    const int8_t *x = (const int8_t *)a->x + row * a->x_stride;
    __m512i sum = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
    for (int64_t k = 0; k < a->K; k += 64) {
        __mmask64 m = a->K - k >= 64 ? ~0ull : (1ull << (a->K - k)) - 1;
        sum = _mm512_dpbusd_epi32(sum, ones, _mm512_maskz_loadu_epi8(m, x + k));
    }
    a->sums[row] = _mm512_reduce_add_epi32(sum);
    if (a->q) {
        memcpy(a->q + row * a->q_stride, x, a->K);
        memset(a->q + row * a->q_stride + a->K, 0, a->q_stride - a->K);
    }
}

TARGET static void quantize_work(void *data)
{
    struct quantize_args *a = data;
    for (;;) {
        int64_t first = __atomic_fetch_add(&a->next, QUANTIZE_ROWS, __ATOMIC_RELAXED);
        if (first >= a->rows) return;
        for (int64_t row = first; row < first + QUANTIZE_ROWS && row < a->rows; ++row) switch (a->kind) {
            case F32: quantize_row(a, row, F32); break;
            case BF16: quantize_row(a, row, BF16); break;
            case F16: quantize_row(a, row, F16); break;
            default: sum_row(a, row);
            }
    }
}

/* ---- multiply ------------------------------------------------------------------------------------------------------------ */

struct gmm_args {
    const int8_t *x;        /* [M, x_stride], K values and zeros up to a multiple of 4 */
    const int32_t *sums;    /* [M] */
    const float *scales_x;  /* [M] or NULL */
    const uint8_t *w;       /* packed, see above */
    const float *scales_w;  /* [E, N] or NULL */
    const float *bias;      /* [E, N] or NULL */
    char *out;              /* [M, N] of out_kind, row stride in elements */
    const int64_t *offsets; /* [E+1] */
    int64_t E, N, K, x_stride, out_stride;
    int32_t out_kind;
    int64_t next;           /* ticket */
};

/* What one tile needs: ROWS or fewer rows from x, 64 channels from w. */
struct tile {
    const int8_t *x;
    const uint8_t *w;
    const int32_t *sums;
    const float *scales_x, *scales_w, *bias;
    char *out;
    int64_t x_stride, out_stride, k_steps, channels;
    int32_t out_kind;
    const uint8_t *next; /* fetched into L2 meanwhile: a cache line per k step of the block that comes after this one */
};

/* Full vectors apart from masked ones: masked stores are many times slower on some CPUs (Zen 4). */
INLINE void store_words(void *at, __m512i words, __mmask16 m)
{
    if (m == 0xffff) _mm512_storeu_si512(at, words);
    else _mm512_mask_storeu_epi32(at, m, words);
}

INLINE void store_halves(void *at, __m256i halves, __mmask16 m)
{
    if (m == 0xffff) _mm256_storeu_si256(at, halves);
    else _mm256_mask_storeu_epi16(at, m, halves);
}

/* float32 to bf16, round half to even; a NaN keeps its upper half and becomes quiet. */
INLINE __m256i to_bf16(__m512 v)
{
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* Scale and store a tile's sums: out = sum * scales_w * scales_x + bias. `full`: all 64 channels exist. */
INLINE void store_tile(const struct tile *t, __m512i (*acc)[4], const int rows, const int full)
{
    __mmask16 m[4];
    __m512 scale[4], bias[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        m[c] = full ? 0xffff : tail(16 * c, t->channels);
        scale[c] = t->scales_w ? _mm512_maskz_loadu_ps(m[c], t->scales_w + 16 * c) : _mm512_set1_ps(1.0f);
        bias[c] = t->bias ? _mm512_maskz_loadu_ps(m[c], t->bias + 16 * c) : _mm512_setzero_ps();
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        const __m512i surplus = _mm512_set1_epi32((int32_t)(128u * (uint32_t)t->sums[r]));
        const __m512 row_scale = _mm512_set1_ps(t->scales_x ? t->scales_x[r] : 1.0f);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            if (!full && !m[c]) continue;
            const int64_t at = r * t->out_stride + 16 * c;
            const __m512i sum = _mm512_sub_epi32(acc[r][c], surplus);
            if (t->out_kind == I32) {
                store_words((int32_t *)t->out + at, sum, m[c]);
                continue;
            }
            __m512 v = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale[c]), row_scale);
            if (t->bias) v = _mm512_add_ps(v, bias[c]);
            if (t->out_kind == F32) store_words((float *)t->out + at, _mm512_castps_si512(v), m[c]);
            else if (t->out_kind == BF16) store_halves((uint16_t *)t->out + at, to_bf16(v), m[c]);
            else store_halves((uint16_t *)t->out + at, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT), m[c]);
        }
    }
}

INLINE void tile_of(const struct tile *t, const int rows)
{
    __m512i acc[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) acc[r][c] = _mm512_setzero_si512();
    const uint8_t *w = t->w;
    for (int64_t k = 0; k < t->k_steps; ++k, w += CHANNELS * K_STEP) {
        __m512i b[4];
        /* Few rows: the stream itself, a little ahead. Many: the next block, so that none starts by waiting for memory. */
        if (rows > 4) _mm_prefetch((const char *)t->next + CHANNELS * K_STEP * k, _MM_HINT_T1);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            b[c] = _mm512_loadu_si512(w + 64 * c);
            if (rows <= 4) _mm_prefetch((const char *)w + 64 * c + PREFETCH, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            int32_t four;
            memcpy(&four, t->x + r * t->x_stride + k * K_STEP, 4);
            __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) acc[r][c] = _mm512_dpbusd_epi32(acc[r][c], b[c], a);
        }
    }
    if (t->channels >= CHANNELS) store_tile(t, acc, rows, 1);
    else store_tile(t, acc, rows, 0);
}

TARGET static void tile_any(const struct tile *t, int rows)
{
    switch (rows) {
    case 1: tile_of(t, 1); break;
    case 2: tile_of(t, 2); break;
    case 3: tile_of(t, 3); break;
    case 4: tile_of(t, 4); break;
    case 5: tile_of(t, 5); break;
    case 6: tile_of(t, 6); break;
    default: tile_of(t, 7); break;
    }
}

/* All rows [first, last) of one expert against one block of 64 channels; this thread's next block lies `ahead` blocks on. */
TARGET static void block_of(const struct gmm_args *a, int64_t e, int64_t first, int64_t last, int64_t block,
                            int64_t ahead)
{
    static const int64_t sizes[] = {4, 2, 2, 4};
    int64_t blocks = (a->N + CHANNELS - 1) / CHANNELS, k_steps = (a->K + K_STEP - 1) / K_STEP, n = block * CHANNELS;
    struct tile t = {
        .w = a->w + (e * blocks + block) * k_steps * CHANNELS * K_STEP,
        .scales_w = a->scales_w ? a->scales_w + e * a->N + n : 0,
        .bias = a->bias ? a->bias + e * a->N + n : 0,
        .x_stride = a->x_stride,
        .out_stride = a->out_stride,
        .k_steps = k_steps,
        .channels = a->N - n,
        .out_kind = a->out_kind,
    };
    int64_t tiles = (last - first + ROWS - 1) / ROWS, row = first;
    for (int64_t i = 0; i < tiles; ++i) {
        /* As even as possible: 16 rows are 6 + 5 + 5, not 7 + 7 + 2. */
        int64_t rows = (last - row + (tiles - i) - 1) / (tiles - i);
        /* Four tiles fetch the four cache lines of each k step; further ones have nothing left to fetch. */
        t.next = t.w + (i < 4 ? ahead * k_steps * CHANNELS * K_STEP + 64 * i : 0);
        t.x = a->x + row * a->x_stride;
        t.sums = a->sums + row;
        t.scales_x = a->scales_x ? a->scales_x + row : 0;
        t.out = a->out + (row * a->out_stride + n) * sizes[a->out_kind];
        tile_any(&t, (int)rows);
        row += rows;
    }
}

TARGET static void gmm_work(void *data)
{
    struct gmm_args *a = data;
    int64_t blocks = (a->N + CHANNELS - 1) / CHANNELS, passed = 0, e = 0, chunk = a->offsets[0];
    /* Tickets only grow, so each thread walks the experts once. A ticket is a chunk of one expert's rows and a block of channels. */
    int64_t ticket = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED);
    while (e < a->E) {
        if (chunk >= a->offsets[e + 1]) {
            ++e;
            if (e < a->E) chunk = a->offsets[e];
            continue;
        }
        if (ticket >= passed + blocks) {
            passed += blocks;
            chunk += ROW_CHUNK;
            continue;
        }
        int64_t end = chunk + ROW_CHUNK < a->offsets[e + 1] ? chunk + ROW_CHUNK : a->offsets[e + 1];
        int64_t following = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED);
        block_of(a, e, chunk, end, ticket - passed, following - ticket);
        ticket = following;
    }
}

/* Sizes of the argument structs: what Python declares must be what was compiled. */
int lowgmm_layout(void) { return (int)(sizeof(struct quantize_args) << 16 | sizeof(struct gmm_args)); }

void lowgmm_quantize(struct quantize_args *a, parallel_t parallel, unsigned threads)
{
    a->next = 0;
    if (parallel && threads > 1 && a->rows > QUANTIZE_ROWS) parallel(quantize_work, a, threads, 0);
    else quantize_work(a);
}

void lowgmm_gmm(struct gmm_args *a, parallel_t parallel, unsigned threads)
{
    a->next = 0;
    if (parallel && threads > 1) parallel(gmm_work, a, threads, 0);
    else gmm_work(a);
}

#else
int lowgmm_supported(void) { return 0; }
int lowgmm_layout(void) { return 0; }
#endif
