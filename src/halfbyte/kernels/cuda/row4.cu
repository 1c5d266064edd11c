/* y = x Wᵀ + b for one row of x and NF4 or FP4 weights, on tensor cores; see row.cuh, and table4.cuh.

A row's 256 columns of a step are eight parts of 32, so this lane's two are one block of 64: halves of a block have sums of
their own, which are added before they are scaled. Smaller blocks are one part, larger ones several lanes'.

Of a tile, a slot has the codes, then for each row four neighbouring blocks' scales (blocks of 32: twice), among them those
of the step. Nested scales are bytes, and beside four of them is the second scale.

Constants: SHIFT (the binary logarithm of a block's parts), NESTED, and those of row.cuh. */

#include "row.cuh"

#include "table4.cuh"

#ifndef GAP
#define GAP 0
#define TWICE 0
#endif
#ifndef X
#define X 0
#endif

constexpr u32 FOUR = NESTED ? 8 : 16, OF_ROW = SHIFT ? FOUR : 2 * FOUR; /* bytes of four blocks' scales, of a row's */
#if GAP
constexpr u32 LINE = 256, SLOTS = WARPS * STAGES * RT;
constexpr u32 SCALES = 65536 + (SLOTS > 16 ? (SLOTS - 15) / 2 * 4096 : 0), CODE = SCALES + SLOTS * ROWS * OF_ROW;
constexpr u32 SUMS = CODE + 1024;
__device__ __forceinline__ u32 codes_at(u32 q) {
    return q < 16 ? q * 4096 + 128 : 65536 + (q / 2 - 8) * 4096 + q % 2 * 128;
}
__device__ __forceinline__ u32 scales_at(u32 q) { return SCALES + q * ROWS * OF_ROW; }
#else
constexpr u32 LINE = 128, TILE = ROWS * (128 + OF_ROW), SUMS = Table4::TABLE + WARPS * STAGES * RT * TILE;
__device__ __forceinline__ u32 codes_at(u32 q) { return Table4::TABLE + q * TILE; }
__device__ __forceinline__ u32 scales_at(u32 q) { return Table4::TABLE + q * TILE + ROWS * 128; }
#endif

/* Where byte `at` of a row lies: what lanes that are served together read is in every bank once. */
__device__ __forceinline__ u32 place(u32 row, u32 at) { return row * LINE + (at ^ (row & 1) << 4); }

/* Where a warp copies from: the next step of RT tiles, `apart` from each other. */
struct Source {
    const Table4 &w;
    const u8 *codes[RT]; /* this lane's piece of the first rows */
    const u8 *scales;    /* of the first block, or its second scale: lanes of the upper half bring these */
    u32 blocks[RT];      /* parts of 32 before this lane's row and step */
    u32 tile, step, lane, apart, to, shift;

    __device__ __forceinline__ Source(const Table4 &w, u32 tile, u32 step, u32 lane, u32 apart)
        : w(w), tile(tile), step(step), lane(lane), apart(apart), to(place(lane / 8, lane % 8 * 16)), shift(SHIFT + 2) {
        scales = w.absmax;
        if (NESTED && lane >= ROWS)
            scales = (const u8 *)w.second, shift = SHIFT + 8;
        keep(to), keep(shift);
        seek();
    }

    __device__ __forceinline__ void seek() {
#pragma unroll
        for (u32 r = 0; r < RT; r++) {
            u32 row = first_row(w.rows, tile + r * apart);
            codes[r] = w.packed + (u64)(row + lane / 8) * (w.columns / 2) + step * 128 + lane % 8 * 16;
            blocks[r] = (row + lane % ROWS) * (w.columns / 32) + step * 8;
        }
    }

    /* Begin to copy the step to a slot. */
    __device__ __forceinline__ void fetch(u32 q, u32 tiles) {
        constexpr u32 SIZE = NESTED ? 4 : 16;
#pragma unroll
        for (u32 r = 0; r < RT; r++) {
            if (r && tile + r * apart >= tiles)
                break;
            u8 *tile_slot = shared + codes_at(q + r);
            u8 *with = shared + scales_at(q + r) + lane % ROWS * OF_ROW + lane / ROWS * 4;
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                copy<16>(tile_slot + to + i * 4 * LINE, codes[r] + (u64)i * 2 * w.columns, true);
            const u8 *from = scales + (u64)(blocks[r] >> shift) * SIZE;
            if (NESTED || lane < ROWS)
#pragma unroll
                for (u32 at = 0; at < OF_ROW; at += FOUR)
                    copy<SIZE>(with + at, from + (lane < ROWS && at ? SIZE : 0), true);
        }
    }

    __device__ __forceinline__ void next(u32 first, u32 steps, u32 stride) {
        step += WK;
#pragma unroll
        for (u32 r = 0; r < RT; r++)
            codes[r] += WK * 128, blocks[r] += WK * 8;
        if (step >= steps) {
            step = first, tile += stride;
            seek();
        }
    }
};

/* What a lane has of a tile in a slot. */
struct Own {
    u32 codes, other, scales, block, lane4; /* where its parts and its first row's scales are, which of four is its */
    float shift;                            /* what is added to nested scales */

    __device__ __forceinline__ Own(u32 lane, float shift) : lane4(lane * 4), shift(shift) {
        u32 part = lane % 4 * 2;
        codes = place(lane / 4, part * 16), other = codes ^ 16;
        scales = lane / 4 * OF_ROW + (SHIFT ? 0 : part / 4 * FOUR);
        block = SHIFT > 1 ? part : part >> SHIFT & 3;
        keep(codes), keep(other), keep(scales), keep(block), keep(lane4);
    }

    /* The scale of part u in row g + 8 · half, which with its step begins at part `before` of W. */
    __device__ __forceinline__ float scale_of(const u8 *with, int half, u32 before, int u) const {
        const u8 *of_row = with + scales + half * 8 * OF_ROW;
        u32 at = SHIFT > 1 ? (before + block) >> SHIFT & 3 : block + u;
        if (!NESTED)
            return ((const float *)of_row)[at];
        uint2 four = *(const uint2 *)of_row; /* and the second scale */
#if GAP
        return look<float, CODE>((four.x >> 8 * at & 255) * 4) * __uint_as_float(four.y) + shift;
#endif
        return look<float, 128>(__byte_perm(four.x, lane4, 0x5504 | at << 4)) * __uint_as_float(four.y) + shift;
    }
};

/* Add the products of a tile's 256 columns to the sums of rows g and g + 8. */
__device__ __forceinline__ void
add(float (&total)[BATCH][2], const u8 *tile, const u8 *with, const Inputs (&x)[BATCH], const u32 (&before)[2], const Own &own) {
    u32 words[2][2][4];
    float scale[2][2], sum[BATCH][2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        *(uint4 *)words[half][0] = *(const uint4 *)(tile + own.codes + half * 8 * LINE);
        *(uint4 *)words[half][1] = *(const uint4 *)(tile + own.other + half * 8 * LINE);
#pragma unroll
        for (int u = 0; u < (SHIFT ? 1 : 2); u++)
            scale[half][u] = own.scale_of(with, half, before[half], u);
    }
    auto look_up = [&](u32 (&a)[4], int u, int j) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = Table4::look_up<u32, 0>(words[i % 2][u][j / 2], j % 2 * 2 + i / 2, own.lane4);
    };
    multiply_ahead(look_up, sum, x);
#pragma unroll
    for (int m = 0; m < BATCH; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float first = sum[m][0][2 * half], second = sum[m][1][2 * half + 1];
            if (SHIFT)
                total[m][half] += scale[half][0] * (first + second);
            else
                total[m][half] += scale[half][0] * first + scale[half][1] * second;
        }
}

constexpr u32 XS = SUMS + 2 * WARPS * RT * BATCH * ROWS * 4; /* rings of x */

extern "C" __global__ void __launch_bounds__(THREADS, TWICE ? 2 : 1)
row4(Table4 w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / WK, first = warp % WK;
    u32 tiles = (w.rows + ROWS - 1) / ROWS, steps = w.columns / 256, apart = gridDim.x;
    u32 first_tile = group * RT * apart + blockIdx.x, stride = apart * WR * RT;
    u32 ring = warp * STAGES * RT;
    float *sums = (float *)(shared + SUMS) + group * 2 * WK * RT * BATCH * ROWS;

    Source source(w, first < steps ? first_tile : tiles, first, lane, apart);
    u32 filled = 0, early[STAGES - 1];
    u8 *own_x = shared + XS + warp * STAGES * BATCH * 512;
    auto copy_x = [&](u32 stage, u32 step) {
        u32 to = (lane ^ lane / 8) * 16;
        if (X == 2)
#pragma unroll
            for (u32 m = 0; m < BATCH; m++)
                copy<16>(own_x + (stage * BATCH + m) * 512 + to, x + (u64)m * w.columns + step * 256 + lane * 8, m < batch);
    };
    auto fetch_next = [&] {
        if (source.tile < tiles) {
            source.fetch(ring + filled, tiles);
            copy_x(filled / RT, source.step);
            source.next(first, steps, stride);
        }
        filled = filled + RT == STAGES * RT ? 0 : filled + RT;
        commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        early[i] = source.step;
        if (source.tile < tiles) {
            source.fetch(ring + filled, tiles);
            source.next(first, steps, stride);
        }
        filled += RT;
        if (X != 2)
            commit();
    }
#if GAP
    for (u32 i = threadIdx.x; i < 2048; i += THREADS) {
        u32 word = pair<BF16>(w.codebook[i / 8 >> 4], w.codebook[i / 8 & 15]);
        *(uint4 *)(shared + i / 8 * 256 + i % 8 * 16) = make_uint4(word, word, word, word);
    }
    if (NESTED)
        for (u32 i = threadIdx.x; i < 256; i += THREADS)
            ((float *)(shared + CODE))[i] = w.code[i];
#else
    w.build();
#endif
    float shift = NESTED ? *w.offset : 0.0f;
    __syncthreads();
    begin_after_others();

    u32 stage = 0, turn = 0;
    Own own(lane, shift);
    Inputs inputs[BATCH], later[BATCH];
    auto load = [&](Inputs (&to)[BATCH], u32 step) {
#pragma unroll
        for (u32 m = 0; m < BATCH; m++)
            to[m].load(step);
    };
    for (u32 m = 0; m < BATCH; m++)
        inputs[m].begin(x + (u64)m * w.columns, m < batch, lane), later[m].begin(x + (u64)m * w.columns, m < batch, lane);
    if (X == 2) {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (first < steps)
                copy_x(i, early[i]);
            commit();
        }
    } else if (X == 3) {
        for (u32 i = threadIdx.x; i < w.columns / 8; i += THREADS)
            *(uint4 *)(shared + XS + (i ^ i / 8 & 3) * 16) = from_global(x + i * 8);
        __syncthreads();
    } else
        load(inputs, first < steps ? first : 0);
    for (u32 tile = first_tile; tile < tiles; tile += stride) {
        float total[RT][BATCH][2] = {};
        for (u32 step = first; step < steps; step += WK) {
            wait<STAGES - 2>();
            __syncwarp(); /* every lane's copies are there, and every lane has read what is copied to next */
            fetch_next();
            if (X == 1)
                load(later, step + WK < steps ? step + WK : first);
            if (X >= 2)
#pragma unroll
                for (u32 m = 0; m < BATCH; m++)
#pragma unroll
                    for (u32 j = 0; j < 4; j++)
                        if (inputs[m].own)
                            *(uint4 *)(inputs[m].v + 4 * j) = *(const uint4 *)((X == 3 ? shared + XS + step * 512 : own_x + (stage / RT * BATCH + m) * 512) + ((lane / 4 * 4 + lane / 8 ^ j) * 16));
#pragma unroll
            for (u32 r = 0; r < RT; r++)
                if (r == 0 || tile + r * apart < tiles) {
                    u32 row = first_row(w.rows, tile + r * apart) + lane / 4, of_row = w.columns / 32;
                    u32 before[2] = {row * of_row + step * 8, (row + 8) * of_row + step * 8};
                    add(total[r], shared + codes_at(ring + stage + r), shared + scales_at(ring + stage + r), inputs, before, own);
                }
            if (X == 0)
                load(inputs, step + WK < steps ? step + WK : first);
            if (X == 1)
#pragma unroll
                for (u32 m = 0; m < BATCH; m++)
#pragma unroll
                    for (u32 j = 0; j < 16; j++)
                        inputs[m].v[j] = later[m].v[j];
            stage = stage + RT == STAGES * RT ? 0 : stage + RT;
        }
        finish(total, sums + turn * WK * RT * BATCH * ROWS, out, bias, 1.0f, w.rows, batch, tile, tiles, apart, first, group, lane);
        turn ^= 1; /* the last tile's sums may still be read */
    }
}
