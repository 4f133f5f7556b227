/* The frame of a tile of 16 channels, for instruction sets with short vectors. Include rows.h first, with CHANNELS 16, and define
 *     FN void dot_steps(int32_t (*acc)[16], const struct tile *t, int64_t from, int64_t to, int rows, int bits)
 * which adds the products of steps from … to to acc; and MOST_ROWS, 3 or 6. */
FN void narrow_tile_of(const struct tile *t, const int rows, const int bits, union sums *s)
{
    const int one_group = t->steps <= t->group_steps;
    for (int64_t group = 0, step = 0; step < t->steps; ++group) {
        int64_t end = step + t->group_steps < t->steps ? step + t->group_steps : t->steps;
        int32_t acc[MAX_ROWS][CHANNELS];
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < CHANNELS; ++c) acc[r][c] = t->start[r] ? t->start[r][group] : 0;
        dot_steps(acc, t, step, end, rows, bits);
        step = end;
        if (one_group) {
            for (int r = 0; r < rows; ++r) memcpy(s->i[r], acc[r], sizeof acc[r]);
            return;
        }
        float scale[CHANNELS] = {0};
        memcpy(scale, t->scales_w + group * t->scale_group, 4 * (size_t)(t->channels < CHANNELS ? t->channels : CHANNELS));
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < CHANNELS; ++c) {
                float v = (float)acc[r][c] * scale[c];
                s->f[r][c] = group ? s->f[r][c] + v : v;
            }
    }
}

#define NARROW_CASE(n) case n: narrow_tile_of(t, n, bits, &s); break;
FN void narrow_tile(const struct tile *t, int rows, const int bits)
{
    union sums s;
    switch (rows) {
        NARROW_CASE(1) NARROW_CASE(2) NARROW_CASE(3)
#if MOST_ROWS > 3
        NARROW_CASE(4) NARROW_CASE(5) NARROW_CASE(6)
#endif
    }
    store_tile(t, rows, &s);
}

TARGET static void tile8(const struct tile *t, int rows) { narrow_tile(t, rows, 8); }
TARGET static void tile4(const struct tile *t, int rows) { narrow_tile(t, rows, 4); }
static void tile(const struct tile *t, int rows) { t->bits == 8 ? tile8(t, rows) : tile4(t, rows); }
