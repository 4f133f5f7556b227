/* The C ABI: choice of the instruction set, and the task queues of quantise, gmm and the expert layer. */
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

/* ---- instruction sets ---------------------------------------------------------------------------------------------------- */

/* Best first. */
static const struct isa *const all[] = {
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __linux__
    &lowgmm_amx,
#endif
    &lowgmm_avx512vnni, &lowgmm_avxvnni, &lowgmm_avx2,
#endif
#if defined(__aarch64__) && defined(__GNUC__)
    &lowgmm_neon,
#endif
    &lowgmm_scalar,
};

const char *lowgmm_isa_name(int64_t i)
{
    return i >= 0 && i < (int64_t)(sizeof all / sizeof *all) ? all[i]->name : NULL;
}

int lowgmm_isa_supported(int64_t i) { return all[i]->supported(); }

void lowgmm_isa_layout(int64_t i, int32_t layout[4])
{
    layout[0] = all[i]->channels;
    layout[1] = all[i]->unsigned8;
    layout[2] = all[i]->pad8;
    layout[3] = all[i]->pad4;
}

/* ---- shared -------------------------------------------------------------------------------------------------------------- */

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t take(int64_t *next, int64_t n) { return __atomic_fetch_add(next, n, __ATOMIC_RELAXED); }

/* Until *count has grown to n: whoever is to count already runs, because tasks are handed out in order. */
static void wait_for(const int64_t *count, int64_t n)
{
    for (int64_t spins = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < n; ++spins) {
        if (spins < SPINS) RELAX();
        else sched_yield(); /* more threads than cores: let the other one finish */
    }
}

/* Rows that a thread quantises at a time. */
static int64_t at_a_time(int64_t rows, unsigned threads)
{
    return least(TOKENS_AT_A_TIME, ceil_div(rows > 0 ? rows : 1, threads ? threads : 1));
}

/* Tickets that a thread takes at a time. With few rows an expert, memory is what threads wait for, and it is fastest read on from where
 * one was: so runs of blocks while much is left, and single ones at the end, where all are to finish together. */
struct run {
    int64_t at, end;
};

static void advance(struct run *r, int64_t *next, int64_t last, int64_t most, unsigned threads)
{
    if (++r->at < r->end) return;
    int64_t share = (last - __atomic_load_n(next, __ATOMIC_RELAXED)) / (2 * (threads ? threads : 1)), n = least(share, most);
    r->at = take(next, n > 1 ? n : 1);
    r->end = r->at + (n > 1 ? n : 1);
}

/* Blocks of `bytes` in a run, for `rows` rows of so many experts. */
static int64_t run_of(int64_t bytes, int64_t rows, int64_t experts)
{
    return rows <= FEW_ROWS * experts && bytes < RUN_BYTES ? RUN_BYTES / bytes : 1;
}

static void run(parallel_t parallel, unsigned threads, void (*work)(void *), void *data)
{
    if (parallel && threads > 1) parallel(work, data, threads, 0);
    else work(data);
}

static int32_t offset_of(const struct isa *isa, const struct weights *w) { return w->bits == 4 ? 8 : isa->unsigned8 ? 128 : 0; }
static int64_t groups_of(const struct weights *w) { return ceil_div(w->K, w->group); }

static int64_t pad_of(const struct isa *isa, const struct weights *w) { return w->bits == 4 ? isa->pad4 : isa->pad8; }
static int64_t padded(const struct isa *isa, const struct weights *w) { return ceil_div(w->K, pad_of(isa, w)) * pad_of(isa, w); }

/* Of quantised rows: not a power of two, or all of them share a few sets of the cache. */
static int64_t padded_stride(const struct isa *isa, const struct weights *w) { return ceil_div(padded(isa, w), 64) * 64 + 64; }

/* Bytes of one block: `channels` output channels along all of (padded) K. */
static int64_t block_bytes(const struct isa *isa, const struct weights *w)
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
static int streamed(const void *out, int64_t rows, int64_t stride)
{
    return rows * stride > STREAM_BYTES && ((uintptr_t)out | (uintptr_t)stride) % 64 == 0;
}

/* Where a block of an expert's weights is. */
struct place {
    const uint8_t *w;
    const float *scales; /* NULL for 1 */
    const int8_t *x;     /* quantised rows that come with it, or NULL: the same as before, or not in order */
};

static struct place place_of(const struct isa *isa, const struct weights *w, int64_t e, int64_t block)
{
    return (struct place){
        w->packed + (e * ceil_div(w->N, isa->channels) + block) * block_bytes(isa, w),
        w->scales ? w->scales + e * w->scale_expert + block * isa->channels : NULL,
        NULL,
    };
}

/* Rows first … first + count against block `block` of expert e; `next` is what this thread reads afterwards. `channel` is the
 * block's first channel in out. */
static void block_of(const struct isa *isa, const struct weights *w, const float *bias, const struct rows *x, int64_t e,
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

/* ---- quantise ------------------------------------------------------------------------------------------------------------ */

struct quantize_job {
    struct quantize args;
    const struct isa *isa;
};

static void quantize_work(void *data)
{
    struct quantize_job *job = data;
    for (;;) {
        int64_t first = take(&job->args.next, TOKENS_AT_A_TIME);
        if (first >= job->args.rows) return;
        for (int64_t row = first; row < least(first + TOKENS_AT_A_TIME, job->args.rows); ++row)
            job->isa->quantize(&job->args, row);
    }
}

void lowgmm_quantize(const struct quantize *args, int64_t isa, parallel_t parallel, unsigned threads)
{
    struct quantize_job job = {*args, all[isa]};
    job.args.next = 0;
    run(parallel, args->rows > TOKENS_AT_A_TIME ? threads : 1, quantize_work, &job);
}

/* ---- gmm ----------------------------------------------------------------------------------------------------------------- */

struct gmm_job {
    const struct gmm *a;
    const struct isa *isa;
    struct quantize x;
    int64_t *offsets;                       /* [E+1] */
    int64_t rows_at_a_time, quantize_tasks; /* tickets start at -quantize_tasks */
    int64_t last, most;                     /* ticket, and most of them in a run */
    unsigned threads;
    int64_t quantized, next;
};

/* The rows to quantise, and the scratch for them; returns its size. With scratch NULL only the size is right. */
static int64_t lay_out_gmm(struct gmm_job *j, char *scratch)
{
    const struct gmm *a = j->a;
    int64_t at = 0, stride = padded_stride(j->isa, &a->w), floats = a->kind != I8;
    int8_t *q = NULL;
    float *scales = NULL;
    int32_t *start;
    PART(j->offsets, (a->w.E + 1) * 8);
    PART(start, a->rows * groups_of(&a->w) * 4);
    if (floats) PART(scales, a->rows * 4);
    if (floats || a->w.K % pad_of(j->isa, &a->w)) PART(q, a->rows * stride);
    j->x = (struct quantize){
        .x = a->x, .q = q, .scales = floats ? scales : (float *)a->scales_x, .start = start, .rows = a->rows, .K = a->w.K,
        .x_stride = a->x_stride, .q_stride = stride, .group = a->w.group, .kind = a->kind, .offset = offset_of(j->isa, &a->w),
        .clip = a->clip,
    };
    return at;
}

/* Do they start at 0, never fall, and end at `rows` at most? */
static int read_offsets(const struct gmm *a, int64_t *to)
{
    int64_t before = 0;
    for (int64_t e = 0; e <= a->w.E; before = to[e++]) {
        to[e] = a->offset_bytes == 8 ? ((const int64_t *)a->offsets)[e] : ((const int32_t *)a->offsets)[e];
        if (to[e] < before || to[0] != 0) return 0;
    }
    return before <= a->rows;
}

static void zero_rest(const struct gmm_job *j)
{
    const struct gmm *a = j->a;
    const int64_t bytes = kind_bytes[a->out_kind];
    for (int64_t m = j->offsets[a->w.E]; m < a->rows; ++m)
        memset(a->out + m * a->out_stride * bytes, 0, (size_t)(a->w.N * bytes));
}

/* A ticket is a chunk of one expert's rows and a block of channels. Tickets only grow, so each thread walks the experts once. */
struct walk {
    int64_t expert, row, passed; /* the chunk's first row; tickets of the chunks before */
};

/* Go on to the chunk of a ticket; its block, or -1 behind the last. */
static int64_t seek(const struct gmm_job *j, struct walk *at, int64_t ticket)
{
    const int64_t blocks = ceil_div(j->a->w.N, j->isa->channels);
    while (at->expert < j->a->w.E) {
        if (at->row >= j->offsets[at->expert + 1]) {
            at->row = j->offsets[++at->expert];
        } else if (ticket >= at->passed + blocks) {
            at->passed += blocks;
            at->row += ROW_CHUNK;
        } else {
            return ticket - at->passed;
        }
    }
    return -1;
}

static void gmm_work(void *data)
{
    struct gmm_job *job = data;
    const struct gmm *a = job->a;
    const struct isa *isa = job->isa;
    const struct rows x = {
        .q = job->x.q ? job->x.q : a->x, .start = job->x.start, .scales_x = job->x.scales,
        .q_stride = job->x.q ? job->x.q_stride : a->x_stride, .out = a->out,
        .out_stride = a->out_stride * kind_bytes[a->out_kind], .out_kind = a->out_kind,
        .stream = streamed(a->out, a->rows, a->out_stride * kind_bytes[a->out_kind]),
    };
    struct run run = {take(&job->next, 1), 0};
    for (; run.at < 0; run.at = take(&job->next, 1)) {
        int64_t first = (run.at + job->quantize_tasks) * job->rows_at_a_time;
        for (int64_t row = first; row < least(first + job->rows_at_a_time, a->rows); ++row) isa->quantize(&job->x, row);
        if (run.at == -1) zero_rest(job);
        __atomic_add_fetch(&job->quantized, 1, __ATOMIC_RELEASE);
    }
    wait_for(&job->quantized, job->quantize_tasks);
    struct walk here = {0}, there;
    for (int64_t block = seek(job, &here, run.at), next; block >= 0; block = next, here = there) {
        there = here;
        advance(&run, &job->next, job->last, job->most, job->threads);
        next = seek(job, &there, run.at);
        struct place soon = next < 0 ? place_of(isa, &a->w, here.expert, block) : place_of(isa, &a->w, there.expert, next);
        if (next >= 0 && there.row != here.row) soon.x = x.q + there.row * x.q_stride;
        block_of(isa, &a->w, a->bias, &x, here.expert, here.row, least(ROW_CHUNK, job->offsets[here.expert + 1] - here.row), block,
                 soon, block * isa->channels);
    }
    FENCE_STREAM();
}

int64_t lowgmm_gmm(const struct gmm *a, int64_t isa, parallel_t parallel, unsigned threads)
{
    struct gmm_job job = {.a = a, .isa = all[isa]};
    int64_t bytes = lay_out_gmm(&job, NULL);
    if (a->scratch_bytes < bytes) return bytes;
    lay_out_gmm(&job, a->scratch);
    if (!read_offsets(a, job.offsets)) return -1;
    job.rows_at_a_time = at_a_time(a->rows, threads);
    job.quantize_tasks = ceil_div(a->rows, job.rows_at_a_time);
    job.next = -job.quantize_tasks;
    job.threads = threads;
    int64_t experts = 0;
    for (int64_t e = 0; e < a->w.E; ++e) {
        job.last += ceil_div(job.offsets[e + 1] - job.offsets[e], ROW_CHUNK) * ceil_div(a->w.N, job.isa->channels);
        experts += job.offsets[e + 1] > job.offsets[e];
    }
    job.most = run_of(block_bytes(job.isa, &a->w), a->rows, experts);
    run(parallel, threads, gmm_work, &job);
    return 0;
}

/* ---- the expert layer ---------------------------------------------------------------------------------------------------- */

/* Sorted rows of one expert: at most ROW_CHUNK of them. */
struct chunk {
    int64_t expert, first, count;
    int64_t gate_up_left;       /* blocks still to be multiplied */
    int64_t ready;              /* 1 when its rows of h are quantised */
};

struct layer_job {
    const struct layer *a;
    const struct isa *isa;
    struct gating gating;
    int64_t H, I, E, R;         /* R: slots that have an expert */
    int64_t fused;              /* gate and up blocks of the same channels are whole blocks of w13 */
    int64_t chunks, quantize_tasks, tokens_at_a_time, gate_up_blocks, down_blocks, combine_tasks;
    struct chunk *chunk;        /* [chunks] */
    int64_t *expert_start;      /* [E+1] */
    int64_t *position;          /* [T*A] slot -> sorted row, -1 without an expert */
    int64_t *token;             /* [R] sorted row -> token */
    int8_t *xq, *hq;            /* [T, H], [R, I], padded */
    float *xs, *hs;
    int32_t *x_start, *h_start;
    char *h;                    /* [R, I] of a->between */
    float *gate_up;             /* [R, 2I], unless fused */
    char *y;                    /* [R, H] of a->between */
    int64_t xq_stride, hq_stride;
    int64_t most;               /* blocks in a run */
    unsigned threads;
    int64_t quantized, down_done, next; /* counters that grow */
};

/* As lay_out_gmm. */
static int64_t lay_out_layer(struct layer_job *j, char *scratch)
{
    const struct layer *a = j->a;
    const int64_t slots = a->T * a->A;
    int64_t at = 0;
    PART(j->expert_start, (j->E + 1) * 8);
    PART(j->chunk, (least(slots, j->E) + slots / ROW_CHUNK + 1) * (int64_t)sizeof(struct chunk));
    PART(j->position, slots * 8);
    PART(j->token, slots * 8);
    PART(j->xs, a->T * 4);
    PART(j->x_start, a->T * groups_of(&a->w13) * 4);
    PART(j->hs, slots * 4);
    PART(j->h_start, slots * groups_of(&a->w2) * 4);
    PART(j->xq, a->T * j->xq_stride);
    PART(j->hq, slots * j->hq_stride);
    PART(j->h, slots * j->I * kind_bytes[a->between]);
    PART(j->gate_up, j->fused ? 0 : slots * 2 * j->I * 4);
    PART(j->y, slots * j->H * kind_bytes[a->between]);
    return at;
}

static int64_t expert_of(const struct layer *a, int64_t slot, int64_t E)
{
    int64_t e = a->ids_bytes == 8 ? ((const int64_t *)a->ids)[slot] : ((const int32_t *)a->ids)[slot];
    return e >= 0 && e < E ? e : -1;
}

/* A stable counting sort of the slots by expert, as routing.py defines it, cut into chunks. The ids are the caller's
   memory, which another thread may change meanwhile: they are read once. */
static void sort_slots(struct layer_job *j)
{
    const struct layer *a = j->a;
    const int64_t slots = a->T * a->A;
    int64_t *start = j->expert_start;
    memset(start, 0, (size_t)(j->E + 1) * 8);
    for (int64_t s = 0; s < slots; ++s) {
        int64_t e = j->position[s] = expert_of(a, s, j->E);
        if (e >= 0) ++start[e + 1];
    }
    for (int64_t e = 0; e < j->E; ++e) {
        for (int64_t first = 0; first < start[e + 1]; first += ROW_CHUNK)
            j->chunk[j->chunks++] = (struct chunk){e, start[e] + first, least(ROW_CHUNK, start[e + 1] - first), 0, 0};
        start[e + 1] += start[e];
    }
    j->R = start[j->E];
    for (int64_t s = 0; s < slots; ++s) {
        int64_t e = j->position[s];
        if (e >= 0) j->position[s] = start[e]++;
        if (e >= 0) j->token[j->position[s]] = s / a->A;
    }
}

enum { AT_A_TIME = 4 * 7 };

/* `blocks` blocks from `block` on; more than one only if fused, and for no more than AT_A_TIME rows together. */
static void gate_up_task(struct layer_job *j, struct chunk *c, int64_t block, int64_t blocks, struct place next)
{
    const struct layer *a = j->a;
    const struct isa *isa = j->isa;
    struct rows x = {j->xq, j->x_start, j->xs, j->xq_stride, j->token, NULL, 0, 0, F32, 0};
    if (!j->fused) {
        x.out = (char *)j->gate_up;
        x.out_stride = 2 * j->I * 4;
        block_of(isa, &a->w13, a->bias_w13, &x, c->expert, c->first, c->count, block, next, block * isa->channels);
        return;
    }
    /* A few rows at a time, so that gate and up stay in the cache until the activation has combined them. */
    float gate[AT_A_TIME * MAX_CHANNELS], up[AT_A_TIME * MAX_CHANNELS];
    const int64_t up_block = block + j->I / isa->channels, width = blocks * isa->channels;
    const int64_t whole = c->count <= AT_A_TIME ? c->count : AT_A_TIME;
    x.out_stride = width * 4;
    for (int64_t first = 0; first < c->count; first += whole) {
        int64_t n = least(whole, c->count - first), row = c->first + first;
        x.out_first = row;
        x.out = (char *)gate;
        for (int64_t b = 0; b < blocks; ++b)
            block_of(isa, &a->w13, a->bias_w13, &x, c->expert, row, n, block + b,
                     place_of(isa, &a->w13, c->expert, b + 1 < blocks ? block + b + 1 : up_block), b * isa->channels);
        x.out = (char *)up;
        for (int64_t b = 0; b < blocks; ++b)
            block_of(isa, &a->w13, a->bias_w13, &x, c->expert, row, n, up_block + b,
                     b + 1 < blocks ? place_of(isa, &a->w13, c->expert, up_block + b + 1) : next, b * isa->channels);
        for (int64_t r = 0; r < n; ++r)
            isa->activate(&j->gating, gate + r * width, up + r * width,
                          j->h + ((row + r) * j->I + block * isa->channels) * kind_bytes[a->between], width);
    }
}

/* Whoever multiplied the last block of a chunk quantises its rows: only now are their largest elements known. */
static void finish_gate_up(struct layer_job *j, struct chunk *c, int64_t blocks)
{
    const struct layer *a = j->a;
    if (__atomic_sub_fetch(&c->gate_up_left, blocks, __ATOMIC_ACQ_REL)) return;
    const struct quantize h = {
        .x = j->h, .q = j->hq, .scales = j->hs, .start = j->h_start, .rows = j->R, .K = j->I, .x_stride = j->I,
        .q_stride = j->hq_stride, .group = a->w2.group, .kind = a->between, .offset = offset_of(j->isa, &a->w2),
        .clip = __builtin_inff(),
    };
    for (int64_t row = c->first; row < c->first + c->count; ++row) {
        if (!j->fused) {
            const float *gate_up = j->gate_up + row * 2 * j->I;
            j->isa->activate(&j->gating, gate_up, gate_up + j->I, j->h + row * j->I * kind_bytes[a->between], j->I);
        }
        j->isa->quantize(&h, row);
    }
    __atomic_store_n(&c->ready, 1, __ATOMIC_RELEASE);
}

static void combine_task(struct layer_job *j, int64_t task)
{
    const struct layer *a = j->a;
    for (int64_t t = task * j->tokens_at_a_time; t < least((task + 1) * j->tokens_at_a_time, a->T); ++t)
        j->isa->combine((char *)a->out + t * j->H * kind_bytes[a->kind], a->kind, j->y, a->between, j->position + t * a->A,
                        a->topk_weights + t * a->A, a->A, j->H);
}

/* The weights of a task; any for a task without weights. */
static struct place weights_of(const struct layer_job *j, int64_t ticket)
{
    int64_t task = ticket - j->quantize_tasks, gate_up_tasks = j->chunks * j->gate_up_blocks;
    if (task >= 0 && task < gate_up_tasks)
        return place_of(j->isa, &j->a->w13, j->chunk[task / j->gate_up_blocks].expert, task % j->gate_up_blocks);
    task -= gate_up_tasks;
    if (task >= 0 && task < j->chunks * j->down_blocks)
        return place_of(j->isa, &j->a->w2, j->chunk[task / j->down_blocks].expert, task % j->down_blocks);
    return place_of(j->isa, &j->a->w2, 0, 0);
}

/* Tasks in order: quantise tokens; gate and up blocks, expert by expert; down blocks; combine. A task waits for those before it
 * that it needs, all of which somebody already works on: the order that the GPU's queue has. */
static void layer_work(void *data)
{
    struct layer_job *j = data;
    const struct layer *a = j->a;
    const struct isa *isa = j->isa;
    const struct quantize x = {
        .x = a->hidden, .q = j->xq, .scales = j->xs, .start = j->x_start, .rows = a->T, .K = j->H,
        .x_stride = a->hidden_stride, .q_stride = j->xq_stride, .group = a->w13.group, .kind = a->kind,
        .offset = offset_of(isa, &a->w13), .clip = a->clip,
    };
    const struct rows down = {j->hq, j->h_start, j->hs, j->hq_stride, NULL, j->y, 0, j->H * kind_bytes[a->between], a->between,
                              streamed(j->y, j->R, j->H * kind_bytes[a->between])};
    const int64_t gate_up_end = j->quantize_tasks + j->chunks * j->gate_up_blocks;
    const int64_t down_tasks = j->chunks * j->down_blocks, down_end = gate_up_end + down_tasks;
    struct run run = {take(&j->next, 1), 0};
    for (int64_t ticket; (ticket = run.at) < down_end + j->combine_tasks;) {
        int64_t blocks = 1;
        if (j->fused && ticket >= j->quantize_tasks && ticket < gate_up_end) { /* as many of its run as gate_up_task takes */
            int64_t task = ticket - j->quantize_tasks, left = j->gate_up_blocks - task % j->gate_up_blocks;
            int64_t most = AT_A_TIME / j->chunk[task / j->gate_up_blocks].count;
            blocks = least(least(run.end - ticket, left), most);
            blocks = blocks > 1 ? blocks : 1;
            run.at += blocks - 1;
        }
        advance(&run, &j->next, down_end, j->most, j->threads);
        const struct place next = weights_of(j, run.at);
        if (ticket < j->quantize_tasks) {
            int64_t first = ticket * j->tokens_at_a_time, end = least(first + j->tokens_at_a_time, a->T);
            for (int64_t t = first; t < end; ++t) isa->quantize(&x, t);
            __atomic_add_fetch(&j->quantized, 1, __ATOMIC_RELEASE);
        } else if (ticket < gate_up_end) {
            int64_t task = ticket - j->quantize_tasks;
            struct chunk *c = &j->chunk[task / j->gate_up_blocks];
            wait_for(&j->quantized, j->quantize_tasks);
            gate_up_task(j, c, task % j->gate_up_blocks, blocks, next);
            finish_gate_up(j, c, blocks);
        } else if (ticket < down_end) {
            int64_t task = ticket - gate_up_end, block = task % j->down_blocks;
            const struct chunk *c = &j->chunk[task / j->down_blocks];
            wait_for(&c->ready, 1);
            block_of(isa, &a->w2, a->bias_w2, &down, c->expert, c->first, c->count, block, next, block * isa->channels);
            if (down.stream) FENCE_STREAM();
            __atomic_add_fetch(&j->down_done, 1, __ATOMIC_RELEASE);
        } else {
            wait_for(&j->down_done, down_tasks);
            combine_task(j, ticket - down_end);
        }
    }
}

int64_t lowgmm_layer(const struct layer *a, int64_t index, parallel_t parallel, unsigned threads)
{
    const struct isa *isa = all[index];
    struct layer_job j = {
        .a = a, .isa = isa, .gating = {a->activation, a->between, a->alpha, a->limit}, .E = a->w13.E, .H = a->w13.K, .I = a->w2.K,
        .fused = a->w2.K % isa->channels == 0, .xq_stride = padded_stride(isa, &a->w13), .hq_stride = padded_stride(isa, &a->w2),
    };
    int64_t bytes = lay_out_layer(&j, NULL);
    if (a->scratch_bytes < bytes) return bytes;
    lay_out_layer(&j, a->scratch);
    sort_slots(&j);
    j.tokens_at_a_time = at_a_time(a->T, threads);
    j.quantize_tasks = j.combine_tasks = ceil_div(a->T, j.tokens_at_a_time);
    j.gate_up_blocks = j.fused ? j.I / isa->channels : ceil_div(2 * j.I, isa->channels);
    j.down_blocks = ceil_div(j.H, isa->channels);
    for (int64_t c = 0; c < j.chunks; ++c) j.chunk[c].gate_up_left = j.gate_up_blocks;
    j.threads = threads;
    j.most = run_of(block_bytes(isa, &a->w13), j.R, j.chunks);
    run(parallel, threads, layer_work, &j);
    return 0;
}

int64_t lowgmm_layout(void)
{
    return (int64_t)(sizeof(struct quantize) << 40 | sizeof(struct gmm) << 20 | sizeof(struct layer));
}
