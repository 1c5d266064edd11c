/* y = x Wᵀ + b for up to 64 rows of x, with Hopper's tensor cores, for any format of W.

With so many rows the cost is how often x is read from the L2 cache: once for every tile of rows of W. So a tile has
64·GROUPS rows, and K is split instead, into K tiles of 128 columns. The pairs of K tiles of all tiles, in order of
tiles, are divided evenly among the blocks, in one contiguous range each. A block writes its partial sums of each tile
to entry block + tile of `partials`, and the second kernel, add(), adds a tile's partial sums in order of blocks.

A group of four warps has 64 rows of W as wgmma's left operand, in registers: 16 rows a warp, laid out as for
mma.m16n8k16. While the products of some columns run, a group decodes the operands of the next: 64 columns with few rows
of x, otherwise 32, so that registers do not spill and suffice for PRODUCERS more warps. These copy K tiles of W and x
to a ring of STAGES stages, so that groups wait for copies only, not for each other.

With g = lane / 4 and t = lane % 4, a lane has pairs of neighbouring columns of rows g and g + 8 of W. Which of 128
columns are in which operand depends on the format. x's pairs are copied to the corresponding places, 4 bytes each.

A format is a class with W's shape (rows, columns), TABLE and BYTES (bytes of W in a stage), and these functions.
position: place of a pair of columns, half of the K tile · 32 + 16-byte piece of a row of x · 4 + t. fetch: start
copying a producer's share of a K tile. build: fill the table. make: decode the operands of a quarter of a K tile; Kept
is its state within a K tile. SCALED: operands are multiplied by their scales; otherwise the sums of each half are.

Constants: NT (2, 4, 6 or 8 tiles of 8 rows of x), GROUPS (1, 2 or 4), STAGES, BF16 (else fp16). */

#pragma once

#include "ring.cuh"

constexpr u32 ROWS = 16 * WARPS, THREADS = 32 * WARPS; /* threads without the producers */
constexpr u32 HALF = 1024 * NT; /* bytes of x for half a K tile */
constexpr u32 PARTIAL = WARPS * NT * 32; /* groups of four sums */
/* With this many threads the compiler uses at most 96 registers each, or 80, which leaves room for a block of add() on
the multiprocessor; groups then take registers from the producers. */
constexpr u32 BOUND = NT < 6 ? 768 : 640;
constexpr u32 QUARTERS = NT < 6 ? 2 : 1; /* quarters of a K tile whose products run concurrently */
constexpr u32 TOGETHER = 8; /* partial sums loaded concurrently: most tiles have 8 or 16 */
constexpr int EARLY = 2; /* stages whose weights are copied before griddepcontrol_wait() */

/* Bytes of a stage and of a block, for a format W; each stage has two barriers. */
template <typename W> constexpr u32 STAGE = (2 * HALF + W::BYTES + 1023) / 1024 * 1024;
template <typename W> constexpr u32 SHARED = W::TABLE + STAGES * (STAGE<W> + 16);

struct Quarter { /* a lane's operands of 32 columns and, if they are not scaled yet, scales of rows g and g + 8 */
    u32 a[2][4];
    float scale[2];
};

/* Index of a block's first pair of K tiles, among the pairs of all tiles. */
__device__ __forceinline__ u32 first_pair(u32 block, u32 blocks, u32 pairs) { return block * pairs / blocks; }
/* The block that computes a pair. */
__device__ __forceinline__ u32 block_of(u32 pair, u32 blocks, u32 pairs) { return ((pair + 1) * blocks - 1) / pairs; }

/* Start copying a producer's share of x's columns of a K tile to a stage: rows 2 · producer and + 1 of every 8. Rows
beyond the batch repeat the last one; their sums are not read. */
template <typename W>
__device__ __forceinline__ void
fetch_x(u32 stage, const u16 *x, u32 columns, u32 k_tile, u32 batch, u32 producer, u32 lane) {
    constexpr u32 APART = W::position(32) / 32 * HALF + W::position(32) % 4 * 4; /* distance to a lane's second pair */
    u32 at = W::position(lane), position = at / 32 * HALF + at / 4 % 8 * 16 + at % 4 * 4;
    const u16 *from = x + k_tile * 128 + lane * 2;
    opaque(from);
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        u32 r = producer * 2 + k, to = stage + (position ^ r * 16) + r * 128;
        opaque(to);
#pragma unroll
        for (u32 i = 0; i < NT; i++) {
            const u8 *source = (const u8 *)from + (u64)min(i * 8 + r, batch - 1) * (2 * columns);
            copy_to<4>(to + i * 1024, source);
            copy_to<4>(to + i * 1024 + APART, source + 128);
        }
    }
}

/* The producers: copy a block's K tiles from `now` to `end`. */
template <typename W>
__device__ __forceinline__ void
produce(const W &w, Ring ring, const u16 *x, u32 batch, u32 now, u32 end, u32 producer, u32 lane) {
    u32 k_tiles = w.columns / 128, row = now / k_tiles * ROWS, k_tile = now % k_tiles, last = now;
    auto fetch_weights = [&] {
        if (last < end) {
            w.fetch(address(shared) + ring.stage() + 2 * HALF, row, k_tile, producer, lane);
            last++, k_tile++;
            if (k_tile == k_tiles)
                k_tile = 0, row += ROWS;
        }
    };
    Ring later = ring;
    for (int i = 0; i < EARLY; i++)
        fetch_weights(), ring.next();
    __syncthreads();
    griddepcontrol_wait();
    ring = later;
    u32 x_k_tile = now % k_tiles;
    for (u32 i = 0; now < end; now++, i++) {
        if (i >= STAGES)
            mbarrier_wait(ring.empty + ring.at, ring.turn ^ 1);
        if (i >= EARLY)
            fetch_weights();
        fetch_x<W>(address(shared) + ring.stage(), x, w.columns, x_k_tile, batch, producer, lane);
        cp_async_mbarrier_arrive(ring.full + ring.at);
        x_k_tile = x_k_tile + 1 == k_tiles ? 0 : x_k_tile + 1;
        ring.next();
    }
}

/* The other warps: multiply. */
template <typename W>
__device__ __forceinline__ void consume(const W &w, Ring ring, float4 *partials, u32 now, u32 end, u32 warp, u32 lane) {
    u32 k_tiles = w.columns / 128, k_tile = now % k_tiles;
    u32 described = descriptor_of(address(shared) + ring.begin);
    Quarter first[QUARTERS], second[QUARTERS];
    typename W::Kept kept;
    const typename W::Lane own(warp, lane);
    float sum[NT][4] = {};
    auto make = [&](Quarter (&to)[QUARTERS], u32 quarter) {
#pragma unroll
        for (u32 q = 0; q < QUARTERS; q++)
            w.make(to[q], kept, ring.stage() + 2 * HALF, k_tile, quarter + q, own);
    };
    mbarrier_wait(ring.full, 0);
    make(first, 0);
    for (; now < end; now++) {
        float d[NT][4];
        auto begin = [&](Quarter (&operands)[QUARTERS], u32 quarter) {
            wgmma_fence();
#pragma unroll
            for (u32 q = quarter; q < quarter + QUARTERS; q++) {
                u32 rows = described + (ring.offset + q / 2 * HALF) / 16 + q % 2 * 4;
#pragma unroll
                for (u32 k = 0; k < 2; k++)
                    if constexpr (W::SCALED)
                        wgmma(sum, operands[q - quarter].a[k], rows + 2 * k, true);
                    else
                        wgmma(d, operands[q - quarter].a[k], rows + 2 * k, q % 2 || k);
            }
            wgmma_commit();
        };
        auto complete = [&](Quarter (&operands)[QUARTERS], u32 quarter) {
            if constexpr (W::SCALED)
                wgmma_wait(sum);
            else {
                wgmma_wait(d);
                if ((quarter + QUARTERS) % 2 == 0) /* the half is complete */
#pragma unroll
                    for (int i = 0; i < 4 * NT; i++)
                        sum[i / 4][i % 4] += operands[QUARTERS - 1].scale[i / 2 % 2] * d[i / 4][i % 4];
            }
        };
#pragma unroll
        for (u32 quarter = 0; quarter + 2 * QUARTERS < 4; quarter += 2 * QUARTERS) {
            begin(first, quarter);
            make(second, quarter + QUARTERS);
            complete(first, quarter);
            begin(second, quarter + QUARTERS);
            make(first, quarter + 2 * QUARTERS);
            complete(second, quarter + QUARTERS);
        }
        begin(first, 4 - 2 * QUARTERS);
        make(second, 4 - QUARTERS);
        complete(first, 4 - 2 * QUARTERS);
        begin(second, 4 - QUARTERS);
        u64 *empty = ring.empty + ring.at;
        ring.next();
        k_tile = k_tile + 1 == k_tiles ? 0 : k_tile + 1;
        if (now + 1 < end)
            mbarrier_wait(ring.full + ring.at, ring.turn);
        make(first, 0); /* after the last K tile it decodes stale data, which is not used */
        complete(second, 4 - QUARTERS);
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(empty);
        if (k_tile == 0 || now + 1 == end) {
            float4 *to = partials + (u64)(blockIdx.x + now / k_tiles) * PARTIAL + warp * NT * 32 + lane;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                to[n * 32] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[n][i] = 0;
            }
        }
    }
}

template <typename W> __device__ __forceinline__ void product(const W &w, const u16 *x, float4 *partials, u32 batch) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 pairs = (w.rows + ROWS - 1) / ROWS * (w.columns / 256);
    u32 now = 2 * first_pair(blockIdx.x, gridDim.x, pairs), end = 2 * first_pair(blockIdx.x + 1, gridDim.x, pairs);
    Ring ring(W::TABLE, STAGE<W>);
    if (threadIdx.x == 0)
        ring.set_up();
    if (warp >= WARPS) {
        if constexpr (GROUPS == 4)
            setmaxnreg_dec<NT < 6 ? 48 : 64>();
        produce(w, ring, x, batch, now, end, warp - WARPS, lane);
    } else {
        if constexpr (GROUPS == 4)
            setmaxnreg_inc<NT < 6 ? 88 : 104>();
        w.build();
        __syncthreads();
        griddepcontrol_wait();
        consume(w, ring, partials, now, end, warp, lane);
    }
}

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

/* y = `factor` times the sum of each tile's partial sums, which `blocks` blocks wrote. A thread adds four sums. */
extern "C" __global__ void __launch_bounds__(256)
add(const float4 *partials, const u16 *bias, u16 *out, const float *factor, u32 rows, u32 columns, u32 batch,
    u32 blocks, Term term) {
    u32 k_tiles = columns / 256, pairs = (rows + ROWS - 1) / ROWS * k_tiles;
    u32 at = blockIdx.x * 256 + threadIdx.x, tile = at / PARTIAL, i = at % PARTIAL, lane = i % 32;
    u32 row = tile * ROWS + i / (NT * 32) * 16 + lane / 4, m = i / 32 % NT * 8 + lane % 4 * 2;
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
