/* The CPU backend's native code: quantise tokens, multiply them by their experts' INT8 or INT4 weights, run whole expert layers.
 *
 * Plain C with a plain C ABI: no Python, no torch headers. Python loads it with ctypes (native/__init__.py) and passes the
 * address of GOMP_parallel in the OpenMP runtime that torch itself uses, so the work runs on torch's own threads: one pool,
 * as many threads as torch.get_num_threads() says, no oversubscription.
 *
 * rows.h     what every instruction set shares, in C that compilers vectorise: quantise, epilogue, activation, combine
 * isa_*.c    the inner loop of each instruction set, and rows.h compiled for it
 * engine.c   choice of instruction set; task queues of quantise and gmm
 * layer.c    task queue of the expert layer
 * tasks.h    what both queues share
 *
 * Weights [E, N, K] are packed for one instruction set: blocks of `channels` output channels, each block one stream along K.
 *   INT8   [E][N/channels][K/4][channels][4]    w + 128 as an unsigned byte, or w itself (isa.unsigned8)
 *   INT4   [E][N/channels][K/8][channels][4]    w + 8; low halves hold k … k+3, high halves k+4 … k+7
 * vpdpbusd multiplies unsigned by signed bytes. The surplus, 128 or 8 times the sum of the row (of its group), is one number
 * per row and group: sums start at its negative. All integer sums are exact in INT32, whatever the order.
 *
 * Compiled with -ffp-contract=off: every operation rounds by itself, as the numerics contract says, so that all instruction
 * sets, the reference and the GPU give the same bits.
 */
#ifndef LOWGMM_H
#define LOWGMM_H
#include <stdint.h>

enum kind { F32 = 0, BF16 = 1, F16 = 2, I32 = 3, I8 = 3 };
enum activation { SILU = 0, GELU = 1, RELU2 = 2, NONE = 3, SWIGLU_OAI = 4 };
enum { MAX_ROWS = 16, MAX_CHANNELS = 64 };

/* Packed weights of E experts. */
struct weights {
    const uint8_t *packed;
    const float *scales;         /* [E][k][N] by the strides below, unit stride along N; NULL for 1 */
    int64_t scale_expert;        /* floats from one expert to the next */
    int64_t scale_group;         /* floats from one group of K to the next */
    int64_t E, N, K;
    int64_t group;               /* elements of K per scale; K if one per channel */
    int64_t bits;                /* 8 or 4 */
};

/* Runs work(data) on so many threads at once and waits for them: GOMP_parallel's signature. NULL: this thread alone. */
typedef void (*parallel_t)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* Rows to quantise, or int8 rows to copy and sum. */
struct quantize {
    const void *x;               /* [rows, K] of kind, row stride in elements */
    int8_t *q;                   /* [rows, q_stride]: K values, then zeros; NULL: only sum */
    float *scales;               /* [rows]; only read if x is int8, and then NULL for 1 */
    int32_t *start;              /* [rows, groups]: -offset * sum of the group's quantised values; NULL: not needed */
    int64_t rows, K, x_stride, q_stride, group;
    int32_t kind, offset;
    float clip;                  /* infinity for none */
    int32_t unused;
    int64_t next;                /* ticket */
};

/* A grouped matmul. */
struct gmm {
    struct weights w;
    const void *x;          /* [rows, K] of kind, row stride in elements; floats are quantised, INT8 is taken as it is */
    const float *scales_x;  /* [rows] of INT8 rows, NULL for 1 */
    const float *bias;      /* [E, N] or NULL */
    char *out;              /* [rows, N] of out_kind, row stride in elements; rows behind the last expert become zero */
    const void *offsets;    /* [E+1] int64 or int32 */
    char *scratch;
    int64_t scratch_bytes, rows, x_stride, out_stride;
    int32_t kind, out_kind, offset_bytes;
    float clip;
};

/* An expert layer. */
struct layer {
    struct weights w13, w2;     /* [E, 2I, H] gate rows first, [E, H, I] */
    const float *bias_w13, *bias_w2; /* [E, 2I], [E, H] or NULL */
    const void *hidden;         /* [T, H] of kind, row stride in elements */
    const void *ids;            /* [T, A] int64 or int32, contiguous */
    const float *topk_weights;  /* [T, A] */
    void *out;                  /* [T, H] of kind, contiguous */
    char *scratch;
    int64_t scratch_bytes, T, A, hidden_stride;
    int32_t kind, between, activation, ids_bytes;
    float alpha, limit, clip;
    int32_t unused;
};

/* The C ABI. `isa` is an index of lowgmm_isa_name. Safe from several threads at once, each with its own output and scratch.
 * gmm and layer return 0; or the bytes of scratch that they need, when they got fewer and did nothing. */
const char *lowgmm_isa_name(int64_t isa);  /* best first; NULL behind the last */
int lowgmm_isa_supported(int64_t isa);
void lowgmm_isa_layout(int64_t isa, int32_t layout[4]); /* channels, unsigned8, pad8, pad4: see struct isa */
void lowgmm_quantize(const struct quantize *, int64_t isa, parallel_t, unsigned threads);
int64_t lowgmm_gmm(const struct gmm *, int64_t isa, parallel_t, unsigned threads); /* -1: offsets do not cut `rows` into groups */
int64_t lowgmm_layer(const struct layer *, int64_t isa, parallel_t, unsigned threads);
int64_t lowgmm_layout(void);               /* sizes of the argument structs: what Python declares must be what was compiled */

/* ---- between the queues and isa_*.c ------------------------------------------------------------------------------------ */

/* One tile: up to isa.rows rows by one block of channels. */
struct tile {
    const int8_t *x[MAX_ROWS];
    const int32_t *start[MAX_ROWS]; /* one number per group */
    char *out[MAX_ROWS];            /* at the block's first channel */
    float scales_x[MAX_ROWS];
    const uint8_t *w;
    const float *scales_w, *bias;   /* at the block's first channel, or NULL */
    const uint8_t *next;            /* what this thread reads after this block, */
    const float *next_scales;       /* with its scales (anything where it has none) */
    const void *fetch[2];           /* of what comes next, for this tile to fetch: of each one cache line in every four; NULL for none */
    int64_t scale_group;
    int64_t steps, group_steps;     /* of 4 (INT8) or 8 (INT4) elements of K; in the last group fewer may be left */
    int64_t channels;               /* that exist in this block: isa.channels or fewer */
    int32_t bits, out_kind;
    int32_t stream;                 /* out is whole cache lines, better written past the caches */
};

/* The sums of a tile: INT32 while there is one group, FP32 (scaled by scales_w, added over groups) otherwise. */
union sums {
    int32_t i[MAX_ROWS][MAX_CHANNELS];
    float f[MAX_ROWS][MAX_CHANNELS];
};

/* h = act(gate) * up, gate clamped to at most `limit` and up to ±limit first (infinity: not at all), as layer.py defines it. */
struct gating {
    int32_t activation, out_kind;
    float alpha, limit;
};

struct isa {
    const char *name;
    int (*supported)(void);
    int32_t channels, rows;
    int32_t unsigned8;           /* INT8 weights are packed as w + 128 */
    int32_t pad8, pad4;          /* K of packed weights and of quantised rows is padded to a multiple of these */
    void (*tile)(const struct tile *, int rows);
    void (*quantize)(const struct quantize *, int64_t row);
    void (*activate)(const struct gating *, const float *gate, const float *up, void *out, int64_t n);
    void (*combine)(void *out, int32_t out_kind, const void *y, int32_t y_kind, const int64_t *position, const float *weights,
                    int64_t slots, int64_t n);
};

extern const struct isa lowgmm_scalar, lowgmm_avx2, lowgmm_avxvnni, lowgmm_avx512vnni, lowgmm_amx, lowgmm_neon;
#endif
