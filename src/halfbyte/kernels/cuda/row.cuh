/* y = x Wᵀ + b for one row of x, on tensor cores: what the formats' kernels share.

W is mma's left operand, but the eight columns of its right one, of which a row of x would fill one, are the eight parts
of 32 weights that a row of W has in 256 columns: B has x's part n in column n and zeros elsewhere. So each part has a sum
of its own, and a block's scale is one fp32 factor of a sum instead of one of each weight.

With g = lane / 4 and t = lane % 4, a lane decodes of rows g and g + 8 of W the parts 2t and 2t + 1, and holds of x the part
g if it is one of these, else zeros. Products with parts 2t go to one set of sums and those with parts 2t + 1 to another, so
that one B serves both: columns of the other's parts mean nothing.

A block is WR groups of WK warps. A group has RT tiles of 16 rows at a time, and its warps take turns over K; their sums are
added in a fixed order. Each warp copies ahead, to slots of its own. All that is read before begin_after_others() are
weights.

Constants: RT, WR, WK, STAGES, BF16 (else fp16), ORIGIN (where a block's shared memory begins). */

#include "warp.cuh"

constexpr u32 ROWS = 16, WARPS = WR * WK, THREADS = 32 * WARPS;
constexpr int AHEAD = 3; /* operands that are on their way */

/* The last tile begins early enough to be whole: rows that two tiles have come out alike. */
__device__ __forceinline__ u32 first_row(u32 rows, u32 tile) { return min(tile * ROWS, rows - ROWS); }

/* A lane's 32 values of x in a step. */
struct Inputs {
    u32 v[16] = {};
    const u16 *x;
    bool own;

    __device__ __forceinline__ void begin(const u16 *row, bool inside, u32 lane) {
        x = row + lane / 4 * 32, own = inside && lane / 8 == lane % 4;
        keep(x);
    }

    __device__ __forceinline__ void load(u32 step) {
        if (own)
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(uint4 *)(v + 4 * j) = from_global(x + step * 256 + j * 8);
    }
};

/* The products of this lane's parts with rows of x, sum[m][u][2 · half + u] for rows g + 8 · half. look_up(a, u, j) is mma's left operand of
part u's columns 4j and on. */
template <typename F> __device__ __forceinline__ void multiply_ahead(F look_up, float (&sum)[BATCH][2][4], const Inputs (&x)[BATCH]) {
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

/* Put a warp's sums of RT tiles in shared memory, then the group's in y: `factor` times their sum. */
__device__ __forceinline__ void finish(
    float (&total)[RT][BATCH][2], float *sums, u16 *out, const u16 *bias, float factor, u32 rows, u32 batch, u32 tile,
    u32 tiles, u32 apart, u32 part, u32 group, u32 lane) {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int m = 0; m < BATCH; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &sum = total[r][m][half];
                sum += shuffle(sum, 1);
                sum += shuffle(sum, 2);
                if (lane % 4 == 0)
                    sums[((part * RT + r) * BATCH + m) * ROWS + 8 * half + lane / 4] = sum;
            }
    group_arrives<32 * WK>(group);
    constexpr u32 COUNT = RT * BATCH * ROWS;
    for (u32 i = part * 32 + lane; i < COUNT; i += 32 * WK) {
        u32 mine = tile + i / (BATCH * ROWS) * apart, m = i / ROWS % BATCH;
        if (mine < tiles && m < batch) {
            float y = 0;
#pragma unroll
            for (u32 k = 0; k < WK; k++)
                y += sums[k * COUNT + i];
            u32 row = first_row(rows, mine) + i % ROWS;
            out[(u64)m * rows + row] = (u16)pair<BF16>(y * factor + (bias ? number<BF16>(bias[row]) : 0.0f), 0.0f);
        }
    }
}
