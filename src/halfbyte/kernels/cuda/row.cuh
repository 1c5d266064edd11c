/* y = x Wᵀ + b for one or two rows of x, on tensor cores: what does not depend on W's format.

W is mma's left operand. Of the eight columns of its right one, a row of x would fill one. Instead they are the eight parts
of 32 weights that a row of W has in a step of 256 columns: column n has x's part n, and zeros elsewhere along K. So each
part has a sum of its own, and a block's scale is one fp32 factor of a sum.

With g = lane / 4 and t = lane % 4, a lane decodes of rows g and g + 8 of W the parts 2t and 2t + 1, and holds of x the part g
if it is one of these, else zeros. Products with parts 2t go to one set of sums and those with parts 2t + 1 to another, so
that one right operand serves both: columns of the other's parts mean nothing.

Constants: BATCH (rows of x, 1 or 2), RT, WR, WK (see row4.cu), BF16 (else fp16). */

#pragma once

#include "warp.cuh"

constexpr u32 ROWS = 16, THREADS = 32 * WR * WK;
constexpr int AHEAD = 3; /* operands that are on their way */

/* The last tile begins early enough to be whole: rows that two tiles have come out alike. */
__device__ __forceinline__ u32 first_row(u32 rows, u32 tile) { return min(tile * ROWS, rows - ROWS); }

/* A lane's 32 values of a row of x in a step. */
struct Part {
    u32 v[16] = {};
    const u16 *x;
    bool own;

    __device__ __forceinline__ void begin(const u16 *row, u32 lane) {
        x = row + lane / 4 * 32, own = lane / 8 == lane % 4;
        keep(x);
    }

    __device__ __forceinline__ void load(u32 step) {
        if (own)
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(uint4 *)(v + 4 * j) = from_global(x + step * 256 + j * 8);
    }
};

/* Products of this lane's parts with each row of x: sum[m][u][2 · half + u] for rows g + 8 · half and part 2t + u.
look_up(a, u, j) makes mma's left operand, that part's columns 4j and on. */
template <typename F>
__device__ __forceinline__ void multiply_parts(F look_up, float (&sum)[BATCH][2][4], const Part (&x)[BATCH]) {
    u32 a[16][4];
#pragma unroll
    for (int i = 0; i < 8 * BATCH; i++)
        sum[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        look_up(a[i], i % 2, i / 2);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (i + AHEAD < 16)
            look_up(a[i + AHEAD], (i + AHEAD) % 2, (i + AHEAD) / 2);
#pragma unroll
        for (int m = 0; m < BATCH; m++)
            multiply<BF16>(sum[m][i % 2], a[i], x[m].v[i / 2 * 2], x[m].v[i / 2 * 2 + 1]);
    }
}

/* A group's sums of RT tiles, `apart` from each other, and y. `part` is the warp's number in the group. */
__device__ __forceinline__ void finish(
    float (&total)[RT][BATCH][2], float *sums, u16 *out, const u16 *bias, u32 rows, u32 tile, u32 apart, u32 group,
    u32 part, u32 lane) {
    constexpr u32 COUNT = RT * BATCH * ROWS;
#pragma unroll
    for (int i = 0; i < RT * BATCH; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[i / BATCH][i % BATCH][half];
            sum += shuffle(sum, 1);
            sum += shuffle(sum, 2);
            if (lane % 4 == 0)
                sums[part * COUNT + i * ROWS + 8 * half + lane / 4] = sum;
        }
    group_arrives<32 * WK>(group);
    for (u32 i = part * 32 + lane; i < COUNT; i += 32 * WK) {
        u32 mine = tile + i / (BATCH * ROWS) * apart, m = i / ROWS % BATCH, row = first_row(rows, mine) + i % ROWS;
        if (mine * ROWS < rows) {
            float y = bias ? number<BF16>(bias[row]) : 0.0f;
#pragma unroll
            for (u32 k = 0; k < WK; k++)
                y += sums[k * COUNT + i];
            out[(u64)m * rows + row] = (u16)pair<BF16>(y, 0.0f);
        }
    }
}
