/* y = x Wᵀ + b for up to 64 rows of x, on tensor cores: what the formats' kernels share.

A format is a class with W's shape (rows, columns), SLOT and TABLE (bytes), and three functions of a warp or a block:
fetch begins to copy a step of W, 16·RT rows by 256 columns of K, to a slot; build fills the table; compute adds a step's
products. It takes mma.m16n8k16 with W on the left: with g = lane / 4, t = lane % 4, a lane holds rows g and g + 8 of W,
row g of x, and of the sums rows g and g + 8 of W, rows 2t and 2t + 1 of x. The order of K may be any, W's and x's alike.

A block is WR groups of WK warps; only the table is common to them. A group has a tile of 16·RT rows of W at a time, and
its warps take turns over the steps. Each warp's copies run ahead, in a ring of STAGES slots of its own, over the end of a
tile too. There the sums of the group's warps are added in a fixed order.

All that is read before begin_after_others() are weights, so that it may happen while the kernel before still runs.

Constants: RT, NT (tiles of 8 rows of x), WR, WK, STAGES, BF16 (else fp16). */

#pragma once

#include "warp.cuh"

constexpr u32 ROWS = 16 * RT, WARPS = WR * WK, THREADS = 32 * WARPS;

constexpr u32 SUMS_OF_ROW = 2 * WARPS * ROWS * 4; /* bytes of shared memory */

typedef float Sums[RT][NT][4];

/* Put a group's sums [warp, row of x, row of the tile] in shared memory, then y: `factor` times their sum. */
__device__ __forceinline__ void finish(
    const Sums &sum, float *sums, u16 *out, const u16 *bias, float factor, u32 row, u32 rows, u32 batch, u32 warp,
    u32 lane) {
    u32 group = warp / WK, part = warp % WK;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                if (m < batch)
                    sums[(part * batch + m) * ROWS + 16 * r + i / 2 * 8 + lane / 4] = sum[r][n][i];
            }
    group_arrives<32 * WK>(group);
    for (u32 i = part * 32 + lane; i < batch * ROWS; i += 32 * WK) {
        u32 n = row + i % ROWS;
        if (n < rows) {
            float total = 0;
#pragma unroll
            for (u32 k = 0; k < WK; k++)
                total += sums[k * batch * ROWS + i];
            total = total * factor + (bias ? number<BF16>(bias[n]) : 0.0f);
            out[(u64)(i / ROWS) * rows + n] = (u16)pair<BF16>(total, 0.0f);
        }
    }
}

/* The kernel: `factor` multiplies all sums. A lane's first value of x in a step is NEIGHBOURS after its left neighbour's. */
template <typename W>
__device__ __forceinline__ void product(W w, const u16 *x, const u16 *bias, u16 *out, float factor, u32 batch) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / WK, first = warp % WK;
    u32 tiles = (w.rows + ROWS - 1) / ROWS, steps = w.columns / 256;
    u32 first_tile = group * gridDim.x + blockIdx.x, stride = gridDim.x * WR;
    u8 *ring = shared + W::TABLE + warp * STAGES * W::SLOT;
    float *sums = (float *)(shared + W::TABLE + WARPS * STAGES * W::SLOT) + group * 2 * WK * batch * ROWS;

    u32 next_tile = first < steps ? first_tile : tiles, next_step = first, filled = 0;
    auto fetch_next = [&] {
        if (next_tile < tiles) {
            w.fetch(ring + filled * W::SLOT, next_tile * ROWS, next_step, lane);
            next_step += WK;
            if (next_step >= steps)
                next_step = first, next_tile += stride;
        }
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        commit();
    };
    for (int i = 0; i < STAGES - 1; i++)
        fetch_next();
    w.build();
    __syncthreads();
    begin_after_others();

    u32 stage = 0, odd = 0;
    const u16 *x_lane = x + (u64)(lane / 4) * w.columns + lane % 4 * W::NEIGHBOURS;
    for (u32 tile = first_tile; tile < tiles; tile += stride) {
        Sums sum = {};
        for (u32 step = first; step < steps; step += WK) {
            wait<STAGES - 2>();
            __syncwarp(); /* every lane's copies are there, and every lane has read the slot that is filled next */
            fetch_next();
            w.compute(sum, ring + stage * W::SLOT, x_lane + step * 256, batch, lane);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        /* Sums change places from tile to tile: those of the last one may still be read. */
        finish(sum, sums + odd * WK * batch * ROWS, out, bias, factor, tile * ROWS, w.rows, batch, warp, lane);
        odd ^= 1;
    }
}
