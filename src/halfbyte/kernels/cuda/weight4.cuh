/* NF4 and FP4 weights for mma.m16n8k16 with several rows of x; see split_k.cuh and table4.cuh.

Of a block, which has one scale per row, a lane has the 16 columns from 16 t on: 8 bytes of W and 32 of x, in memory
order. Sums of a block are scaled and accumulated in fp32.

Constants: NESTED, and those of split_k.cuh. */

#pragma once

#include "split_k.cuh"
#include "table4.cuh"

struct Sixteen { /* a lane's columns of a block of x */
    uint4 first, second;
};

/* A lane's columns of block b of a K tile, for tile n of rows of x; zeros for rows that do not exist. */
__device__ __forceinline__ Sixteen sixteen_of(const u16 *x, u32 columns, int b, int n, u32 batch, u32 lane) {
    const uint4 *from = (const uint4 *)(x + (u64)(8 * n) * columns + b * 64), none = make_uint4(0, 0, 0, 0);
    bool inside = 8 * n + lane / 4 < batch;
    return {inside ? from[0] : none, inside ? from[1] : none};
}

struct Weight : Table4 {
    float shift[2]; /* offsets of nested scales, of rows g and of rows g + 8 */

    static constexpr u32 CODES = 128 * ROWS, SCALE = NESTED ? 4 : 16;
    static constexpr u32 STAGE = CODES + ROWS * (NESTED ? 8 : 16); /* codes, 4 scales a row, second scales */

    /* Place of a row's 16-byte pieces in a stage: reading 8 bytes of each of 4 rows uses every bank once. */
    static __device__ __forceinline__ u32 swizzle(u32 row, u32 piece) { return piece ^ (row & 3) << 1; }

    /* The scale of block b of row `row` of the stage. */
    __device__ __forceinline__ float scale_of(const u8 *stage, u32 row, int b, u32 lane4, float shift) const {
        if (!NESTED)
            return *(const float *)(stage + CODES + row * 16 + b * 4);
        u32 four = *(const u32 *)(stage + CODES + row * 4);
        float second = *(const float *)(stage + CODES + ROWS * 4 + row * 4);
        return look_up<float, 128>(four, b, lane4) * second + shift;
    }

    /* Like scale_of, for `b` that is not a compile-time constant. */
    __device__ __forceinline__ float scale_of_block(const u8 *stage, u32 row, u32 b, u32 lane4, float shift) const {
        if (!NESTED)
            return *(const float *)(stage + CODES + row * 16 + b * 4);
        u32 code = stage[CODES + row * 4 + b];
        float second = *(const float *)(stage + CODES + ROWS * 4 + row * 4);
        return look<float, 128>(code << 8 | lane4) * second + shift;
    }

    /* Add a K tile's products to `sum`. `x` is this lane's first value of row g of x in this K tile. */
    __device__ __forceinline__ void compute(Sums &sum, const u8 *stage, const u16 *x, u32 batch, u32 lane) const {
        multiply_by([&](int b, int n) { return sixteen_of(x, columns, b, n, batch, lane); }, sum, stage, lane);
    }

    /* Like compute, with x(block, tile of rows) returning a Sixteen. */
    template <typename X> __device__ __forceinline__ void multiply_by(X x, Sums &sum, const u8 *stage, u32 lane) const {
        u32 g = lane / 4, t = lane % 4, lane4 = lane * 4;
#pragma unroll(NT *RT < 8 ? 4 : 1)
        for (int b = 0; b < 4; b++) {
            u32 a[RT][4][4];
            float scale[RT][2];
            const u8 *codes = stage + g * 128 + ((b ^ g & 3) << 5) + t * 8;
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int half = 0; half < 2; half++) { /* rows g, then g + 8 */
                    scale[r][half] = scale_of(stage, 16 * r + g + 8 * half, b, lane4, shift[half]);
                    uint2 word = *(const uint2 *)(codes + r * 2048 + half * 1024);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        a[r][i / 2][half + i % 2 * 2] = look_up<u32, 0>(word.x, i, lane4);
                        a[r][2 + i / 2][half + i % 2 * 2] = look_up<u32, 0>(word.y, i, lane4);
                    }
                }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const Sixteen v = x(b, n);
                const uint4 &x0 = v.first, &x1 = v.second;
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    float d[4] = {0, 0, 0, 0};
                    multiply<BF16>(d, a[r][0], x0.x, x0.y);
                    multiply<BF16>(d, a[r][1], x0.z, x0.w);
                    multiply<BF16>(d, a[r][2], x1.x, x1.y);
                    multiply<BF16>(d, a[r][3], x1.z, x1.w);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sum[r][n][i] += scale[r][i / 2] * d[i];
                }
            }
        }
    }
};
