/* y = x Wᵀ + b for up to 64 rows of x and up to three W, with Hopper's tensor cores, for any format of W.

With so many rows the cost is how often x is read from the L2 cache: once for every tile of rows of W. So a tile has
64·GROUPS rows, and K is split instead, into K tiles of 128 columns. The pairs of K tiles of all tiles, in order of
tiles, are divided evenly among the blocks, and the second kernel, add(), adds their partial sums (partials.cuh). Several
W have the same K, and a range of the blocks of both kernels each.

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

constexpr u32 TILES = WARPS, ROWS = 16 * TILES, THREADS = 32 * WARPS; /* threads without the producers */

#include "partials.cuh"

constexpr u32 HALF = 1024 * NT; /* bytes of x for half a K tile */
/* With this many threads the compiler uses at most 96 registers each, or 80, which leaves room for a block of add() on
the multiprocessor; groups then take registers from the producers. */
constexpr u32 BOUND = NT < 6 ? 768 : 640;
constexpr u32 QUARTERS = NT < 6 ? 2 : 1; /* quarters of a K tile whose products run concurrently */
constexpr int EARLY = 2; /* stages whose weights are copied before griddepcontrol_wait() */

/* Bytes of a stage and of a block, for a format W; each stage has two barriers. */
template <typename W> constexpr u32 STAGE = (2 * HALF + W::BYTES + 1023) / 1024 * 1024;
template <typename W> constexpr u32 SHARED = W::TABLE + STAGES * (STAGE<W> + 16);

struct Quarter { /* a lane's operands of 32 columns and, if they are not scaled yet, scales of rows g and g + 8 */
    u32 a[2][4];
    float scale[2];
};

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
__device__ __forceinline__ void
consume(const W &w, Ring ring, float4 *partials, u32 block, u32 now, u32 end, u32 warp, u32 lane) {
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
            float4 *to = partials + (u64)(block + now / k_tiles) * PARTIAL + warp * NT * 32 + lane;
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

/* The kernel, for block `block` of `blocks`. */
template <typename W>
__device__ __forceinline__ void
product(const W &w, const u16 *x, float4 *partials, u32 batch, u32 block, u32 blocks) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 pairs = (w.rows + ROWS - 1) / ROWS * (w.columns / 256);
    u32 now = 2 * first_pair(block, blocks, pairs), end = 2 * first_pair(block + 1, blocks, pairs);
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
        consume(w, ring, partials, block, now, end, warp, lane);
    }
}
