/* Arm NEON with the dot product instructions (armv8.2-a+dotprod). */
#if defined(__aarch64__) && defined(__GNUC__)
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
enum { CHANNELS = 16 };
#include "rows.h"
#include <arm_neon.h>
#include <sys/auxv.h>

static int supported(void) { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; } /* HWCAP_ASIMDDP */

enum { ROWS = 6 };

FN int8x16_t row_at(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

FN void dot_steps(int32_t (*acc)[CHANNELS], const struct tile *t, int64_t from, int64_t to, const int rows, const int bits)
{
    const uint8_t *w = t->w + from * 64;
    int32x4_t sums[ROWS][4];
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < 4; ++i) sums[r][i] = vld1q_s32(&acc[r][4 * i]);
    for (int64_t step = from; step < to; ++step, w += 64)
        for (int i = 0; i < 4; ++i) {
            const uint8x16_t v = vld1q_u8(w + 16 * i);
            const int8x16_t first = vreinterpretq_s8_u8(bits == 8 ? v : vandq_u8(v, vdupq_n_u8(15)));
            const int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
            for (int r = 0; r < rows; ++r) {
                const int8_t *x = t->x[r] + step * (bits == 8 ? 4 : 8);
                sums[r][i] = vdotq_s32(sums[r][i], first, row_at(x));
                if (bits == 4) sums[r][i] = vdotq_s32(sums[r][i], second, row_at(x + 4));
            }
        }
    for (int r = 0; r < rows; ++r)
        for (int i = 0; i < 4; ++i) vst1q_s32(&acc[r][4 * i], sums[r][i]);
}

#define MOST_ROWS 6
#include "narrow_tile.h"

const struct isa lowgmm_neon = {"neon", supported, CHANNELS, ROWS, 0, 4, 8, tile, quantize_row, activate_row, combine_row};
#endif
