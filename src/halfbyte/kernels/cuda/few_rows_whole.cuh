/* y = factor · x Wᵀ + b for up to 8 rows of x, see few_rows.cuh: K is divided among the warps of a block.

A block has WR groups of WK warps. The warps of a group divide the units of a tile among them and add their sums in a
fixed order. Values of x, like words of W, are loaded two chunks in advance into registers. */

#pragma once

#include "few_rows.cuh"

/* Bytes for sums of a block, per row of x. */
template <typename W> constexpr u32 SUMS = W::GAPS ? 0 : WARPS * ROWS * RT * 4;

/* The share of a warp: units first to first + count of each of its group's tiles. */
struct Share {
    u32 group, split, first, count;

    __device__ __forceinline__ Share(u32 warp, u32 units) : group(warp / WK), split(warp % WK) {
        u32 most = (units + WK - 1) / WK;
        first = min(split * most, units), count = min(most, units - first);
    }
};

/* Add the sums of a group's warps and write y. `top`: the first row of the group's tiles. */
template <typename W>
__device__ __forceinline__ void finish(
    float (&total)[RT][NT][4], const Share &share, const W &w, u16 *out, const u16 *bias, u32 batch, u32 top, u32 lane) {
    u32 each = batch * ROWS * RT;
    auto sums = [&](u32 i) -> float & {
        i += share.group * WK * each;
        return *(float *)(shared + (W::GAPS ? gap(i) : W::TABLE + 4 * i));
    };
    add_lanes<W>(total);
    group_sync<32 * WK>(share.group); /* the sums of the last tiles have been read */
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                if (m < batch)
                    sums(share.split * each + (m * RT + r) * ROWS + W::row(lane / 4 + i / 2 * 8)) = total[r][n][i];
                total[r][n][i] = 0;
            }
    group_sync<32 * WK>(share.group);
    for (u32 i = share.split * 32 + lane; i < each; i += 32 * WK) {
        u32 row = top + i % (ROWS * RT);
        float sum = 0;
#pragma unroll
        for (u32 k = 0; k < WK; k++)
            sum += sums(k * each + i);
        float shift = bias ? number<BF16>(bias[row]) : 0.0f;
        out[(u64)(i / (ROWS * RT)) * w.rows + row] = (u16)pair<BF16>(sum * w.factor() + shift, 0.0f);
    }
}

/* The kernel. */
template <typename W>
__device__ __forceinline__ void few_rows(W w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    u32 lane = threadIdx.x % 32, g = lane / 4;
    const Share share(uniform(threadIdx.x / 32), w.columns / UNIT);
    u32 tiles = (w.rows + ROWS * RT - 1) / (ROWS * RT), stride = gridDim.x * WR;
    u32 tile = share.group * gridDim.x + blockIdx.x;
    bool busy = share.count && tile < tiles;

    typename W::Codes codes[2][RT];
    typename W::Scales scales[RT], later[RT];
    typename W::template Source<RT> source;
    const auto weight = [&](int) -> const W & { return w; };
    auto seek = [&](u32 to) { /* the last tiles are moved back to end at row N: rows in two tiles get equal values */
        source.seek(w, min(to * ROWS * RT, w.rows - ROWS * RT), share.first, lane);
    };
    seek(tile);
    if (busy)
        source.load_scales(scales, w), source.load(codes[0], w, 0), source.load(codes[1], w, 1);
    w.build();
    __syncthreads();
    griddepcontrol_wait();

    const u16 *begin = x + (ONE ? 0 : (u64)g * w.columns) + share.first * UNIT + lane % 4 * W::X, *from = begin;
    u64 apart = 8 * (u64)w.columns;
    uint4 values[2][NT][4] = {};
    auto load_x = [&](int chunk) {
#pragma unroll
        for (int n = 0; n < NT; n++)
            if (has_x<W>(lane, n, batch))
#pragma unroll
                for (int j = 0; j < 4; j++)
                    values[chunk][n][j] = from_global(from + n * apart + chunk * CHUNK + W::x_offset(j));
    };
    if (busy)
        load_x(0), load_x(1);

    float total[RT][NT][4] = {};
    auto multiply = [&](int chunk) {
        multiply_chunk<W>(
            total, weight, codes[chunk], scales, chunk, lane, [&](int n, int j) { return values[chunk][n][j]; });
    };

    for (; tile < tiles; tile += stride) {
        for (u32 left = share.count; left; left--) {
            bool more = left > 1 || tile + stride < tiles;
            multiply(0);
            if (left > 1)
                source.next(w, 1), from += UNIT;
            else if (more)
                seek(tile + stride), from = begin;
            if (more)
                source.load_scales(later, w), source.load(codes[0], w, 0), load_x(0);
            multiply(1);
            if (more)
                source.load(codes[1], w, 1), load_x(1);
#pragma unroll
            for (int r = 0; r < RT; r++)
                scales[r] = later[r];
        }
        finish(total, share, w, out, bias, batch, min(tile * ROWS * RT, w.rows - ROWS * RT), lane);
    }
}

#define PRODUCT(NAME, W)                                                                                              \
    LAYOUT(W::TABLE, SUMS<W>, sizeof(W));                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
    NAME(W w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {                                                   \
        few_rows(w, x, bias, out, batch);                                                                             \
    }
