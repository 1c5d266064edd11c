/* x·Wᵀ for a few rows of x with GPTQ's int4, whose words hold the codes of eight inputs for one output (formats/int4.py).

   Lanes are outputs. A panel of outputs is multiplied a group of inputs at a time: sums of code · x, then scale · (sum −
   zero · Σx). */

#include "lanes.h"
#include "threads.h"

enum { PACK = 8, PANEL = 512, MOST_X = 4 };

typedef struct {
    const uint32_t *codes, *zeros; /* [K/8, N], [G, N/8] */
    const void *scales;            /* [G, N] in `dtype` of values.h */
    int64_t rows, columns, groups;
    int32_t zero_shift, dtype;
} int4_weight;

/* Scales and zeros of outputs [first, first + count) in a group. Arrays end at a multiple of 16. */
INLINE void group_scales(const int4_weight *w, int64_t group, int64_t first, int64_t count, float *scales, float *zeros) {
    const uint32_t *words = w->zeros + group * (w->rows / PACK) + first / PACK;
    for (int64_t n = 0; n < count; n += 16) {
        int left = count - n < 16 ? (int)(count - n) : 16;
        int64_t at = group * w->rows + first + n;
        f16v values = w->dtype == FP32   ? load_values(w->scales, at, FP32, left)
                      : w->dtype == BF16 ? load_values(w->scales, at, BF16, left)
                                         : load_values(w->scales, at, FP16, left);
        store(scales + n, values);
    }
    for (int64_t n = 0; n < count; n += PACK) {
        uint32_t word = words[n / PACK];
        for (int i = 0; i < PACK; i++) zeros[n + i] = (float)(int32_t)(((word >> (4 * i)) + (uint32_t)w->zero_shift) & 15);
    }
}

/* sums [M, panel] += code · x of eight inputs and LANES outputs; x [M, 8] over 16^j: codes stay where they are. */
INLINE void add_octet(uv words, const fv x[MOST_X][PACK], float *sums, int64_t panel, const int M) {
    fv values[PACK];
#pragma GCC unroll 8
    for (int j = 0; j < PACK; j++)
        values[j] = __builtin_convertvector((iv)(j < 7 ? words & (15u << (4 * j)) : words >> 28), fv);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
        fv even = values[0] * x[m][0], odd = values[1] * x[m][1];
#pragma GCC unroll 4
        for (int j = 2; j < PACK; j += 2) even += values[j] * x[m][j], odd += values[j + 1] * x[m][j + 1];
        store_lanes(sums + m * panel, load_lanes(sums + m * panel) + (even + odd));
    }
}

/* Outputs [first, first + count) for x [M, columns]; y [M, rows]. */
INLINE void panel_of(const int4_weight *w, const float *x, float *y, int64_t first, int64_t count, const int M) {
    int64_t size = w->columns / w->groups, full = count / LANES * LANES;
    float total[MOST_X * PANEL] = {0}, sums[MOST_X * PANEL], scales[PANEL + 16], zeros[PANEL + 16];
    for (int64_t group = 0; group < w->groups; group++) {
        for (int m = 0; m < M; m++) memset(sums + m * PANEL, 0, PANEL * sizeof(float));
        for (int64_t k = group * size; k < (group + 1) * size; k += PACK) {
            const uint32_t *words = w->codes + k / PACK * w->rows + first;
            fv scaled[MOST_X][PACK];
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int j = 0; j < PACK; j++)
                    scaled[m][j] = (fv){0} + x[m * w->columns + k + j] * (j < 7 ? 1.0f / (float)(1u << (4 * j)) : 1.0f);
            for (int64_t n = 0; n < full; n += LANES) {
                uv vector;
                memcpy(&vector, words + n, sizeof vector);
                __builtin_prefetch(words + w->rows + n);
                add_octet(vector, scaled, sums + n, PANEL, M);
            }
            if (full < count) {
                uv vector = {0};
                memcpy(&vector, words + full, (size_t)(count - full) * 4);
                add_octet(vector, scaled, sums + full, PANEL, M);
            }
        }
        group_scales(w, group, first, count, scales, zeros);
        for (int m = 0; m < M; m++) {
            float of_x = 0;
            for (int64_t k = group * size; k < (group + 1) * size; k++) of_x += x[m * w->columns + k];
            for (int64_t n = 0; n < count; n++)
                total[m * PANEL + n] += scales[n] * (sums[m * PANEL + n] - zeros[n] * of_x);
        }
    }
    for (int m = 0; m < M; m++) memcpy(y + m * w->rows + first, total + m * PANEL, (size_t)count * sizeof(float));
}

typedef struct {
    const int4_weight *w;
    const float *x;
    float *y;
    int64_t batch;
} int4_product;

static void int4_piece(const void *job, int64_t first, int64_t last) { /* panels */
    const int4_product *p = job;
    for (int64_t n = first * PANEL; n < last * PANEL; n += PANEL) {
        int64_t count = p->w->rows - n < PANEL ? p->w->rows - n : PANEL;
        if (p->batch == 1) panel_of(p->w, p->x, p->y, n, count, 1);
        else if (p->batch == 2) panel_of(p->w, p->x, p->y, n, count, 2);
        else if (p->batch == 3) panel_of(p->w, p->x, p->y, n, count, 3);
        else panel_of(p->w, p->x, p->y, n, count, 4);
    }
}

/* y [batch, rows] = x·Wᵀ for x [batch, columns]. */
int halfbyte_few_int4(const int4_weight *w, const float *x, float *y, int64_t batch, int threads) {
    for (int64_t m = 0; m < batch; m += MOST_X) {
        int64_t count = batch - m < MOST_X ? batch - m : MOST_X;
        int4_product job = {w, x + m * w->columns, y + m * w->rows, count};
        spread(int4_piece, &job, (w->rows + PANEL - 1) / PANEL, 1, threads);
    }
    return 0;
}
