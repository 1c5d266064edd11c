/* Sums of products whose K is divided among blocks: each block writes its part of a tile's sums, and add() adds them.

The pairs of K tiles of all tiles, 256 columns each, are divided evenly among the blocks, in order of tiles and in one
contiguous range each. A block writes its partial sums of a tile to entry block + tile of `partials`, in the layout of
mma.m16n8k16's sums: [16 rows of W][8 rows of x][lane] four numbers.

Constants: TILES (tiles of 16 rows of W per block), NT (tiles of 8 rows of x), BF16 (else fp16). */

#pragma once

#include "warp.cuh"

constexpr u32 PARTIAL = TILES * NT * 32; /* groups of four sums */
constexpr u32 TOGETHER = 8; /* partial sums loaded concurrently: most tiles have 8 or 16 */

constexpr u32 BLOCK_ROWS = 16 * TILES; /* rows of W in a block's tile */

/* Index of a block's first pair of K tiles, among the pairs of all tiles. */
__device__ __forceinline__ u32 first_pair(u32 block, u32 blocks, u32 pairs) { return block * pairs / blocks; }
/* The block that computes a pair. */
__device__ __forceinline__ u32 block_of(u32 pair, u32 blocks, u32 pairs) { return ((pair + 1) * blocks - 1) / pairs; }

/* An adapter's term u Bᵀ for u [batch, rank], with row stride `apart`, and B [rows, rank]; rank 0: none. Tensor cores
compute it for 16 rows of W by 8 of x, in the layout of their sums. */
struct Term {
    const u16 *u, *b;
    u32 apart, rank; /* multiples of 8 */

    struct Operands { /* 16 ranks of a lane's two rows of B and its row of u, in a permuted order */
        uint2 low, high, with;

        __device__ __forceinline__ void add_to(float (&sum)[4]) const {
            const u32 a[4] = {low.x, high.x, low.y, high.y};
            multiply<BF16>(sum, a, with.x, with.y);
        }
    };

    /* Prefetch rows n and n + 8 of B to L2. */
    __device__ __forceinline__ void begin(u32 n, u32 rows) const {
        for (u32 r = threadIdx.x % 4 * 64; r < rank; r += 256)
            prefetch(b + (u64)min(n, rows - 1) * rank + r), prefetch(b + (u64)min(n + 8, rows - 1) * rank + r);
    }

    /* Operands of rows n and n + 8 of W and row m of x, from rank r on. */
    __device__ __forceinline__ Operands load(u32 r, u32 n, u32 m, u32 rows, u32 batch) const {
        r += threadIdx.x % 4 * 4;
        if (r >= rank)
            return Operands{};
        return Operands{
            *(const uint2 *)(b + (u64)min(n, rows - 1) * rank + r),
            *(const uint2 *)(b + (u64)min(n + 8, rows - 1) * rank + r),
            *(const uint2 *)(u + (u64)min(m, batch - 1) * apart + r)};
    }
};

/* The part of a block, for up to three products of one x that have a range of blocks each. */
template <typename P> __device__ __forceinline__ u32 part_of_block(const P (&parts)[3]) {
    return (blockIdx.x >= parts[1].begin) + (blockIdx.x >= parts[2].begin);
}

/* One of the products of x: W, where its partial sums go, and its range of blocks. */
template <typename W> struct Part {
    W w;
    float4 *partials;
    u32 begin, blocks;
};

template <typename W> struct Parts {
    Part<W> parts[3]; /* unused parts begin after all blocks */
};

/* One product's sums, of partial sums that `blocks` blocks wrote; `begin` is its first block of add(). */
struct Sum {
    const float4 *partials;
    const u16 *bias;
    u16 *out;
    const float *factor;
    Term term;
    u32 rows, blocks, begin, unused;
};

struct Sums {
    Sum parts[3]; /* unused parts begin after all blocks */
};

/* y = `factor` times the sum of each tile's partial sums. A thread adds four sums. */
extern "C" __global__ void __launch_bounds__(256) add(const Sums all, u32 columns, u32 batch) {
    const Sum &own = all.parts[part_of_block(all.parts)];
    const float4 *partials = own.partials;
    const u16 *bias = own.bias;
    const float *factor = own.factor;
    u16 *out = own.out;
    u32 rows = own.rows, blocks = own.blocks;
    const Term term = own.term;
    u32 k_tiles = columns / 256, pairs = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * k_tiles;
    u32 at = (blockIdx.x - own.begin) * 256 + threadIdx.x, tile = at / PARTIAL, i = at % PARTIAL, lane = i % 32;
    u32 row = tile * BLOCK_ROWS + i / (NT * 32) * 16 + lane / 4, m = i / 32 % NT * 8 + lane % 4 * 2;
    u32 u_row = i / 32 % NT * 8 + lane / 4; /* row of u */
    u32 block = block_of(tile * k_tiles, blocks, pairs), last = block_of(tile * k_tiles + k_tiles - 1, blocks, pairs);
    float total[4] = {}, scale = factor ? *factor : 1.0f;
    partials += (u64)tile * PARTIAL + i;
    term.begin(row, rows);
    griddepcontrol_wait();
    float more[4] = {};
    Term::Operands first = term.load(0, row, u_row, rows, batch);
    for (; m < batch && block <= last; block += TOGETHER) {
        float4 some[TOGETHER];
#pragma unroll
        for (u32 k = 0; k < TOGETHER; k++)
            some[k] = block + k <= last ? partials[(u64)(block + k) * PARTIAL] : make_float4(0, 0, 0, 0);
#pragma unroll
        for (u32 k = 0; k < TOGETHER; k++)
            total[0] += some[k].x, total[1] += some[k].y, total[2] += some[k].z, total[3] += some[k].w;
    }
    __syncwarp();
    first.add_to(more);
    for (u32 r = 16; r < term.rank; r += 16)
        term.load(r, row, u_row, rows, batch).add_to(more);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 n = row + k / 2 * 8;
        if (n < rows && m + k % 2 < batch) {
            float y = total[k] * scale + (bias ? number<BF16>(bias[n]) : 0.0f) + more[k];
            out[(u64)(m + k % 2) * rows + n] = (u16)pair<BF16>(y, 0.0f);
        }
    }
}
