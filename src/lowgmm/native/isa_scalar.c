/* Any CPU: no intrinsics. What the others are compared with, and what runs where none of them does. */
#define TARGET
enum { CHANNELS = 16 };
#include "rows.h"

static int supported(void) { return 1; }

FN void dot_steps(int32_t (*acc)[CHANNELS], const struct tile *t, int64_t from, int64_t to, const int rows, const int bits)
{
    for (int64_t step = from; step < to; ++step) {
        const uint8_t *w = t->w + step * CHANNELS * 4;
        for (int r = 0; r < rows; ++r) {
            const int8_t *x = t->x[r] + step * (bits == 8 ? 4 : 8);
            for (int c = 0; c < CHANNELS; ++c)
                for (int k = 0; k < 4; ++k) {
                    const uint8_t v = w[4 * c + k];
                    acc[r][c] += bits == 8 ? (int8_t)v * x[k] : (v & 15) * x[k] + (v >> 4) * x[k + 4];
                }
        }
    }
}

#define MOST_ROWS 6
#include "narrow_tile.h"

const struct isa lowgmm_scalar = {"scalar", supported, CHANNELS, 6, 0, 4, 8, tile, quantize_row, activate_row, combine_row};
