/* y = x Wᵀ + b for up to 64 rows of x, on tensor cores: what the formats' kernels share.

A format is a class with W's shape (rows, columns), SLOT and TABLE (bytes), and three functions of a warp or a block:
fetch begins to copy a step of W, 16·RT rows by 256 columns of K, to a slot; build fills the table; compute adds a step's
products. It takes mma.m16n8k16 with W on the left: with g = lane / 4, t = lane % 4, a lane holds rows g and g + 8 of W,
row g of x, and of the sums rows g and g + 8 of W, rows 2t and 2t + 1 of x. The order of K may be any, W's and x's alike.

A block of WR×WK warps has a tile of 16·RT·WR rows of W at a time. Its WK warps, like the S blocks of a cluster, take
turns over the steps, and each warp's copies run ahead, in a ring of STAGES slots of its own. At the end of a tile the sums
of all WK·S warps are added in a fixed order.

Constants: RT, NT (tiles of 8 rows of x), WR, WK, S, STAGES, BF16 (else fp16). */

#include "warp.cuh"

constexpr u32 WARP_ROWS = 16 * RT, ROWS = WARP_ROWS * WR, WARPS = WR * WK, THREADS = 32 * WARPS;

typedef float Sums[RT][NT][4];

/* Sums [warp of WK, row of x, row of the tile] in shared memory; then y, which is `factor` times their sum, shared among the cluster's threads. */
__device__ __forceinline__ void finish(
    const Sums &sum, float *sums, u16 *out, const u16 *bias, float factor, u32 row, u32 rows,
    u32 batch, u32 rank, u32 warp, u32 lane) {
    u32 at = warp % WR * WARP_ROWS + lane / 4;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                if (m < batch)
                    sums[(warp / WR * batch + m) * ROWS + at + 16 * r + i / 2 * 8] = sum[r][n][i];
            }
    all_arrive<S>();
    for (u32 i = rank * THREADS + threadIdx.x; i < batch * ROWS; i += S * THREADS) {
        u32 n = row + i % ROWS;
        if (n < rows) {
            float total = 0;
#pragma unroll
            for (u32 s = 0; s < S; s++)
#pragma unroll
                for (u32 k = 0; k < WK; k++)
                    total += of_block<S>(sums + k * batch * ROWS + i, s);
            out[(u64)(i / ROWS) * rows + n] = (u16)pair<BF16>(total * factor + (bias ? number<BF16>(bias[n]) : 0.0f), 0.0f);
        }
    }
    all_arrive<S>(); /* nobody overwrites, or leaves with, sums that are still read */
}

/* The kernel: `factor` multiplies all sums. A lane's first value of x in a step is NEIGHBOURS after its left neighbour's. */
template <typename W>
__device__ __forceinline__ void product(W w, const u16 *x, const u16 *bias, u16 *out, float factor, u32 batch) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % S;
    u32 tiles = (w.rows + ROWS - 1) / ROWS, steps = w.columns / 256, clusters = gridDim.x / S;
    u32 first = rank * WK + warp / WR, stride = S * WK, warp_row = warp % WR * WARP_ROWS;
    u8 *ring = shared + W::TABLE + warp * STAGES * W::SLOT;
    float *sums = (float *)(shared + W::TABLE + WARPS * STAGES * W::SLOT);

    u32 next_tile = first < steps ? blockIdx.x / S : tiles, next_step = first, filled = 0;
    auto fetch_next = [&] {
        if (next_tile < tiles) {
            w.fetch(ring + filled * W::SLOT, next_tile * ROWS + warp_row, next_step, lane);
            next_step += stride;
            if (next_step >= steps)
                next_step = first, next_tile += clusters;
        }
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        commit();
    };
    for (int i = 0; i < STAGES - 1; i++)
        fetch_next();
    w.build();
    __syncthreads();

    u32 stage = 0;
    const u16 *x_lane = x + (u64)(lane / 4) * w.columns + lane % 4 * W::NEIGHBOURS;
    for (u32 tile = blockIdx.x / S; tile < tiles; tile += clusters) {
        Sums sum = {};
        for (u32 step = first; step < steps; step += stride) {
            wait<STAGES - 2>();
            __syncwarp(); /* every lane's copies are there, and every lane has read the slot that is filled next */
            fetch_next();
            w.compute(sum, ring + stage * W::SLOT, x_lane + step * 256, batch, lane);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        finish(sum, sums, out, bias, factor, tile * ROWS, w.rows, batch, rank, warp, lane);
    }
}
