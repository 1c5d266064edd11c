/* Grouped GEMMs of experts, x Wᵀ of each with its rows, based on gemm.cuh. The experts' matrices are one of E·N rows,
of which a tile has 64·GROUPS of one expert, with up to 8·NT of its rows of x.

The table of `ops.experts.Routing` lists those rows. The tiles of an entry of the table are consecutive, and entries
follow each other; their pairs of K tiles are divided evenly among the blocks, as in gemm.cuh. Only the device knows how
many entries have rows, and each block counts them. A block writes the tiles that it computes entirely. Of the tiles it
shares with other blocks it writes partial sums to `partials`: of its first tile, if it does not start it, and of its
last, if it does not finish it. The second kernel, add_grouped(), adds these in order of blocks.

A tile's instructions use NT/4, NT/2, 3·NT/4 or NT tiles of 8 rows, the fewest that suffice.

Constants: those of gemm.cuh, with NT 2, 4, 8 or 16; GROUPS is 2 or 4, and 2 if NT is 16. */

#pragma once

#include "gemm.cuh"

constexpr u32 ALL = 32 * PRODUCERS + THREADS, LIMIT = GROUPS == 4 ? BOUND : ALL;

struct Entry {
    u32 expert, first, count; /* first and number of rows of x, at most 8·NT */
};

/* Rows of x per tile, and the destination of the sums. */
struct Grouped {
    const int *order, *tiles, *offsets; /* of Routing */
    const u16 *bias;                    /* [E, N] or null */
    u16 *out;                           /* [S, N] */
    Term term;                          /* u [S, rank], B [E, N, rank] */
    float scale;                        /* of the term */
    u32 top_k;                          /* x has one row per token, which top_k rows read; 0: it has all rows */
    u32 entries, experts, rows;         /* entries of the table; E; N */

    __device__ __forceinline__ Entry entry(u32 number) const {
        u32 expert = tiles[2 * number], first = tiles[2 * number + 1];
        return {expert, first, min(offsets[expert + 1] - first, 8 * NT)};
    }
    __device__ __forceinline__ u32 cuts() const { return (rows + ROWS - 1) / ROWS; } /* tiles of an entry */

    /* Number of entries with rows, which come first; all threads of a block count them. */
    template <u32 COUNT> __device__ __forceinline__ u32 live(u32 *counter) const {
        if (threadIdx.x == 0)
            *counter = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < entries; i += COUNT)
            if (tiles[2 * i] < experts && (i + 1 == entries || tiles[2 * i + 2] >= experts))
                *counter = i + 1;
        __syncthreads();
        return *counter;
    }

    /* Finish sums of rows n and n + 8 of the expert and rows m and m + 1 of the entry, for 8 rows from `column` on. */
    __device__ __forceinline__ void write(const float (&total)[4], const Entry &e, u32 n, u32 column) const {
        u32 lane = threadIdx.x % 32, m = column + lane % 4 * 2;
        float more[4] = {};
        Term own = term;
        own.b += (u64)e.expert * rows * term.rank, own.u += (u64)e.first * term.apart;
        for (u32 r = 0; r < term.rank; r += 16)
            own.load(r, n, column + lane / 4, rows, e.count).add_to(more);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 row = n + k / 2 * 8;
            if (row < rows && m + k % 2 < e.count) {
                float y = total[k] + scale * more[k];
                if (bias)
                    y += number<BF16>(bias[(u64)e.expert * rows + row]);
                out[(u64)(e.first + m + k % 2) * rows + row] = (u16)pair<BF16>(y, 0.0f);
            }
        }
    }
};

/* Rows of x that a producer copies: 2 · producer and + 1 of every 8. */
struct Sources {
    u32 rows[2 * NT], eights;

    __device__ __forceinline__ void find(const Grouped &grouped, const Entry &e, u32 producer) {
        eights = (e.count + 7) / 8;
#pragma unroll
        for (u32 i = 0; i < 2 * NT; i++) {
            u32 row = e.first + min(i / 2 * 8 + producer * 2 + i % 2, e.count - 1);
            rows[i] = grouped.top_k ? grouped.order[row] / grouped.top_k : row;
        }
    }

    /* Like fetch_x. */
    template <typename W>
    __device__ __forceinline__ void
    fetch(u32 stage, const u16 *x, u32 columns, u32 k_tile, u32 producer, u32 lane) const {
        constexpr u32 APART = W::position(32) / 32 * HALF + W::position(32) % 4 * 4;
        u32 at = W::position(lane), position = at / 32 * HALF + at / 4 % 8 * 16 + at % 4 * 4;
        const u16 *from = x + k_tile * 128 + lane * 2;
        opaque(from);
#pragma unroll
        for (u32 i = 0; i < 2 * NT; i++) {
            u32 r = producer * 2 + i % 2, to = stage + (position ^ r * 16) + r * 128 + i / 2 * 1024;
            if (i / 2 < eights) {
                const u8 *source = (const u8 *)from + (u64)rows[i] * (2 * columns);
                copy_to<4>(to, source);
                copy_to<4>(to + APART, source + 128);
            }
        }
    }
};

template <typename W>
__device__ __forceinline__ void
produce_grouped(const W &w, Ring ring, const Grouped &grouped, const u16 *x, u32 now, u32 end, u32 producer, u32 lane) {
    u32 k_tiles = w.columns / 128, tile = now / k_tiles, k_tile = now % k_tiles, cuts = grouped.cuts(), row = 0;
    Sources sources;
    for (u32 i = 0; now < end; now++, i++) {
        if (i == 0 || k_tile == 0) {
            Entry e = grouped.entry(tile / cuts);
            row = e.expert * grouped.rows + tile % cuts * ROWS;
            sources.find(grouped, e, producer);
            tile++;
        }
        if (i >= STAGES)
            mbarrier_wait(ring.empty + ring.at, ring.turn ^ 1);
        u32 stage = address(shared) + ring.stage();
        w.fetch(stage + 2 * HALF, row, k_tile, producer, lane);
        sources.template fetch<W>(stage, x, w.columns, k_tile, producer, lane);
        cp_async_mbarrier_arrive(ring.full + ring.at);
        k_tile = k_tile + 1 == k_tiles ? 0 : k_tile + 1;
        ring.next();
    }
}

/* State of a multiplying warp across tiles. */
template <typename W> struct Consumer {
    const W &w;
    const Grouped &grouped;
    float4 *partials;
    Ring ring;
    u32 warp, lane, described;
    Quarter first, second;
    typename W::Kept kept;
    const typename W::Lane own;

    __device__ __forceinline__
    Consumer(const W &w, const Grouped &grouped, float4 *partials, Ring ring, u32 warp, u32 lane)
        : w(w), grouped(grouped), partials(partials), ring(ring), warp(warp), lane(lane),
          described(descriptor_of(address(shared) + ring.begin)), own(warp, lane) {}

    /* Multiply N tiles of 8 rows of x, K tiles from `k_tile` on to `stop`. `more`: the block has another tile. */
    template <u32 N>
    __device__ __forceinline__ void multiply(const Entry &e, u32 cut, u32 k_tile, u32 stop, u32 k_tiles, bool more) {
        float sum[N][4] = {};
        const bool begins = k_tile == 0, whole = begins && stop == k_tiles;
        while (k_tile < stop) {
            float d[N][4];
            u32 stage = ring.stage() + 2 * HALF;
            auto begin = [&](Quarter &quarter, u32 number) {
                u32 rows = described + (ring.offset + number / 2 * HALF) / 16 + number % 2 * 4;
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 2; k++)
                    if constexpr (W::SCALED)
                        wgmma(sum, quarter.a[k], rows + 2 * k, true);
                    else
                        wgmma(d, quarter.a[k], rows + 2 * k, number % 2 || k);
                wgmma_commit();
            };
            auto complete = [&](Quarter &quarter, u32 number) {
                if constexpr (W::SCALED)
                    wgmma_wait(sum);
                else {
                    wgmma_wait(d);
                    if (number % 2)
#pragma unroll
                        for (int i = 0; i < 4 * N; i++)
                            sum[i / 4][i % 4] += quarter.scale[i / 2 % 2] * d[i / 4][i % 4];
                }
            };
            begin(first, 0);
            w.make(second, kept, stage, k_tile, 1, own);
            complete(first, 0);
            begin(second, 1);
            w.make(first, kept, stage, k_tile, 2, own);
            complete(second, 1);
            begin(first, 2);
            w.make(second, kept, stage, k_tile, 3, own);
            complete(first, 2);
            begin(second, 3);
            u64 *empty = ring.empty + ring.at;
            ring.next();
            k_tile++;
            if (more || k_tile < stop)
                mbarrier_wait(ring.full + ring.at, ring.turn);
            w.make(first, kept, ring.stage() + 2 * HALF, k_tile < k_tiles ? k_tile : 0, 0, own);
            complete(second, 3);
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(empty);
        }
        if (whole) {
#pragma unroll
            for (u32 n = 0; n < N; n++)
                if (8 * n < e.count)
                    grouped.write(sum[n], e, cut * ROWS + warp * 16 + lane / 4, 8 * n);
        } else {
            float4 *to = partials + (u64)(2 * blockIdx.x + begins) * PARTIAL + warp * NT * 32 + lane;
#pragma unroll
            for (u32 n = 0; n < N; n++)
                to[n * 32] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
        }
    }

    __device__ __forceinline__ void run(u32 now, u32 end) {
        u32 k_tiles = w.columns / 128, tile = now / k_tiles, k_tile = now % k_tiles, cuts = grouped.cuts();
        u32 last = (end - 1) / k_tiles;
        Entry e = grouped.entry(tile / cuts);
        mbarrier_wait(ring.full, 0);
        w.make(first, kept, ring.stage() + 2 * HALF, k_tile, 0, own);
        for (; tile <= last; tile++, k_tile = 0) {
            Entry next = grouped.entry(min(tile + 1, last) / cuts); /* load early for the next iteration */
            u32 stop = tile == last ? end - tile * k_tiles : k_tiles;
            bool more = tile < last;
            if (NT >= 8 && e.count <= 2 * NT)
                multiply<NT >= 8 ? NT / 4 : NT>(e, tile % cuts, k_tile, stop, k_tiles, more);
            else if (NT >= 4 && e.count <= 4 * NT)
                multiply<NT >= 4 ? NT / 2 : NT>(e, tile % cuts, k_tile, stop, k_tiles, more);
            else if (NT >= 8 && e.count <= 6 * NT)
                multiply<NT >= 8 ? NT / 4 * 3 : NT>(e, tile % cuts, k_tile, stop, k_tiles, more);
            else
                multiply<NT>(e, tile % cuts, k_tile, stop, k_tiles, more);
            e = next;
        }
    }
};

/* Number of pairs of K tiles of all tiles. */
template <u32 COUNT> __device__ __forceinline__ u32 pairs_of(const Grouped &grouped, u32 columns, u32 *counter) {
    return grouped.live<COUNT>(counter) * grouped.cuts() * (columns / 256);
}

template <typename W>
__device__ __forceinline__ void grouped_product(const W &w, const Grouped &grouped, const u16 *x, float4 *partials) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring ring(W::TABLE, STAGE<W>);
    griddepcontrol_wait();
    u32 pairs = pairs_of<ALL>(grouped, w.columns, (u32 *)(shared + SHARED<W>));
    u32 now = 2 * first_pair(blockIdx.x, gridDim.x, pairs), end = 2 * first_pair(blockIdx.x + 1, gridDim.x, pairs);
    if (now == end)
        return;
    if (threadIdx.x == 0)
        ring.set_up();
    if (warp < WARPS)
        w.build();
    __syncthreads();
    if (warp >= WARPS) {
        if constexpr (GROUPS == 4)
            setmaxnreg_dec<NT < 6 ? 48 : 64>();
        else
            setmaxnreg_dec<88>();
        produce_grouped(w, ring, grouped, x, now, end, warp - WARPS, lane);
    } else {
        if constexpr (GROUPS == 4)
            setmaxnreg_inc<NT < 6 ? 88 : 104>();
        else
            setmaxnreg_inc<208>();
        Consumer<W>(w, grouped, partials, ring, warp, lane).run(now, end);
    }
}

/* Add up the tiles that several of `blocks` blocks share. A tile is added by the threads of the second block that has a
part of it; a thread adds four sums. */
extern "C" __global__ void __launch_bounds__(256)
add_grouped(const float4 *partials, const Grouped grouped, u32 columns, u32 blocks) {
    griddepcontrol_wait();
    u32 k_pairs = columns / 256, block = blockIdx.x / (PARTIAL / 256) + 1;
    u32 pairs = pairs_of<256>(grouped, columns, (u32 *)shared);
    u32 begin = first_pair(block, blocks, pairs), tile = begin / k_pairs;
    if (begin % k_pairs == 0 || block_of(tile * k_pairs, blocks, pairs) != block - 1)
        return;
    u32 i = blockIdx.x % (PARTIAL / 256) * 256 + threadIdx.x, warp = i / (NT * 32), n = i / 32 % NT, lane = i % 32;
    u32 cuts = grouped.cuts(), last = block_of(tile * k_pairs + k_pairs - 1, blocks, pairs);
    Entry e = grouped.entry(tile / cuts);
    if (8 * n >= e.count) /* uniform in a warp */
        return;
    float total[4] = {};
    for (u32 b = block - 1; b <= last; b++) {
        if (first_pair(b, blocks, pairs) == first_pair(b + 1, blocks, pairs))
            continue;
        float4 some = partials[(u64)(2 * b + (b < block)) * PARTIAL + i];
        total[0] += some.x, total[1] += some.y, total[2] += some.z, total[3] += some.w;
    }
    grouped.write(total, e, tile % cuts * ROWS + warp * 16 + lane / 4, 8 * n);
}
