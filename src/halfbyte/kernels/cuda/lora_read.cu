/* Low-rank products and FP8 cast of up to three tensors x [rows, width], in one pass over them, ops/lora_read.py: for
ranks of 8 and 16.

    v     [rows, r]    = s · x · factor [width, r]
    dBᵀ   [r, columns] = s · low-rank rows [r, rows] · x, transposed in registers (movmatrix)
    codes              = x in FP8

Blocks, strips, steps and the ring are those of lora_glu.cu: a block takes a strip of 32·WARPS columns of one tensor and
walks down a part of the rows, 16 at a time. dB stays in registers along the part; v is added over a block's warps in
shared memory, in a fixed order, while the next step runs. `finish` adds the partial results of strips and parts, in a
fixed order.

Constants: WARPS, BLOCKS (per multiprocessor), STAGES (of the ring), BF16 (else fp16), LEARN (1: compute dB), TRANSPOSED (1:
factors are [r, width]), FLOAT8 (0; 1 for E4M3, 2 for E5M2: dtype of the codes), COLUMNS (factors of columns before the
cast). */

#include "warp.cuh"
#include "matrix.cuh"
#include "lora.cuh"

constexpr u32 STRIP = 32 * WARPS;

/* Shared memory: matrices of 8×8, 128 bytes each, of the factor [warp][tile j][half of r] and of low-rank rows
   [slot][half of r][half of rows]; [odd][warp] sums; the ring [stage][warp][half of rows]; factors of columns. */
constexpr u32 LOW = WARPS * 1024, EXCHANGE = LOW + (STAGES + 1) * 512, RING = EXCHANGE + 2 * WARPS * 1024;
constexpr u32 FACTORS = RING + STAGES * WARPS * 1024;

struct Part {
    const u16 *x, *factor;
    float *gradient;                          /* [width, rank] */
    u32 width, stride, rank;                  /* stride: of x's rows, in numbers */
    u32 first_rank, first_strip, first_column; /* among those of all parts; an unused part has no strip */
    float scale;
};

struct Read {
    Part parts[3];
    const u16 *low;   /* [rows, ranks] */
    u8 *codes;        /* [rows, width] */
    float *partial;   /* [strip, 16 rows, half of r, lane] of v */
    float *gradients; /* [part of a strip's rows, 16, width] */
    u16 *sum;         /* v [rows, ranks] */
    const float *columns, *scale;
    float *newest;
    u32 rows, width, ranks, strips, share; /* of all parts; `share`: steps per block */
};

LAYOUT(FACTORS + STRIP * 4, 0, sizeof(Part), sizeof(Read));

/* The part that contains a strip or a column. */
__device__ __forceinline__ u32 part_of_strip(const Read &read, u32 strip) {
    return (strip >= read.parts[1].first_strip) + (strip >= read.parts[2].first_strip);
}
__device__ __forceinline__ u32 part_of_column(const Read &read, u32 column) {
    return (column >= read.parts[1].first_column) + (column >= read.parts[2].first_column);
}
__device__ __forceinline__ u32 steps_of(const Read &read) { return (read.rows + 15) / 16; }

/* A warp's work on its 32 columns. */
struct Columns {
    const Read &read;
    const Part part;
    u32 warp, lane, column, first, end; /* column: the first of this lane's eight, in the part; first, end: rows */
    bool inside;

    __device__ __forceinline__ Columns(const Read &read, u32 strip, u32 step, u32 steps)
        : read(read), part(read.parts[part_of_strip(read, strip)]), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        column = (strip - part.first_strip) * STRIP + warp * 32 + lane % 4 * 8, inside = column < part.width;
        first = 16 * step, end = min(read.rows, first + 16 * steps);
    }

    __device__ __forceinline__ u8 *factor() const { return shared + warp * 1024; }

    /* Copy the factors of the warp's columns to shared memory, a column per lane, zero outside rank and width. */
    __device__ __forceinline__ void fill() const {
        const u32 mine = column - lane % 4 * 8 + lane;
        u8 *row = factor() + lane % 8 / 2 * 256 + (lane / 8 * 2 + lane % 2) * 16;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const bool there = mine < part.width && 8 * half < part.rank;
            if (TRANSPOSED)
#pragma unroll
                for (u32 r = 8 * half; r < 8 * half + 8; r++)
                    *(u16 *)(row + half * 128 + r % 8 * 2) = there ? part.factor[(u64)r * part.width + mine] : 0;
            else {
                const u16 *from = part.factor + (u64)mine * part.rank + 8 * half;
                *(uint4 *)(row + half * 128) = there ? from_global(from) : make_uint4(0, 0, 0, 0);
            }
        }
        if (FLOAT8 && COLUMNS)
            ((float *)(shared + FACTORS))[warp * 32 + lane] =
                mine < part.width ? read.columns[part.first_column + mine] : 0;
    }

    __device__ __forceinline__ u8 *stage_of(u32 step) const {
        return shared + RING + (step % STAGES * WARPS + warp) * 1024 + lane * 16;
    }

    /* Start copying a step's numbers and low-rank rows. */
    __device__ __forceinline__ void fetch(u32 step) const {
        const u32 row = first + 16 * step;
        if (row < end) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 at = row + 8 * half + lane / 4;
                const bool there = inside && at < end;
                copy<16>(stage_of(step) + half * 512, part.x + (there ? (u64)at * part.stride + column : 0), there);
            }
            if (LEARN && warp == 0) { /* half of r, half of rows, row */
                const u32 half = lane / 16, at = row + lane % 16;
                const bool there = at < end && 8 * half < part.rank;
                const u64 offset = there ? (u64)at * read.ranks + part.first_rank + 8 * half : 0;
                copy<16>(shared + LOW + step % (STAGES + 1) * 512 + lane * 16, read.low + offset, there);
            }
        }
        commit();
    }

    /* Add the sums of all warps for a step; warps alternate. */
    __device__ __forceinline__ void put(u32 strip, u32 step) const {
        const u32 i = (warp + step * 2) % WARPS;
        if (i >= 2)
            return;
        const Four *from = (const Four *)(shared + EXCHANGE) + (step % 2 * WARPS * 2 + i) * 32 + lane;
        Four sum = from[0];
#pragma unroll
        for (u32 w = 1; w < WARPS; w++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                sum.x[k] += from[w * 64].x[k];
        ((Four *)read.partial)[(((u64)strip * steps_of(read) + first / 16 + step) * 2 + i) * 32 + lane] = sum;
    }

    /* Store a step's codes. */
    __device__ __forceinline__ void write(const u32 (&tiles)[4][2], u32 row, float scale, float &amax) const {
        alignas(16) float factors[8];
        if (COLUMNS) {
            const Four *from = (const Four *)(shared + FACTORS) + (warp * 32 + lane % 4 * 8) / 4;
            ((Four *)factors)[0] = from[0], ((Four *)factors)[1] = from[1];
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 at = row + 8 * half + lane / 4;
            u32 codes[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                codes[j] = cast(tiles[j][half], factors + 2 * j, scale, amax);
            if (inside && at < end)
                store(read.codes + (u64)at * read.width + part.first_column + column,
                      uint2{codes[0] | codes[1] << 16, codes[2] | codes[3] << 16});
        }
    }

    /* Store this part's contribution to dBᵀ. */
    __device__ __forceinline__ void store_gradient(const float (&gradient)[4][4], u32 rows) const {
        float *out = read.gradients + (u64)rows * 16 * read.width + part.first_column + column;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 half = i / 2, r = 8 * half + lane / 4;
            const float(&a)[4] = gradient[i % 2 * 2], (&b)[4] = gradient[i % 2 * 2 + 1];
            ((Four *)(out + (u64)r * read.width))[i % 2] =
                Four{a[2 * half], a[2 * half + 1], b[2 * half], b[2 * half + 1]};
        }
    }
};

/* The steps of a strip from `begin` on; `before`: number of blocks with earlier steps of the strip. */
__device__ __forceinline__ void walk(const Read &read, u32 strip, u32 before, u32 begin, u32 steps, float &amax) {
    const Columns columns(read, strip, begin, steps);
    const u32 lane = columns.lane;
    for (u32 step = 0; step < STAGES; step++)
        columns.fetch(step);
    columns.fill();

    const float scale = FLOAT8 ? *read.scale : 1;
    float gradient[4][4] = {};
    for (u32 step = 0; step < steps; step++) {
        wait<STAGES - 1>();
        __syncthreads(); /* all copies have arrived, and all warps have finished the previous step */
        u32 tiles[4][2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const uint4 eight = *(const uint4 *)(columns.stage_of(step) + half * 512);
            tiles[0][half] = eight.x, tiles[1][half] = eight.y, tiles[2][half] = eight.z, tiles[3][half] = eight.w;
        }
        columns.fetch(step + STAGES);
        if (step)
            columns.put(strip, step - 1);
        float sums[2][4];
#pragma unroll
        for (u32 p = 0; p < 2; p++) {
            gather(sums, tiles, columns.factor(), p, lane);
            if (LEARN)
                learn(gradient, shared + LOW + step % (STAGES + 1) * 512, tiles, p, lane);
        }
        if (FLOAT8)
            columns.write(tiles, columns.first + 16 * step, scale, amax);
        Four *to = (Four *)(shared + EXCHANGE) + (step % 2 * WARPS + columns.warp) * 64 + lane;
        to[0] = *(const Four *)sums[0], to[32] = *(const Four *)sums[1];
    }
    __syncthreads();
    columns.put(strip, steps - 1);
    if (LEARN && columns.inside)
        columns.store_gradient(gradient, before);
}

extern "C" __global__ void __launch_bounds__(STRIP, BLOCKS) lora_read(Read read) {
    griddepcontrol_wait();
    const u32 steps = steps_of(read), end = min(steps * read.strips, (blockIdx.x + 1) * read.share);
    float amax = 0;
    for (u32 at = blockIdx.x * read.share; at < end;) {
        const u32 strip = at / steps, begin = at % steps, count = min(steps - begin, end - at);
        walk(read, strip, blockIdx.x - strip * steps / read.share, begin, count, amax);
        at += count;
    }
    if (FLOAT8)
        record_amax(read.newest, amax);
}

/* Add the strips' partial sums of v, four numbers of a part per thread; then the parts' sums of dB, four ranks of a
   column per thread. */
extern "C" __global__ void __launch_bounds__(256) finish(Read read) {
    griddepcontrol_wait();
    const u32 steps = steps_of(read), count = steps * 64;
    const u64 thread = (u64)blockIdx.x * 256 + threadIdx.x;
    if (thread < 3 * count) {
        const u32 at = thread % count, lane = at % 32, r = at / 32 % 2 * 8 + lane % 4 * 2;
        const u32 row = at / 64 * 16 + lane / 4;
        const u32 p = thread / count;
        const Part &part = read.parts[p];
        if (r >= part.rank)
            return;
        const u32 strips = (part.width + STRIP - 1) / STRIP;
        const Four sum = sum_of<false, 8>(read.partial, (u64)part.first_strip * count + at, count, strips);
        u16 *to = read.sum + (u64)row * read.ranks + part.first_rank + r;
        if (row < read.rows)
            *(u32 *)to = pair<BF16>(part.scale * sum.x[0], part.scale * sum.x[1]);
        if (row + 8 < read.rows)
            *(u32 *)(to + 8 * read.ranks) = pair<BF16>(part.scale * sum.x[2], part.scale * sum.x[3]);
    } else if (LEARN) {
        const u64 at = thread - 3 * count;
        const u32 column = at % read.width, r = at / read.width * 4;
        const Part &part = read.parts[part_of_column(read, column)];
        if (r >= part.rank)
            return;
        const u32 mine = column - part.first_column, strip = part.first_strip + mine / STRIP;
        const u32 first = strip * steps / read.share, last = ((strip + 1) * steps - 1) / read.share;
        Four sum = {};
        for (u32 rows = 0; rows <= last - first; rows++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                sum.x[k] += part.scale * read.gradients[((u64)rows * 16 + r + k) * read.width + column];
        ((Four *)part.gradient)[((u64)mine * part.rank + r) / 4] = sum;
    }
}
