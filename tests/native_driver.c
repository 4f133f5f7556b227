/* Runs the native code without Python, so that it can be built with sanitizers and for other processors: every instruction set that
 * was compiled and that this CPU has, against plain loops, on POSIX threads. Exits with 1 at the first difference. */
#include "lowgmm.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 3, CALLERS = 2 };

static uint32_t seed = 1;
static uint32_t draw(void) { return seed = seed * 1664525u + 1013904223u; }
static int between(int low, int high) { return low + (int)((draw() >> 8) % (unsigned)(high - low + 1)); }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* On a cache line, so that large results are streamed. */
static void *fresh(int64_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, (size_t)(bytes ? bytes : 1))) exit(2);
    memset(p, 0xa5, (size_t)bytes);
    return p;
}

static void parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags)
{
    pthread_t others[THREADS];
    typedef void *(*start_t)(void *);
    (void)flags;
    for (unsigned i = 1; i < threads; ++i) pthread_create(&others[i], NULL, (start_t)(void *)work, data);
    work(data);
    for (unsigned i = 1; i < threads; ++i) pthread_join(others[i], NULL);
}

/* Weights as plain codes [E, N, K] with scales [E][groups][N], and packed for one instruction set. */
struct problem {
    int64_t E, N, K, group, bits;
    int8_t *codes;
    float *scales;
};

static struct problem make(int64_t E, int64_t N, int64_t K, int64_t group, int64_t bits)
{
    struct problem p = {E, N, K, group, bits, fresh(E * N * K), fresh(E * N * ceil_div(K, group) * 4)};
    for (int64_t i = 0; i < E * N * K; ++i) p.codes[i] = (int8_t)(bits == 8 ? between(-128, 127) : between(-7, 7));
    for (int64_t i = 0; i < E * N * ceil_div(K, group); ++i) p.scales[i] = (float)between(1, 1000) * 1e-5f;
    return p;
}

static struct weights packed(const struct problem *p, int64_t isa)
{
    int32_t layout[4];
    lowgmm_isa_layout(isa, layout);
    const int64_t channels = layout[0], pad = p->bits == 8 ? layout[2] : layout[3], K = ceil_div(p->K, pad) * pad;
    const int64_t blocks = ceil_div(p->N, channels), bytes = channels * K * p->bits / 8;
    const int offset = p->bits == 4 ? 8 : layout[1] ? 128 : 0;
    uint8_t *to = fresh(p->E * blocks * bytes);
    memset(to, 0, (size_t)(p->E * blocks * bytes));
    for (int64_t e = 0; e < p->E; ++e)
        for (int64_t n = 0; n < blocks * channels; ++n)
            for (int64_t k = 0; k < K; ++k) {
                int inside = n < p->N && k < p->K;
                uint8_t code = (uint8_t)((inside ? p->codes[(e * p->N + n) * p->K + k] : 0) + offset);
                int64_t steps = p->bits == 8 ? 4 : 8, step = k / steps, in_step = k % steps;
                uint8_t *at = to + (e * blocks + n / channels) * bytes + step * channels * 4 + n % channels * 4 + in_step % 4;
                *at = (uint8_t)(p->bits == 8 ? code : *at | code << (in_step < 4 ? 0 : 4));
            }
    return (struct weights){to, p->scales, p->N * ceil_div(p->K, p->group), p->N, p->E, p->N, p->K, p->group, p->bits};
}

static void fail(const char *what, int64_t isa, const struct problem *p)
{
    fprintf(stderr, "%s: %s differs (E=%d N=%d K=%d group=%d bits=%d)\n", lowgmm_isa_name(isa), what, (int)p->E, (int)p->N,
            (int)p->K, (int)p->group, (int)p->bits);
    exit(1);
}

/* INT32 sums where there is one group; else FP32, group after group, as the definition says: both to the bit. */
static void test_gmm(int64_t isa, const struct problem *p, const int64_t *sizes)
{
    const int64_t groups = ceil_div(p->K, p->group);
    int64_t *offsets = fresh((p->E + 1) * 8);
    offsets[0] = 0;
    for (int64_t e = 0; e < p->E; ++e) offsets[e + 1] = offsets[e] + sizes[e];
    const int64_t M = offsets[p->E];
    int8_t *x = fresh(M * p->K);
    float *scales_x = fresh(M * 4), *out = fresh(M * p->N * 4);
    for (int64_t i = 0; i < M * p->K; ++i) x[i] = (int8_t)between(-128, 127);
    for (int64_t i = 0; i < M; ++i) scales_x[i] = (float)between(1, 1000) * 1e-3f;
    struct gmm args = {.w = packed(p, isa), .x = x, .scales_x = groups > 1 ? scales_x : NULL, .out = (char *)out,
                       .offsets = offsets, .rows = M, .x_stride = p->K, .out_stride = p->N, .kind = I8,
                       .out_kind = groups > 1 ? F32 : I32, .offset_bytes = 8, .clip = INFINITY};
    args.scratch_bytes = lowgmm_gmm(&args, isa, parallel, THREADS);
    args.scratch = fresh(args.scratch_bytes);
    if (lowgmm_gmm(&args, isa, parallel, THREADS)) fail("gmm's scratch", isa, p);
    for (int64_t e = 0; e < p->E; ++e)
        for (int64_t m = offsets[e]; m < offsets[e + 1]; ++m)
            for (int64_t n = 0; n < p->N; ++n) {
                float total = 0;
                int32_t sum = 0;
                for (int64_t g = 0; g < groups; ++g) {
                    sum = 0;
                    for (int64_t k = g * p->group; k < p->K && k < (g + 1) * p->group; ++k)
                        sum += x[m * p->K + k] * p->codes[(e * p->N + n) * p->K + k];
                    volatile float part = (float)sum * p->scales[(e * groups + g) * p->N + n]; /* no fused multiply-add */
                    total = g ? total + part : part;
                }
                if (groups > 1 ? out[m * p->N + n] != total * scales_x[m] : ((int32_t *)out)[m * p->N + n] != sum)
                    fail("gmm", isa, p);
            }
    free((void *)args.w.packed);
    free(offsets), free(x), free(args.scratch), free(scales_x), free(out);
}

struct call {
    struct layer args;
    int64_t isa;
};

static void *run_layer(void *data)
{
    struct call *c = data;
    c->args.scratch_bytes = lowgmm_layer(&c->args, c->isa, parallel, THREADS);
    c->args.scratch = fresh(c->args.scratch_bytes);
    lowgmm_layer(&c->args, c->isa, parallel, THREADS);
    free(c->args.scratch);
    return NULL;
}

/* Several callers at once; every instruction set gives the bits of the first one (tests/test_native.py compares with the reference). */
static void test_layer(int kind, int64_t bits, int64_t group, int64_t T, int64_t A, int64_t E, int64_t H, int64_t I, int activation)
{
    const int64_t size = kind == F32 ? 4 : 2;
    const struct problem w13 = make(E, 2 * I, H, group < H ? group : H, bits), w2 = make(E, H, I, group < I ? group : I, bits);
    float *topk = fresh(T * A * 4);
    char *hidden = fresh(T * H * size), *first = NULL;
    int64_t *ids = fresh(T * A * 8);
    for (int64_t i = 0; i < T * H; ++i) {
        float value = (float)between(-1000, 1000) * 1e-3f;
        memcpy(hidden + i * size, (char *)&value + (4 - size), (size_t)size); /* a bfloat16 is a float's upper half */
    }
    for (int64_t i = 0; i < T * A; ++i) topk[i] = (float)between(0, 1000) * 1e-3f, ids[i] = between(-1, (int)E - 1);
    for (int64_t isa = 0; lowgmm_isa_name(isa); ++isa) {
        if (!lowgmm_isa_supported(isa)) continue;
        struct call calls[CALLERS];
        pthread_t callers[CALLERS];
        const struct weights up = packed(&w13, isa), down = packed(&w2, isa);
        for (int i = 0; i < CALLERS; ++i) {
            calls[i] = (struct call){{.w13 = up, .w2 = down, .hidden = hidden, .ids = ids, .topk_weights = topk,
                                      .out = fresh(T * H * size), .T = T, .A = A, .hidden_stride = H, .kind = kind, .between = kind,
                                      .activation = activation, .ids_bytes = 8, .alpha = 1.702f, .limit = INFINITY,
                                      .clip = INFINITY}, isa};
            pthread_create(&callers[i], NULL, run_layer, &calls[i]);
        }
        for (int i = 0; i < CALLERS; ++i) pthread_join(callers[i], NULL);
        if (!first) {
            first = fresh(T * H * size);
            memcpy(first, calls[0].args.out, (size_t)(T * H * size));
        }
        for (int i = 0; i < CALLERS; ++i) {
            if (memcmp(first, calls[i].args.out, (size_t)(T * H * size))) fail("layer", isa, &w13);
            free(calls[i].args.out);
        }
        free((void *)up.packed), free((void *)down.packed);
    }
    free(w13.codes), free(w13.scales), free(w2.codes), free(w2.scales), free(hidden), free(topk), free(ids), free(first);
}

int main(void)
{
    static const int64_t sizes[3][4] = {{5, 0, 19, 1}, {0, 17, 2, 8}, {3, 4, 6, 7}};
    static const int64_t shapes[3][2] = {{70, 72}, {64, 128}, {3, 6}};
    for (int64_t isa = 0; lowgmm_isa_name(isa); ++isa) {
        printf("%s%s\n", lowgmm_isa_name(isa), lowgmm_isa_supported(isa) ? "" : ": not on this CPU");
        if (!lowgmm_isa_supported(isa)) continue;
        for (int i = 0; i < 3; ++i)
            for (int64_t bits = 8; bits >= 4; bits -= 4)
                for (int64_t group = 32; group <= 128; group *= 4) {
                    const int64_t K = shapes[i][1];
                    const struct problem p = make(4, shapes[i][0], K, bits == 4 && group < K ? group : K, bits);
                    test_gmm(isa, &p, sizes[i]);
                    free(p.codes), free(p.scales);
                }
    }
    test_layer(F32, 8, 1 << 20, 9, 2, 4, 72, 64, SILU);
    test_layer(F32, 8, 1 << 20, 3, 3, 4, 64, 20, GELU);
    test_layer(F32, 4, 32, 20, 2, 3, 72, 128, SWIGLU_OAI);
    test_layer(BF16, 4, 1 << 20, 1, 5, 8, 64, 66, RELU2);
    /* More rows an expert than are taken at a time, and results so large that they are streamed past the caches. */
    test_layer(BF16, 8, 1 << 20, 1700, 1, 2, 640, 16, SILU);
    return 0;
}
