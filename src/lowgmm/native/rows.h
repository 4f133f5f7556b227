/* Everything about rows and epilogues, in plain C that each isa_*.c compiles for its instruction set.
 *
 * Only additions, multiplications, divisions, comparisons and integer operations, none of them fused: the results do not depend
 * on the instruction set. Include it after defining TARGET (function attribute) and CHANNELS.
 */
#include "lowgmm.h"
#include <stddef.h>
#include <string.h>

#define FN TARGET static inline __attribute__((always_inline))
enum { SPAN = 256 }; /* elements handled at a time: buffers of this size stay in L1 */

FN float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
FN uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

/* Conversions in integer arithmetic: exact, round half to even, and vectorised on every target. */
FN float from_half(uint16_t h)
{
    uint32_t magnitude = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    float value = as_float(magnitude << 13) * 0x1p112f;
    uint32_t bits = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : as_bits(value);
    return as_float(bits | sign);
}

FN uint16_t to_half(float f)
{
    uint32_t bits = as_bits(f), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    uint32_t small = as_bits(as_float(magnitude < 0x38800000u ? magnitude : 0) + 0.5f) - as_bits(0.5f);
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t value = magnitude >= 0x477ff000u ? special : magnitude < 0x38800000u ? small : normal;
    return (uint16_t)(sign | value);
}

FN float from_bf16(uint16_t h) { return as_float((uint32_t)h << 16); }

FN uint16_t to_bf16(float f)
{
    uint32_t bits = as_bits(f), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
}

/* n <= SPAN elements of a row as floats. */
FN void widen(float *restrict to, const void *restrict row, int64_t at, int64_t n, int32_t kind)
{
    const float *wide = (const float *)row + at;
    const uint16_t *narrow = (const uint16_t *)row + at;
    if (kind == F32) memcpy(to, wide, (size_t)n * 4);
    else if (kind == BF16) for (int64_t i = 0; i < n; ++i) to[i] = from_bf16(narrow[i]);
    else for (int64_t i = 0; i < n; ++i) to[i] = from_half(narrow[i]);
}

FN void narrow(void *restrict row, int64_t at, const float *restrict from, int64_t n, int32_t kind)
{
    uint16_t *to = (uint16_t *)row + at;
    if (kind == F32) memcpy((float *)row + at, from, (size_t)n * 4);
    else if (kind == BF16) for (int64_t i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
    else for (int64_t i = 0; i < n; ++i) to[i] = to_half(from[i]);
}

/* ---- quantise: as quant.py defines it ---------------------------------------------------------------------------------- */

/* Negative surpluses of an int8 row, group by group. */
FN void starts_of(const int8_t *q, int64_t K, int64_t group, int32_t offset, int32_t *start)
{
    for (int64_t k = 0; k < K; k += group) {
        int64_t end = k + group < K ? k + group : K;
        int32_t sum = 0;
        for (int64_t i = k; i < end; ++i) sum += q[i];
        *start++ = -offset * sum;
    }
}

FN void copy_row(const struct quantize *a, int64_t row)
{
    const int8_t *x = (const int8_t *)a->x + row * a->x_stride;
    if (a->q) {
        memcpy(a->q + row * a->q_stride, x, (size_t)a->K);
        memset(a->q + row * a->q_stride + a->K, 0, (size_t)(a->q_stride - a->K));
    }
    if (a->start) starts_of(x, a->K, a->group, a->offset, a->start + row * ((a->K + a->group - 1) / a->group));
}

FN void quantize_floats(const struct quantize *a, int64_t row, int32_t kind)
{
    const char *x = (const char *)a->x + row * a->x_stride * (kind == F32 ? 4 : 2);
    int8_t *q = a->q + row * a->q_stride;
    float buffer[SPAN];
    /* The bits of |x| order like |x| itself, with Inf and then NaN on top: one integer maximum finds all three. */
    int32_t top_bits = 0;
    for (int64_t k = 0; k < a->K; k += SPAN) {
        int64_t n = a->K - k < SPAN ? a->K - k : SPAN;
        widen(buffer, x, k, n, kind);
        for (int64_t i = 0; i < n; ++i) {
            int32_t bits = (int32_t)(as_bits(buffer[i]) & 0x7fffffffu);
            top_bits = bits > top_bits ? bits : top_bits;
        }
    }
    const int32_t infinity = 0x7f800000;
    float absmax = as_float((uint32_t)top_bits), floor = 0x1p-100f;
    const int nan = top_bits > infinity, clipped = absmax > a->clip;
    if (clipped) absmax = a->clip;
    const float inverse = 127.0f / (absmax > floor ? absmax : floor);
    a->scales[row] = nan ? as_float(0x7fc00000u) : absmax / 127.0f;
    const int plain = !clipped && top_bits < infinity; /* |x * inverse| rounds to at most 127 */
    for (int64_t k = 0; k < a->K; k += SPAN) {
        int64_t n = a->K - k < SPAN ? a->K - k : SPAN;
        widen(buffer, x, k, n, kind);
        if (!plain)
            for (int64_t i = 0; i < n; ++i) {
                float v = buffer[i] * inverse;
                v = v < -127.0f ? -127.0f : v;
                v = v > 127.0f ? 127.0f : v;
                buffer[i] = nan || v != v ? 0.0f : v;
            }
        /* 1.5 * 2^23 more, and the sum's rounding (half to even) leaves the integer in its low bits. */
        if (plain) for (int64_t i = 0; i < n; ++i) q[k + i] = (int8_t)as_bits(buffer[i] * inverse + 0x1.8p23f);
        else for (int64_t i = 0; i < n; ++i) q[k + i] = (int8_t)as_bits(buffer[i] + 0x1.8p23f);
    }
    memset(q + a->K, 0, (size_t)(a->q_stride - a->K));
    if (a->start) starts_of(q, a->K, a->group, a->offset, a->start + row * ((a->K + a->group - 1) / a->group));
}

TARGET static void quantize_row(const struct quantize *a, int64_t row)
{
    switch (a->kind) {
    case F32: quantize_floats(a, row, F32); break;
    case BF16: quantize_floats(a, row, BF16); break;
    case F16: quantize_floats(a, row, F16); break;
    default: copy_row(a, row);
    }
}

/* ---- epilogue ------------------------------------------------------------------------------------------------------------ */

/* What changes no float: a factor of 1, and -0 more. */
#define EIGHT(v) v, v, v, v, v, v, v, v
static const float one[MAX_CHANNELS] = {EIGHT(1), EIGHT(1), EIGHT(1), EIGHT(1), EIGHT(1), EIGHT(1), EIGHT(1), EIGHT(1)};
static const float nothing[MAX_CHANNELS] = {EIGHT(-0.0f), EIGHT(-0.0f), EIGHT(-0.0f), EIGHT(-0.0f),
                                            EIGHT(-0.0f), EIGHT(-0.0f), EIGHT(-0.0f), EIGHT(-0.0f)};

/* out = sum * scales_w * scales_x + bias, rounded after each: in one loop, so that nothing between goes through memory. */
FN void store_rows(const struct tile *t, int rows, const union sums *s, const int64_t n, const int32_t kind, const int one_group)
{
    const float *scales_w = t->scales_w ? t->scales_w : one, *bias = t->bias ? t->bias : nothing;
    for (int r = 0; r < rows; ++r) {
        const float scale_x = t->scales_x[r];
        float *restrict wide = (float *)t->out[r];
        uint16_t *restrict half = (uint16_t *)t->out[r];
#define VALUE ((one_group ? (float)s->i[r][c] * scales_w[c] : s->f[r][c]) * scale_x + bias[c])
        if (kind == F32) for (int64_t c = 0; c < n; ++c) wide[c] = VALUE;
        else if (kind == BF16) for (int64_t c = 0; c < n; ++c) half[c] = to_bf16(VALUE);
        else for (int64_t c = 0; c < n; ++c) half[c] = to_half(VALUE);
#undef VALUE
    }
}

FN void store_kind(const struct tile *t, int rows, const union sums *s, const int32_t kind)
{
    const int one_group = t->steps <= t->group_steps;
    if (t->channels < CHANNELS && one_group) store_rows(t, rows, s, t->channels, kind, 1);
    else if (t->channels < CHANNELS) store_rows(t, rows, s, t->channels, kind, 0);
    else if (one_group) store_rows(t, rows, s, CHANNELS, kind, 1);
    else store_rows(t, rows, s, CHANNELS, kind, 0);
}

FN void store_tile(const struct tile *t, int rows, const union sums *s)
{
    if (t->out_kind == I32)
        for (int r = 0; r < rows; ++r) memcpy(t->out[r], s->i[r], (size_t)t->channels * 4);
    else if (t->out_kind == F32) store_kind(t, rows, s, F32);
    else if (t->out_kind == BF16) store_kind(t, rows, s, BF16);
    else store_kind(t, rows, s, F16);
}

/* ---- activation ---------------------------------------------------------------------------------------------------------- */

/* e^x within 1 ulp or so for x <= 0; 0 below -87, near which the smallest normal is: a factor of 1e38 would still see it. */
FN float exp_of_negative(float x)
{
    const int zero = x < -87.0f;
    x = x > -87.0f ? x : -87.0f;
    float n = (x * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f; /* ln 2 in two parts: the first product is exact */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    p *= as_float((uint32_t)((int32_t)n + 127) << 23);
    return zero ? 0.0f : p;
}

/* By e^-|x|, so that nothing overflows. */
FN float sigmoid(float x)
{
    float e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

FN float silu(float x) { return x * sigmoid(x); }

/* x * (1 + erf(x / sqrt 2)) / 2 with Φ(-|x|) = φ(x) · rational(|x|) (Hart's 1968 form of the upper tail). */
FN float gelu(float x)
{
    float z = x < 0 ? -x : x;
    float e = exp_of_negative(-0.5f * z * z);
    float p = 3.52624965998911e-2f, q = 8.83883476483184e-2f;
    p = p * z + 0.700383064443688f;
    p = p * z + 6.37396220353165f;
    p = p * z + 33.912866078383f;
    p = p * z + 112.079291497871f;
    p = p * z + 221.213596169931f;
    p = p * z + 220.206867912376f;
    q = q * z + 1.75566716318264f;
    q = q * z + 16.064177579207f;
    q = q * z + 86.7807322029461f;
    q = q * z + 296.564248779674f;
    q = q * z + 637.333633378831f;
    q = q * z + 793.826512519948f;
    q = q * z + 440.413735824752f;
    float tail = z > 12.0f ? 0.0f : e * p / q;
    return x * (x < 0 ? tail : 1.0f - tail);
}

FN void activate_span(const struct gating *a, const float *restrict gate, const float *restrict up, float *restrict h,
                      const int64_t n)
{
    const float limit = a->limit, alpha = a->alpha;
    float g[SPAN], u[SPAN];
    /* A NaN compares as false, and stays. */
    for (int64_t i = 0; i < n; ++i) g[i] = gate[i] > limit ? limit : gate[i];
    for (int64_t i = 0; i < n; ++i) u[i] = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
    switch (a->activation) {
    case SILU: for (int64_t i = 0; i < n; ++i) h[i] = silu(g[i]) * u[i]; break;
    case GELU: for (int64_t i = 0; i < n; ++i) h[i] = gelu(g[i]) * u[i]; break;
    case RELU2: for (int64_t i = 0; i < n; ++i) h[i] = (g[i] < 0 ? 0.0f : g[i]) * (g[i] < 0 ? 0.0f : g[i]) * u[i]; break;
    case SWIGLU_OAI: for (int64_t i = 0; i < n; ++i) h[i] = g[i] * sigmoid(alpha * g[i]) * (u[i] + 1.0f); break;
    default: for (int64_t i = 0; i < n; ++i) h[i] = g[i] * u[i];
    }
}

TARGET static void activate_row(const struct gating *a, const float *gate, const float *up, void *out, int64_t n)
{
    float h[SPAN];
    if (n == CHANNELS) { /* the usual case: a block, its loops unrolled */
        activate_span(a, gate, up, h, CHANNELS);
        narrow(out, 0, h, CHANNELS, a->out_kind);
        return;
    }
    for (int64_t k = 0; k < n; k += SPAN) {
        int64_t m = n - k < SPAN ? n - k : SPAN;
        activate_span(a, gate + k, up + k, h, m);
        narrow(out, k, h, m, a->out_kind);
    }
}

/* ---- combine ------------------------------------------------------------------------------------------------------------- */

/* out = Σ weights[a] * y[position[a]] in slot order, in FP32; y [.., n], a position of -1 adds nothing. */
TARGET static void combine_row(void *out, int32_t out_kind, const void *y, int32_t y_kind, const int64_t *position,
                               const float *weights, int64_t slots, int64_t n)
{
    float sum[SPAN], part[SPAN];
    for (int64_t k = 0; k < n; k += SPAN) {
        int64_t m = n - k < SPAN ? n - k : SPAN;
        for (int64_t i = 0; i < m; ++i) sum[i] = 0.0f;
        for (int64_t a = 0; a < slots; ++a) {
            if (position[a] < 0) continue;
            widen(part, y, position[a] * n + k, m, y_kind);
            for (int64_t i = 0; i < m; ++i) sum[i] += weights[a] * part[i];
        }
        narrow(out, k, sum, m, out_kind);
    }
}
