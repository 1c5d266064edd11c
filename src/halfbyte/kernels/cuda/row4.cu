/* GEMV of one or two rows with up to three NF4 and FP4 weights at a time, see mma_gemv.cuh and table4.cuh.

A lane's two K slices of 32 weights are one block of 64, and their sums are added before they are scaled. A smaller
block is one slice; a larger one belongs to several lanes.

A tile in a stage is 128 bytes of codes per row, then for each row the scales of four adjacent blocks that include the K
tile's (for blocks of 32: of eight). Nested scales are bytes; the second-level scale follows each four of them.

Constants: SHIFT (log2 of a block's slices), NESTED, ORIGIN (start of a block's shared memory), and those of
mma_gemv.cuh. */

#include "mma_gemv.cuh"
#include "table4.cuh"

constexpr u32 FOUR = NESTED ? 8 : 16, OF_ROW = SHIFT ? FOUR : 2 * FOUR; /* bytes of four scales, and of a row's */
constexpr u32 CODES = 128 * ROWS;

/* Products of this lane's slices with each row of x: sum[m][u][2 · half + u] for rows g + 8 · half and slice 2t + u.
look_up(a, u, j) decodes mma's left operand, columns from 4j on of that slice. */
template <typename F>
__device__ __forceinline__ void multiply_slices(F look_up, float (&sum)[BATCH][2][4], const KSlice (&x)[BATCH]) {
    u32 a[16][4];
#pragma unroll
    for (int i = 0; i < 8 * BATCH; i++)
        sum[i / 8][i / 4 % 2][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        look_up(a[i], i % 2, i / 2);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (i + AHEAD < 16)
            look_up(a[i + AHEAD], (i + AHEAD) % 2, (i + AHEAD) / 2);
#pragma unroll
        for (int m = 0; m < BATCH; m++)
            multiply<BF16>(sum[m][i % 2], a[i], x[m].v[i / 2 * 2], x[m].v[i / 2 * 2 + 1]);
    }
}

/* Place of byte `at` of a row, without bank conflicts among lanes that are served together. */
__device__ __forceinline__ u32 swizzle(u32 row, u32 at) { return row * 128 + (at ^ (row & 1) << 4); }

struct Weight : Table4 {
    float shift; /* offset of nested scales */

    static constexpr u32 TOGETHER = 1, TILE = CODES + OF_ROW * ROWS, ASIDE = 0;

    __device__ __forceinline__ void build() {
        Table4::build();
        shift = NESTED ? *offset : 0.0f;
    }
    __device__ __forceinline__ float factor() const { return 1.0f; }


    /* Source addresses of a warp: the next K tile of its group's tiles, whose numbers differ by `apart`. */
    struct Source {
        const Weight &w;
        const u8 *codes[RT]; /* this lane's piece of the first rows */
        const u8 *scales;    /* of the first block; for the upper half of the lanes, its second-level scale */
        u32 before[RT];      /* slices of W before this lane's row and K tile */
        u32 tile, k_tile, lane, apart, to, shift;

        __device__ __forceinline__ Source(const Weight &w, u32 tile, u32 k_tile, u32 lane, u32 apart)
            : w(w), scales(w.absmax), tile(tile), k_tile(k_tile), lane(lane), apart(apart) {
            to = swizzle(lane / 8, lane % 8 * 16), shift = SHIFT + 2;
            if (NESTED && lane >= ROWS)
                scales = (const u8 *)w.second, shift = SHIFT + 8;
            opaque(to), opaque(shift);
            seek();
        }

        __device__ __forceinline__ void seek() {
#pragma unroll
            for (u32 r = 0; r < RT; r++) {
                u32 row = first_row(w.rows, tile + r * apart);
                codes[r] = w.packed + (u64)(row + lane / 8) * (w.columns / 2) + k_tile * 128 + lane % 8 * 16;
                before[r] = (row + lane % ROWS) * (w.columns / 32) + k_tile * 8;
            }
        }

        /* Start copying the K tile to a stage. At most the rest of 16 bytes after the last scale is copied as well. */
        __device__ __forceinline__ void fetch(u8 *stage, u8 *, u32, u32) const {
            constexpr u32 SIZE = NESTED ? 4 : 16;
#pragma unroll
            for (u32 r = 0; r < RT; r++) {
                if (r && (tile + r * apart) * ROWS >= w.rows)
                    break;
                u8 *part = stage + r * TILE, *with = part + CODES + lane % ROWS * OF_ROW + lane / ROWS * 4;
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    copy<16>(part + to + i * 512, codes[r] + (u64)i * 2 * w.columns, true);
                const u8 *from = scales + (u64)(before[r] >> shift) * SIZE;
                if (NESTED || lane < ROWS)
#pragma unroll
                    for (u32 at = 0; at < OF_ROW; at += FOUR)
                        copy<SIZE>(with + at, from + (lane < ROWS && at ? SIZE : 0), true);
            }
        }

        __device__ __forceinline__ void next(u32 first, u32 k_tiles, u32 stride) {
            k_tile += WK;
#pragma unroll
            for (u32 r = 0; r < RT; r++)
                codes[r] += WK * 128, before[r] += WK * 8;
            if (k_tile >= k_tiles) {
                k_tile = first, tile += stride;
                seek();
            }
        }
    };

    /* Offsets of a lane's data of a tile in a stage. */
    struct Decoder {
        const Weight &w;
        u32 codes, other, scales, block, lane4; /* offsets of its slices and first row's scales; which of four is its */

        __device__ __forceinline__ Decoder(const Weight &w, u32 lane) : w(w), lane4(lane * 4) {
            u32 slice = lane % 4 * 2;
            codes = swizzle(lane / 4, slice * 16), other = codes ^ 16;
            scales = CODES + lane / 4 * OF_ROW + (SHIFT ? 0 : slice / 4 * FOUR);
            block = SHIFT > 1 ? slice : slice >> SHIFT & 3;
            opaque(codes), opaque(other), opaque(scales), opaque(block), opaque(lane4);
        }

        /* Scale of slice 2t + u in row g + 8 · half; the row's K tile starts at slice `before` of W. */
        __device__ __forceinline__ float scale_of(const u8 *tile, int half, u32 before, int u) const {
            const u8 *of_row = tile + scales + half * 8 * OF_ROW;
            u32 at = SHIFT > 1 ? (before + block) >> SHIFT & 3 : block + u;
            if (!NESTED)
                return ((const float *)of_row)[at];
            uint2 four = *(const uint2 *)of_row; /* with the second-level scale */
            return look<float, 128>(__byte_perm(four.x, lane4, 0x5504 | at << 4)) * __uint_as_float(four.y) + w.shift;
        }

        /* Add the products of a tile's 256 columns to the sums of rows g and g + 8; `row` is the tile's first. */
        __device__ __forceinline__ void
        add(float (&total)[BATCH][2], const u8 *tile, const u8 *, const KSlice (&x)[BATCH], u32 row, u32 k_tile) const {
            u32 of_row = w.columns / 32, before = (row + lane4 / 16) * of_row + k_tile * 8; /* slices of W */
            u32 words[2][2][4];
            float scale[2][2], sum[BATCH][2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                *(uint4 *)words[half][0] = *(const uint4 *)(tile + codes + half * 1024);
                *(uint4 *)words[half][1] = *(const uint4 *)(tile + other + half * 1024);
#pragma unroll
                for (int u = 0; u < (SHIFT ? 1 : 2); u++)
                    scale[half][u] = scale_of(tile, half, before + half * 8 * of_row, u);
            }
            auto look_up = [&](u32 (&a)[4], int u, int j) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[i] = Table4::look_up<u32, 0>(words[i % 2][u][j / 2], j % 2 * 2 + i / 2, lane4);
            };
            multiply_slices(look_up, sum, x);
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
    };
};

/* One of the weights of x, and its range of blocks: the first, and their number. */
struct Part {
    Weight w;
    const u16 *bias;
    u16 *out;
    u32 begin, blocks;
};

struct Parts {
    Part parts[3]; /* unused parts start after all blocks */
};

LAYOUT(SHARED<Weight>, 0, sizeof(Parts));

extern "C" __global__ void __launch_bounds__(THREADS, 1) row4(const Parts all, const u16 *x) {
    const Part &part = all.parts[(blockIdx.x >= all.parts[1].begin) + (blockIdx.x >= all.parts[2].begin)];
    mma_gemv(part.w, x, part.bias, part.out, blockIdx.x - part.begin, part.blocks);
}
