/* y = factor · x Wᵀ + b for one or two rows of x, on tensor cores: the scheme and its pipeline, for any format of W.

With one row of x, mma.m16n8k16 would waste seven of its eight columns. So W is its left operand, and the columns of the
right one are the eight K slices of 32 weights that a row of W has in a K tile of 256: column n has x's slice n, and
zeros elsewhere along K. Each slice then has its own sum, and a block's scale is one fp32 factor of a sum instead of one
factor per weight.

With g = lane / 4 and t = lane % 4, a lane decodes slices 2t and 2t + 1 of rows g and g + 8 of W, and holds slice g of x
if it is one of these, else zeros. Products with slices 2t go to one set of sums and those with slices 2t + 1 to
another, so that one right operand serves both; the other set's columns are meaningless.

A block of threads is WR groups of WK warps. A group has RT tiles of 16 rows at a time, and its warps alternate over
the K tiles, TOGETHER of them at a time; their sums are added in a fixed order. Each warp copies one K tile in advance,
to two stages of its own. Before griddepcontrol_wait() only weights are read.

A format is a class with W's shape (rows, columns), and

    TABLE, TILE, ASIDE   bytes of the table, of 16 rows in a stage, of data that TOGETHER K tiles of RT · 16 rows share
    TOGETHER             1 or 2
    build, factor        fill the table and read single numbers; factor of all sums
    Source               source addresses of a warp: fetch starts copying a K tile, next advances by TOGETHER of them
    Decoder              add multiplies a lane's slices of a K tile of 16 rows

Constants: BATCH (rows of x, 1 or 2), RT, WR, WK, BF16 (else fp16). */

#pragma once

#include "warp.cuh"

constexpr u32 ROWS = 16, THREADS = 32 * WR * WK;
constexpr u32 OF_TILES = RT * BATCH * ROWS; /* sums of a group's tiles, per warp */
constexpr int AHEAD = 3; /* operands decoded in advance */

/* Bytes of shared memory: per warp, before the sums, and in total. */
template <typename W> constexpr u32 OF_WARP = 2 * (RT * W::TILE + W::ASIDE);
template <typename W> constexpr u32 SUMS = W::TABLE + WR * WK * OF_WARP<W>;
template <typename W> constexpr u32 SHARED = SUMS<W> + 2 * WR * WK * OF_TILES * 4;

/* The last tile starts early enough to have 16 rows; rows in two tiles get the same result twice. */
__device__ __forceinline__ u32 first_row(u32 rows, u32 tile) { return min(tile * ROWS, rows - ROWS); }

/* A lane's 32 values of a row of x in a K tile. */
struct KSlice {
    u32 v[16] = {};
    const u16 *x;
    bool own;

    __device__ __forceinline__ void begin(const u16 *row, u32 lane) {
        x = row + lane / 4 * 32, own = lane / 8 == lane % 4;
        opaque(x);
    }

    __device__ __forceinline__ void load(u32 k_tile) {
        if (own)
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(uint4 *)(v + 4 * j) = from_global(x + k_tile * 256 + j * 8);
    }
};

/* Reduce the sums of a group's RT tiles, whose numbers differ by `apart`, and write y. `split`: warp in the group. */
__device__ __forceinline__ void finish(
    float (&total)[RT][BATCH][2], float *sums, u16 *out, const u16 *bias, float factor, u32 rows, u32 tile, u32 apart,
    u32 group, u32 split, u32 lane) {
#pragma unroll
    for (int i = 0; i < RT * BATCH; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[i / BATCH][i % BATCH][half];
            sum += shuffle(sum, 1);
            sum += shuffle(sum, 2);
            if (lane % 4 == 0)
                sums[split * OF_TILES + i * ROWS + 8 * half + lane / 4] = sum;
        }
    group_sync<32 * WK>(group);
    for (u32 i = split * 32 + lane; i < OF_TILES; i += 32 * WK) {
        u32 mine = tile + i / (BATCH * ROWS) * apart, m = i / ROWS % BATCH, row = first_row(rows, mine) + i % ROWS;
        if (mine * ROWS < rows) {
            float sum = 0;
#pragma unroll
            for (u32 k = 0; k < WK; k++)
                sum += sums[k * OF_TILES + i];
            out[(u64)m * rows + row] = (u16)pair<BF16>(sum * factor + (bias ? number<BF16>(bias[row]) : 0.0f), 0.0f);
        }
    }
}

/* The kernel, for block `block` of `blocks`. */
template <typename W>
__device__ __forceinline__ void mma_gemv(W w, const u16 *x, const u16 *bias, u16 *out, u32 block, u32 blocks) {
    constexpr u32 TOGETHER = W::TOGETHER, STAGE = RT * W::TILE;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / WK, first = warp % WK;
    u32 tiles = (w.rows + ROWS - 1) / ROWS, units = w.columns / (256 * TOGETHER), apart = blocks;
    u32 first_tile = group * RT * apart + block, stride = apart * WR * RT;
    u8 *ring = shared + W::TABLE + warp * OF_WARP<W>, *aside = ring + 2 * STAGE;
    float *sums = (float *)(shared + SUMS<W>) + group * 2 * WK * OF_TILES;

    typename W::Source source(w, first < units ? first_tile : tiles, first, lane, apart);
    u32 filled = 0; /* set of shared data that is filled next */
    auto fetch_next = [&](u8 *stage, u32 odd) {
        if (source.tile < tiles) {
            source.fetch(stage, aside + filled * W::ASIDE, odd, tiles);
            if (odd == TOGETHER - 1)
                source.next(first, units, stride);
        }
        filled ^= odd;
        commit();
    };
    fetch_next(ring, 0);
    w.build();
    __syncthreads();
    griddepcontrol_wait();

    const typename W::Decoder decoder(w, lane);
    KSlice slice[BATCH];
#pragma unroll
    for (u32 m = 0; m < BATCH; m++) {
        slice[m].begin(x + m * w.columns, lane);
        slice[m].load(first < units ? first * TOGETHER : 0);
    }
    u32 stage = 0, shares = 0, turn = 0;
    for (u32 tile = first_tile; tile < tiles; tile += stride) {
        float total[RT][BATCH][2] = {};
        for (u32 unit = first; unit < units; unit += WK) {
#pragma unroll
            for (u32 odd = 0; odd < TOGETHER; odd++) {
                wait<0>();
                __syncwarp(); /* all lanes' copies have arrived, and all lanes have read the stage filled next */
                stage = TOGETHER == 2 ? odd * STAGE : stage;
                const u8 *now = ring + stage;
                stage = STAGE - stage;
                fetch_next(ring + stage, (odd + 1) % TOGETHER);
                const u8 *shared_by_k_tiles = aside + shares * W::ASIDE;
#pragma unroll
                for (u32 r = 0; r < RT; r++)
                    if (r == 0 || tile + r * apart < tiles)
                        decoder.add(
                            total[r], now + r * W::TILE, shared_by_k_tiles + r * (W::ASIDE / RT) + odd * 8, slice,
                            first_row(w.rows, tile + r * apart), unit * TOGETHER + odd);
                u32 next = odd < TOGETHER - 1 ? unit : unit + WK < units ? unit + WK : first;
#pragma unroll
                for (u32 m = 0; m < BATCH; m++)
                    slice[m].load(next * TOGETHER + (odd + 1) % TOGETHER);
            }
            shares ^= TOGETHER - 1;
        }
        finish(total, sums + turn * WK * OF_TILES, out, bias, w.factor(), w.rows, tile, apart, group, first, lane);
        turn ^= 1; /* the last tile's sums may still be read */
    }
}
