/* The product of one row of x with NF4 or FP4 weights, which costs fewer instructions than that of several.

A row of x would fill one column of eight of mma's right operand. Here column 2t has x's block t of a step's four, at the
places along K that are lane 4g + t's for all g, and the odd columns are zero. So this lane decodes block t of its rows and
gets that block's sums, whose scale is one FMA, and it holds 64 values of x if g = 2t, else zeros. */

#include "weight4.cuh"

/* Where a row's 16-byte pieces lie in a slot: a quarter of a warp that reads the same of each lane's two pieces takes
   every bank once. */
__device__ __forceinline__ u32 piece_of_row(u32 row, u32 piece) { return piece ^ row & 1; }

struct RowOfX {
    alignas(16) u32 pairs[32] = {};

    /* This lane's part of a step. `x` is in shared memory. */
    __device__ __forceinline__ void load(const u16 *x, u32 lane) {
        if (lane % 9 == 0)
#pragma unroll
            for (int i = 0; i < 8; i++)
                *(uint4 *)(pairs + 4 * i) = ((const uint4 *)(x + lane / 9 * 64))[i];
    }
};

/* Add a step's products to a lane's sums of its block, [RT][0][0] for rows g and [RT][0][2] for rows g + 8. */
__device__ __forceinline__ void add_row(const Weight &w, Sums &sum, const u8 *slot, const RowOfX &x, u32 lane) {
    u32 g = lane / 4, t = lane % 4, lane4 = lane * 4;
    u32 words[RT][2][8];
    float scale[RT][2];
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = 16 * r + 8 * half + g;
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(uint4 *)(words[r][half] + 4 * i) = *(const uint4 *)(slot + row * 128 + piece_of_row(g, 2 * t + i) * 16);
            scale[r][half] = w.scale_of_block(slot, row, t, lane4, w.shift[half]);
        }
    float d[RT][4] = {};
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int r = 0; r < RT; r++) {
            u32 a[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                a[j] = Weight::look_up<u32, 0>(words[r][j % 2][i / 2], i % 2 * 2 + j / 2, lane4);
            multiply<BF16>(d[r], a, x.pairs[2 * i], x.pairs[2 * i + 1]);
        }
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            sum[r][0][2 * half] += scale[r][half] * d[r][2 * half];
}

/* The sums of a tile: those of four lanes' blocks. */
__device__ __forceinline__ void add_blocks(Sums &sum) {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            sum[r][0][i] += shuffle(sum[r][0][i], 1);
            sum[r][0][i] += shuffle(sum[r][0][i], 2);
        }
}
