/* factor · x Wᵀ for up to 64 rows of x and up to three W, see few_rows.cuh: K is divided among blocks, and add() adds
their parts.

A block has WARPS · RT tiles of W at the same columns, and its warps share x in shared memory: a ring of STAGES chunks,
filled by asynchronous copies, in the order of operands: [tile of 8 rows][word][lane] 16 bytes. Where a table has gaps, x
is in them. */

#pragma once

#include "few_rows.cuh"

static_assert(WK == 1, "warps share x");
constexpr u32 TILES = WARPS * RT;

#include "partials.cuh"

constexpr u32 PIECES = 128 * NT; /* of 16 bytes, in a chunk of x */
constexpr u32 STAGES = NT == 2 ? 7 : NT == 4 ? 3 : 2; /* at most the 32 KiB of a table's gaps */

/* Offset of piece i of the ring. */
template <typename W> __device__ __forceinline__ u32 piece(u32 i) {
    return W::GAPS ? i / 8 * 256 + 128 + i % 8 * 16 : W::TABLE + i * 16;
}
template <typename W> constexpr u32 SHARED = W::TABLE + (W::GAPS ? 0 : STAGES * PIECES * 16);

/* The kernel. */
template <typename W>
__device__ __forceinline__ void
few_rows(W w, const u16 *x, float4 *partials, u32 batch, u32 block, u32 blocks) {
    u32 lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
    u32 units = w.columns / UNIT, pairs = (w.rows + BLOCK_ROWS - 1) / BLOCK_ROWS * units;
    u32 now = first_pair(block, blocks, pairs), end = first_pair(block + 1, blocks, pairs);
    u32 tile = now / units, unit = now % units;

    typename W::Codes codes[2][RT];
    typename W::Scales scales[RT], later[RT];
    typename W::template Source<RT> source;
    const auto weight = [&](int) -> const W & { return w; };
    u32 beyond; /* of the warp's tiles, those that the previous warp has, too: the last ones end at row N */
    auto seek = [&] {
        u32 top = tile * BLOCK_ROWS + warp * (ROWS * RT);
        u32 inside = min(top, w.rows - ROWS * RT);
        beyond = min((top - inside) / ROWS, RT);
        source.seek(w, inside, unit, lane);
    };
    seek();
    source.load_scales(scales, w), source.load(codes[0], w, 0), source.load(codes[1], w, 1);
    w.build(); /* complete at the first barrier of all threads */
    griddepcontrol_wait();

    u32 to = 0, from = 0; /* stages that are filled and read next */
    u32 chunk_of_x = 2 * unit, left_of_x = 2 * (end - now);
    auto fetch_x = [&] {
        if (left_of_x) {
#pragma unroll
            for (u32 i = 0; i < PIECES; i += THREADS) {
                u32 m = (i + threadIdx.x) / 16, at = threadIdx.x % 16; /* row, and 8 of its columns */
                u32 t = W::X == 8 ? at % 4 : at / 4, j = W::X == 8 ? at / 4 : at % 4;
                if (PIECES % THREADS == 0 || i + threadIdx.x < PIECES)
                    copy<16>(
                        shared + piece<W>(to * PIECES + (m / 8 * 4 + j) * 32 + m % 8 * 4 + t),
                        x + (u64)min(m, batch - 1) * w.columns + chunk_of_x * CHUNK + at * 8, m < batch);
            }
            left_of_x--, chunk_of_x = chunk_of_x + 1 == 2 * units ? 0 : chunk_of_x + 1;
        }
        to = to + 1 == STAGES ? 0 : to + 1;
        commit();
    };
#pragma unroll
    for (u32 i = 1; i < STAGES; i++)
        fetch_x();

    float total[RT][NT][4] = {};
    auto multiply = [&](int chunk) {
        wait<STAGES - 2>();
        __syncthreads(); /* all threads' copies have come, and the stage before it has been read */
        fetch_x();
        const u8 *stage = shared + piece<W>(from * PIECES + lane);
        multiply_chunk<W>(total, weight, codes[chunk], scales, chunk, lane, [&](int n, int j) {
            return *(const uint4 *)(stage + (n * 4 + j) * (W::GAPS ? 1024 : 512));
        });
        from = from + 1 == STAGES ? 0 : from + 1;
    };

    for (; now < end; now++) {
        bool more = now + 1 < end, last = unit + 1 == units;
        u32 skipped = beyond;
        float4 *to = partials + (u64)(block + tile) * PARTIAL + warp * RT * NT * 32;
        multiply(0);
        unit = last ? 0 : unit + 1, tile += last;
        if (more) {
            if (last)
                seek();
            else
                source.next(w, 1);
            source.load_scales(later, w), source.load(codes[0], w, 0);
        }
        multiply(1);
        if (more)
            source.load(codes[1], w, 1);
        if (last || !more) { /* the block's part of a tile is complete */
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 row = W::row(lane / 4 + 8 * half);
                        float2 *two = (float2 *)(to + ((r - skipped) * NT + n) * 32 + row % 8 * 4 + lane % 4) + row / 8;
                        float(&sum)[4] = total[r][n];
                        if (r >= skipped)
                            *two = make_float2(sum[2 * half] * w.factor(), sum[2 * half + 1] * w.factor());
                        sum[2 * half] = sum[2 * half + 1] = 0;
                    }
        }
#pragma unroll
        for (int r = 0; r < RT; r++)
            scales[r] = later[r];
    }
}

#define PRODUCT(NAME, W)                                                                                              \
    LAYOUT(SHARED<W>, 0, sizeof(Parts<W>), sizeof(Sums));                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const Parts<W> all, const u16 *x, u32 batch) {      \
        const Part<W> &part = all.parts[part_of_block(all.parts)];                                                    \
        few_rows(part.w, x, part.partials, batch, blockIdx.x - part.begin, part.blocks);                              \
    }
