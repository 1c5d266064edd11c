/* NF4 and FP4 weights as a format of gemm.cuh and grouped.cuh, see table4.cuh. The order of K is weight4.cuh's.

Constants: NESTED, and those of gemm.cuh. */

#pragma once

#include "gemm.cuh"
#include "table4.cuh"

struct Weight : Table4 {
    float shift; /* offset of nested scales */

    static constexpr u32 CODES = 64 * ROWS, SCALE = NESTED ? 4 : 16;
    static constexpr u32 BYTES = CODES + ROWS * (NESTED ? 8 : 16); /* codes, 4 scales a row, second scales */
    static constexpr bool SCALED = false;

    struct Lane { /* row of W, offset of the first half's codes, lane · 4 */
        u32 row, codes, lane4;

        __device__ __forceinline__ Lane(u32 warp, u32 lane) {
            row = warp * 16 + lane / 4, codes = row * 64 + (lane / 8 % 2 * 32 | lane % 4 * 8), lane4 = lane * 4;
            opaque(row), opaque(codes), opaque(lane4);
        }
    };

    /* For rows g and g + 8: four nested scales, the second-level one; a half's scale; codes of its second quarter. */
    struct Kept {
        u32 four[2], word[2];
        float second[2], scale[2];
    };

    static constexpr __device__ __forceinline__ u32 position(u32 pair) {
        return pair / 32 * 32 + pair % 8 * 4 + pair / 8 % 4;
    }

    /* The two 32-byte halves of a row are exchanged in every second pair of rows, so that reading 8 bytes of each of 4
       rows uses every bank once. Rows beyond the last repeat it. Nested scales are copied every 2nd K tile. */
    __device__ __forceinline__ void fetch(u32 stage, u32 tile, u32 k_tile, u32 producer, u32 lane) const {
        u32 at = lane / 4, piece = lane % 4, last = rows - 1;
        const u8 *codes = packed + k_tile * 64 + piece * 16;
        u32 to = stage + at * 64 + (piece ^ (at & 2)) * 16 + producer * 512;
        opaque(codes), opaque(to);
#pragma unroll
        for (u32 k = 0; k < ROWS / 8 / PRODUCERS; k++) {
            u32 row = min(tile + at + (k * PRODUCERS + producer) * 8, last);
            copy_to<16>(to + k * PRODUCERS * 512, codes + (u64)row * (columns / 2));
        }
        if (NESTED && k_tile % 2)
            return;
        to = stage + CODES + (producer * 16 + lane % 16) * SCALE + (lane < 16 ? 0 : 4 * ROWS);
        const u8 *scales = lane < 16 ? absmax : (const u8 *)second;
        opaque(scales), opaque(to);
#pragma unroll
        for (u32 k = 0; k < ROWS / 16 / PRODUCERS; k++) {
            u32 row = min(tile + lane % 16 + (k * PRODUCERS + producer) * 16, last);
            u32 block = row * (columns / 64) + k_tile / 2 * 4;
            if (NESTED)
                copy_to<4>(to + k * PRODUCERS * 64, scales + (lane < 16 ? block : block / 256 * 4));
            else if (lane < 16)
                copy_to<16>(to + k * PRODUCERS * 256, scales + (u64)block * 4);
        }
    }

    __device__ __forceinline__ void
    make(Quarter &quarter, Kept &kept, u32 stage, u32 k_tile, u32 i, const Lane &at) const {
#pragma unroll
        for (int high = 0; high < 2; high++) { /* rows g, then g + 8 */
            u32 word = kept.word[high];
            if (i % 2 == 0) {
                const u8 *scales = shared + stage + CODES + (at.row + 8 * high) * SCALE;
                u32 b = k_tile % 2 * 2 + i / 2;
                uint2 words = *(const uint2 *)(shared + stage + (at.codes ^ i * 16) + high * 512);
                word = words.x, kept.word[high] = words.y;
                if (NESTED) {
                    if (i == 0 && k_tile % 2 == 0) {
                        kept.four[high] = *(const u32 *)scales;
                        kept.second[high] = *(const float *)(scales + 4 * ROWS);
                    }
                    kept.scale[high] = look_up<float, 128>(kept.four[high], b, at.lane4) * kept.second[high] + shift;
                } else
                    kept.scale[high] = *(const float *)(scales + b * 4);
            } else
                quarter.scale[high] = kept.scale[high];
#pragma unroll
            for (int k = 0; k < 4; k++)
                quarter.a[k / 2][high + k % 2 * 2] = look_up<u32, 0>(word, k, at.lane4);
        }
    }
};
