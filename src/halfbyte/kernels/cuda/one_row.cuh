/* The scheme of mma_gemv.cuh for one row of x and NF4 or FP4 weights, with x in shared memory and stages in the layout
of weight4.cuh: a lane's two K slices are one block, whose scale is one FMA. */

#pragma once

#include "weight4.cuh"

/* Place of a row's 16-byte pieces in a stage, without bank conflicts among lanes that are served together. */
__device__ __forceinline__ u32 swizzle_of_row(u32 row, u32 piece) { return piece ^ row & 1; }

struct RowOfX {
    alignas(16) u32 pairs[16] = {}; /* 32 values */

    /* Load this lane's part of a K tile; `x` is in shared memory. */
    __device__ __forceinline__ void load(const u16 *x, u32 lane) {
        if (lane / 8 == lane % 4)
#pragma unroll
            for (int i = 0; i < 4; i++)
                *(uint4 *)(pairs + 4 * i) = ((const uint4 *)(x + lane / 4 * 32))[i];
    }
};

/* Add a K tile's products to a lane's sums of its block, [RT][0][0] for rows g and [RT][0][2] for rows g + 8. */
__device__ __forceinline__ void add_row(const Weight &w, Sums &sum, const u8 *stage, const RowOfX &x, u32 lane) {
    u32 g = lane / 4, t = lane % 4, lane4 = lane * 4;
    u32 words[RT][2][8];
    float scale[RT][2], parts[RT][2][4] = {};
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = 16 * r + 8 * half + g;
#pragma unroll
            for (int u = 0; u < 2; u++)
                *(uint4 *)(words[r][half] + 4 * u) =
                    *(const uint4 *)(stage + row * 128 + swizzle_of_row(g, 2 * t + u) * 16);
            scale[r][half] = w.scale_of_block(stage, row, t, lane4, w.shift[half]);
        }
#pragma unroll
    for (int j = 0; j < 8; j++) /* four columns of each part */
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int r = 0; r < RT; r++) {
                u32 a[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[i] = Weight::look_up<u32, 0>(words[r][i % 2][4 * u + j / 2], j % 2 * 2 + i / 2, lane4);
                multiply<BF16>(parts[r][u], a, x.pairs[2 * j], x.pairs[2 * j + 1]);
            }
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            sum[r][0][2 * half] += scale[r][half] * (parts[r][0][2 * half] + parts[r][1][2 * half + 1]);
}

/* Reduce the sums of a tile over the blocks of four lanes. */
__device__ __forceinline__ void add_blocks(Sums &sum) {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            sum[r][0][i] += shuffle(sum[r][0][i], 1);
            sum[r][0][i] += shuffle(sum[r][0][i], 2);
        }
}
