/* y = factor · x Wᵀ + b for up to 16 rows of x, on tensor cores: a split-K pipeline, for any format of W.

W is mma.m16n8k16's left operand: with g = lane / 4, t = lane % 4, a lane holds rows g and g + 8 of W, row g of x,
and of the sums rows g and g + 8 of W, rows 2t and 2t + 1 of x. The order of K may be any, W's and x's alike.

A block is WR groups of WK warps; only a table is common to them. A group has a tile of 16·RT rows of W at a time,
and its warps take turns over its K tiles of 256 columns; the warps' sums are added in a fixed order. Each warp's
copies run ahead, in a ring of STAGES stages of its own, over the end of a tile too. All that is read before
griddepcontrol_wait() are weights, so that it may happen while the kernel before still runs.

A decoder is a class with W's shape (rows, columns), and

    STAGE, SUMS           bytes of a stage of the ring; where sums begin, behind the table and all rings
    ring, first_row      where a warp's ring begins; a tile's first row
    build, factor        fills the table and reads what else is one number; what multiplies all sums
    Source               where a warp copies from: fetch begins to copy a K tile, next goes on
    Operands, Total      what a lane has of x, whose accumulate adds a K tile's products to sums: one set of them or two

Constants: RT, NT (tiles of 8 rows of x), WR, WK, STAGES, BF16 (else fp16). */

#pragma once

#include "warp.cuh"

constexpr u32 ROWS = 16 * RT, WARPS = WR * WK, THREADS = 32 * WARPS;
constexpr u32 SUMS_OF_ROW = 2 * WARPS * ROWS * 4; /* bytes of shared memory for each row of x */

typedef float Sums[RT][NT][4];

__device__ __forceinline__ float total(const Sums &sum, u32 r, u32 n, u32 i) { return sum[r][n][i]; }
__device__ __forceinline__ float total(const Sums (&sum)[2], u32 r, u32 n, u32 i) {
    return sum[0][r][n][i] + sum[1][r][n][i];
}

/* Put a group's sums [warp, row of x, row of the tile] in shared memory, then y: `factor` times their sum. */
template <typename T>
__device__ __forceinline__ void finish(
    const T &sum, float *sums, u16 *out, const u16 *bias, float factor, u32 row, u32 rows, u32 batch, u32 warp,
    u32 lane) {
    u32 group = warp / WK, split = warp % WK;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                if (m < batch)
                    sums[(split * batch + m) * ROWS + 16 * r + i / 2 * 8 + lane / 4] = total(sum, r, n, i);
            }
    group_sync<32 * WK>(group);
    for (u32 i = split * 32 + lane; i < batch * ROWS; i += 32 * WK) {
        u32 n = row + i % ROWS;
        if (n < rows) {
            float y = 0;
#pragma unroll
            for (u32 k = 0; k < WK; k++)
                y += sums[k * batch * ROWS + i];
            y = y * factor + (bias ? number<BF16>(bias[n]) : 0.0f);
            out[(u64)(i / ROWS) * rows + n] = (u16)pair<BF16>(y, 0.0f);
        }
    }
}

/* The kernel. */
template <typename W>
__device__ __forceinline__ void split_k(W w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / WK, first = warp % WK;
    u32 tiles = (w.rows + ROWS - 1) / ROWS, k_tiles = w.columns / 256;
    u32 first_tile = group * gridDim.x + blockIdx.x, stride = gridDim.x * WR;
    u32 ring = W::ring(warp);
    float *sums = (float *)(shared + W::SUMS) + group * 2 * WK * batch * ROWS;

    typename W::Source source(w, first < k_tiles ? first_tile : tiles, first, lane);
    u32 filled = 0;
    auto fetch_next = [&] {
        if (source.tile < tiles) {
            source.fetch(shared + ring + filled * W::STAGE);
            source.next(first, k_tiles, stride);
        }
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        commit();
    };
    for (int i = 0; i < STAGES - 1; i++)
        fetch_next();
    w.build();
    __syncthreads();
    griddepcontrol_wait();

    u32 stage = 0, turn = 0;
    typename W::Operands operands(w, x, batch, lane, first < k_tiles ? first : 0);
    for (u32 tile = first_tile; tile < tiles; tile += stride) {
        u32 row = w.first_row(tile);
        typename W::Total sum = {};
        for (u32 k_tile = first; k_tile < k_tiles; k_tile += WK) {
            wait<STAGES - 2>();
            __syncwarp(); /* every lane's copies are there, and every lane has read the stage that is filled next */
            fetch_next();
            u32 next = k_tile + WK < k_tiles ? k_tile + WK : first;
            operands.accumulate(sum, shared + ring + stage * W::STAGE, row, k_tile, next);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        /* Sums change places from tile to tile: those of the last one may still be read. */
        finish(sum, sums + turn * WK * batch * ROWS, out, bias, w.factor(), row, w.rows, batch, warp, lane);
        turn ^= 1;
    }
}
