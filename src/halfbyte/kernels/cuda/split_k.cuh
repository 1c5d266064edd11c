/* y = factor · x Wᵀ + b for up to 16 rows of x, on tensor cores: a split-K pipeline, for any format of W.

W is mma.m16n8k16's left operand: with g = lane / 4, t = lane % 4, a lane holds rows g and g + 8 of W and row g of x;
its sums are for rows g and g + 8 of W and rows 2t and 2t + 1 of x. The order of K is free, but the same for W and x.

A block is WR groups of WK warps; they share only a table. A group has a tile of 16·RT rows of W at a time, and its
warps alternate over its K tiles of 256 columns; the warps' sums are added in a fixed order. Each warp's copies run
ahead in its own ring of STAGES stages, also across the end of a tile. Before griddepcontrol_wait() only weights are
read, so that this overlaps with the previous kernel.

A format is a class with W's shape (rows, columns), and

    STAGE, SUMS          bytes of a stage of the ring; offset of the sums, after the table and all rings
    ring, first_row      offset of a warp's ring; a tile's first row
    build, factor        fill the table and read single numbers; factor of all sums
    Source               source addresses of a warp: fetch starts copying a K tile, next advances
    Operands, Total      a lane's values of x, whose accumulate adds a K tile's products to sums: one set of them or two

Constants: RT, NT (tiles of 8 rows of x), WR, WK, STAGES, BF16 (else fp16). */

#pragma once

#include "warp.cuh"

constexpr u32 ROWS = 16 * RT, WARPS = WR * WK, THREADS = 32 * WARPS;
constexpr u32 SUMS_OF_ROW = 2 * WARPS * ROWS * 4; /* bytes of shared memory per row of x */

typedef float Sums[RT][NT][4];

__device__ __forceinline__ float total(const Sums &sum, u32 r, u32 n, u32 i) { return sum[r][n][i]; }
__device__ __forceinline__ float total(const Sums (&sum)[2], u32 r, u32 n, u32 i) {
    return sum[0][r][n][i] + sum[1][r][n][i];
}

/* Reduce a group's sums [warp, row of x, row of the tile] in shared memory, and write y = `factor` times their sum. */
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
            __syncwarp(); /* all lanes' copies have arrived, and all lanes have read the stage that is filled next */
            fetch_next();
            u32 next = k_tile + WK < k_tiles ? k_tile + WK : first;
            operands.accumulate(sum, shared + ring + stage * W::STAGE, row, k_tile, next);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        /* Alternate between two sets of sums: those of the last tile may still be read. */
        finish(sum, sums + turn * WK * batch * ROWS, out, bias, w.factor(), row, w.rows, batch, warp, lane);
        turn ^= 1;
    }
}
