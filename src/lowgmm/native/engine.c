/* The C ABI but for the expert layer: choice of the instruction set, and the task queues of quantise and gmm. */
#include "tasks.h"

/* ---- instruction sets ---------------------------------------------------------------------------------------------------- */

const struct isa *const lowgmm_isas[] = {
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
    return i >= 0 && i < (int64_t)(sizeof lowgmm_isas / sizeof *lowgmm_isas) ? lowgmm_isas[i]->name : NULL;
}

int lowgmm_isa_supported(int64_t i) { return lowgmm_isas[i]->supported(); }

void lowgmm_isa_layout(int64_t i, int32_t layout[4])
{
    layout[0] = lowgmm_isas[i]->channels;
    layout[1] = lowgmm_isas[i]->unsigned8;
    layout[2] = lowgmm_isas[i]->pad8;
    layout[3] = lowgmm_isas[i]->pad4;
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
    struct quantize_job job = {*args, lowgmm_isas[isa]};
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
    struct gmm_job job = {.a = a, .isa = lowgmm_isas[isa]};
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

int64_t lowgmm_layout(void)
{
    return (int64_t)(sizeof(struct quantize) << 40 | sizeof(struct gmm) << 20 | sizeof(struct layer));
}
