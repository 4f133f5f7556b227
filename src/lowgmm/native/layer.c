/* The task queue of the expert layer. */
#include "tasks.h"

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
    const struct isa *isa = lowgmm_isas[index];
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
