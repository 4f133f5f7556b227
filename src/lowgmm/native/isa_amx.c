/* AMX: 16 rows by 64 channels in four tile registers. INT8 only, and only where there are rows enough to fill tiles; INT4 and few
 * rows run the AVX512-VNNI loops, on the same packed weights. -DLOWGMM_EMULATE_AMX computes the tile instructions in C, so
 * that a CPU without them can test the loops. */
#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#include <immintrin.h>
#ifdef LOWGMM_EMULATE_AMX
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8")))
#endif
enum { CHANNELS = 64 };
#include "rows.h"
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ROWS = 16, COLUMNS = 4, STEP = 256, DEPTH = 16, FEW = 7 };

struct palette {
    uint8_t id, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

#ifdef LOWGMM_EMULATE_AMX
static __thread int8_t tiles[8][16][64];
static __thread struct palette configured;
static void load_config(const struct palette *p) { configured = *p; }
static void release(void) {}
static void zero(int to) { memset(tiles[to], 0, sizeof tiles[to]); }
static void load(int to, const void *from, int64_t stride)
{
    for (int r = 0; r < configured.rows[to]; ++r)
        memcpy(tiles[to][r], (const char *)from + r * stride, configured.bytes_per_row[to]);
}
static void store(int from, void *to, int64_t stride)
{
    for (int r = 0; r < configured.rows[from]; ++r)
        memcpy((char *)to + r * stride, tiles[from][r], configured.bytes_per_row[from]);
}
static void multiply(int to, int a, int b)
{
    for (int r = 0; r < configured.rows[to]; ++r)
        for (int c = 0; c < configured.bytes_per_row[to] / 4; ++c) {
            int32_t sum;
            memcpy(&sum, &tiles[to][r][4 * c], 4);
            for (int k = 0; k < configured.bytes_per_row[a]; ++k)
                sum += tiles[a][r][k] * (uint8_t)tiles[b][k / 4][4 * c + k % 4];
            memcpy(&tiles[to][r][4 * c], &sum, 4);
        }
}
static int supported(void) { return lowgmm_avx512vnni.supported(); }
#else
#define load_config(p) _tile_loadconfig(p)
#define release() _tile_release()
#define zero(to) _tile_zero(to)
#define load(to, from, stride) _tile_loadd(to, from, stride)
#define store(from, to, stride) _tile_stored(from, to, stride)
#define multiply(to, a, b) _tile_dpbsud(to, a, b)
static int supported(void)
{
    unsigned a, b, c, d;
    if (!lowgmm_avx512vnni.supported() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 24 & 1) || !(d >> 25 & 1)) return 0;          /* AMX-TILE, AMX-INT8 */
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;        /* ARCH_REQ_XCOMP_PERM: the kernel saves tile data on request */
}
#endif

/* Tiles 0 to 3: sums of 16 channels each; 4: rows; 5 and 6: weights. K is padded to whole steps of 64. */
TARGET static void tile8(const struct tile *t, int rows)
{
    struct palette p = {.id = 1};
    for (int i = 0; i < 7; ++i) {
        p.bytes_per_row[i] = 64;
        p.rows[i] = (uint8_t)(i < 5 ? rows : 16);
    }
    union sums s;
    load_config(&p);
    zero(0);
    zero(1);
    zero(2);
    zero(3);
    int8_t x[ROWS][64];
    for (int64_t step = 0; step < t->steps; step += DEPTH) {
        const uint8_t *w = t->w + step * STEP;
        for (int r = 0; r < rows; ++r) memcpy(x[r], t->x[r] + 4 * step, 64);
        for (int i = 0; i < DEPTH; ++i) _mm_prefetch((const char *)t->fetch[0] + (step + i) * STEP, _MM_HINT_T1);
        load(4, x, 64);
        load(5, w, STEP);
        multiply(0, 4, 5);
        load(6, w + 64, STEP);
        multiply(1, 4, 6);
        load(5, w + 128, STEP);
        multiply(2, 4, 5);
        load(6, w + 192, STEP);
        multiply(3, 4, 6);
    }
    store(0, &s.i[0][0], MAX_CHANNELS * 4);
    store(1, &s.i[0][16], MAX_CHANNELS * 4);
    store(2, &s.i[0][32], MAX_CHANNELS * 4);
    store(3, &s.i[0][48], MAX_CHANNELS * 4);
    release();
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < CHANNELS; ++c) s.i[r][c] = (int32_t)((uint32_t)s.i[r][c] + (uint32_t)t->start[r][0]); /* wraps */
    store_tile(t, rows, &s);
}

static void tile(const struct tile *t, int rows)
{
    if (t->bits == 8 && rows > FEW) {
        tile8(t, rows);
        return;
    }
    struct tile part = *t;
    for (int first = 0; first < rows; first += FEW) {
        int n = rows - first < FEW ? rows - first : FEW;
        memcpy(part.x, t->x + first, (size_t)n * sizeof *t->x);
        memcpy(part.start, t->start + first, (size_t)n * sizeof *t->start);
        memcpy(part.out, t->out + first, (size_t)n * sizeof *t->out);
        memcpy(part.scales_x, t->scales_x + first, (size_t)n * sizeof *t->scales_x);
        lowgmm_avx512vnni.tile(&part, n);
    }
}

const struct isa lowgmm_amx = {"amx", supported, CHANNELS, ROWS, 1, 64, 8, tile, quantize_row, activate_row, combine_row};
#endif
