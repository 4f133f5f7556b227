/* What the task queues share: sizes, tickets, and a block of one expert's weights times some of its rows. */
#ifndef LOWGMM_TASKS_H
#define LOWGMM_TASKS_H
#include "lowgmm.h"
#include <stddef.h>
#include <string.h>
#ifdef __x86_64__
#define RELAX() __builtin_ia32_pause()
#define FENCE_STREAM() __builtin_ia32_sfence() /* streamed stores are ordered by nothing less */
#else
#define RELAX() ((void)0)
#define FENCE_STREAM() ((void)0)
#endif
#ifdef __unix__
#include <sched.h>
#else
#define sched_yield() ((void)0)
#endif

enum { ROW_CHUNK = 768, TOKENS_AT_A_TIME = 8, SPINS = 2000, FEW_ROWS = 4, RUN_BYTES = 2 << 20, STREAM_BYTES = 2 << 20 };

static const int64_t kind_bytes[] = {4, 2, 2, 4};

/* Best first; lowgmm_isa_name(i) is that of the i-th. */
extern const struct isa *const lowgmm_isas[];

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t take(int64_t *next, int64_t n) { return __atomic_fetch_add(next, n, __ATOMIC_RELAXED); }

/* Until *count has grown to n: whoever is to count already runs, because tasks are handed out in order. */
static inline void wait_for(const int64_t *count, int64_t n)
{
    for (int64_t spins = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < n; ++spins) {
        if (spins < SPINS) RELAX();
        else sched_yield(); /* more threads than cores: let the other one finish */
    }
}

/* Rows that a thread quantises at a time. */
static inline int64_t at_a_time(int64_t rows, unsigned threads)
{
    return least(TOKENS_AT_A_TIME, ceil_div(rows > 0 ? rows : 1, threads ? threads : 1));
}

/* Tickets that a thread takes at a time. With few rows an expert, memory is what threads wait for, and it is fastest read on from where
 * one was: so runs of blocks while much is left, and single ones at the end, where all are to finish together. */
struct run {
    int64_t at, end;
};

static inline void advance(struct run *r, int64_t *next, int64_t last, int64_t most, unsigned threads)
{
    if (++r->at < r->end) return;
    int64_t share = (last - __atomic_load_n(next, __ATOMIC_RELAXED)) / (2 * (threads ? threads : 1)), n = least(share, most);
    r->at = take(next, n > 1 ? n : 1);
    r->end = r->at + (n > 1 ? n : 1);
}

/* Blocks of `bytes` in a run, for `rows` rows of so many experts. */
static inline int64_t run_of(int64_t bytes, int64_t rows, int64_t experts)
{
    return rows <= FEW_ROWS * experts && bytes < RUN_BYTES ? RUN_BYTES / bytes : 1;
}

static inline void run(parallel_t parallel, unsigned threads, void (*work)(void *), void *data)
{
    if (parallel && threads > 1) parallel(work, data, threads, 0);
    else work(data);
}

static inline int32_t offset_of(const struct isa *isa, const struct weights *w) { return w->bits == 4 ? 8 : isa->unsigned8 ? 128 : 0; }
static inline int64_t groups_of(const struct weights *w) { return ceil_div(w->K, w->group); }

static inline int64_t pad_of(const struct isa *isa, const struct weights *w) { return w->bits == 4 ? isa->pad4 : isa->pad8; }
static inline int64_t padded(const struct isa *isa, const struct weights *w) { return ceil_div(w->K, pad_of(isa, w)) * pad_of(isa, w); }

/* Of quantised rows: not a power of two, or all of them share a few sets of the cache. */
static inline int64_t padded_stride(const struct isa *isa, const struct weights *w) { return ceil_div(padded(isa, w), 64) * 64 + 64; }

/* Bytes of one block: `channels` output channels along all of (padded) K. */
static inline int64_t block_bytes(const struct isa *isa, const struct weights *w)
{
    return padded(isa, w) * isa->channels * w->bits / 8;
}

/* The next part of `scratch`, of which `at` bytes are taken; parts start on cache lines. */
#define PART(pointer, bytes) ((pointer) = scratch ? (void *)(scratch + at) : NULL, at += ceil_div((bytes), 64) * 64)

/* Rows of one expert, and where their results go. */
struct rows {
    const int8_t *q;
    const int32_t *start;
    const float *scales_x;
    int64_t q_stride;
    const int64_t *from; /* q, start and scales_x of row i are those at from[i], or at i if NULL */
    char *out;           /* row out_first is its first */
    int64_t out_first, out_stride; /* stride in bytes */
    int32_t out_kind, stream;
};

/* Are `rows` of results so much that they leave the caches before somebody reads them, and on whole cache lines? */
static inline int streamed(const void *out, int64_t rows, int64_t stride)
{
    return rows * stride > STREAM_BYTES && ((uintptr_t)out | (uintptr_t)stride) % 64 == 0;
}

/* Where a block of an expert's weights is. */
struct place {
    const uint8_t *w;
    const float *scales; /* NULL for 1 */
    const int8_t *x;     /* quantised rows that come with it, or NULL: the same as before, or not in order */
};

static inline struct place place_of(const struct isa *isa, const struct weights *w, int64_t e, int64_t block)
{
    return (struct place){
        w->packed + (e * ceil_div(w->N, isa->channels) + block) * block_bytes(isa, w),
        w->scales ? w->scales + e * w->scale_expert + block * isa->channels : NULL,
        NULL,
    };
}

/* Rows first … first + count against block `block` of expert e; `next` is what this thread reads afterwards. `channel` is the
 * block's first channel in out. */
static inline void block_of(const struct isa *isa, const struct weights *w, const float *bias, const struct rows *x, int64_t e,
                     int64_t first, int64_t count, int64_t block, struct place next, int64_t channel)
{
    const int64_t n = block * isa->channels, bytes = block_bytes(isa, w), groups = groups_of(w);
    const int64_t step = w->bits == 4 ? 8 : 4, tiles = ceil_div(count, isa->rows);
    const struct place here = place_of(isa, w, e, block);
    struct tile t = {
        .w = here.w,
        .scales_w = here.scales,
        .next = next.w,
        .next_scales = next.scales,
        .bias = bias ? bias + e * w->N + n : NULL,
        .scale_group = w->scale_group,
        .steps = bytes / (isa->channels * 4),
        .channels = least(w->N - n, isa->channels),
        .bits = (int32_t)w->bits,
        .out_kind = x->out_kind,
        .stream = x->stream,
    };
    t.group_steps = groups > 1 ? w->group / step : t.steps;
    for (int64_t i = 0, row = 0; i < tiles; ++i) {
        /* As even as possible: 16 rows are 6 + 5 + 5, not 7 + 7 + 2. */
        int64_t rows = (count - row + (tiles - i) - 1) / (tiles - i);
        t.fetch[0] = i >= 4 && i < 8 && next.x ? (const void *)(next.x + 64 * (i - 4)) : next.w + 64 * (i < 4 ? i : 0);
        t.fetch[1] = tiles > 1 && i + tiles < 4 ? next.w + 64 * (i + tiles) : NULL; /* two or three tiles share the four lines */
        for (int64_t r = 0; r < rows; ++r, ++row) {
            int64_t from = x->from ? x->from[first + row] : first + row;
            t.x[r] = x->q + from * x->q_stride;
            t.start[r] = x->start + from * groups;
            t.scales_x[r] = x->scales_x ? x->scales_x[from] : 1.0f;
            t.out[r] = x->out + (first + row - x->out_first) * x->out_stride + channel * kind_bytes[x->out_kind];
        }
        isa->tile(&t, (int)rows);
    }
}
#endif
