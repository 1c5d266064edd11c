/* Rearrangement of bit planes into indices of a table, whose entries are the numbers of neighbouring columns. */

#pragma once

#include "warp.cuh"

struct Planes {
    const u8 *packed;         /* [N, K/32, BITS] words */
    const u8 *scales, *zeros; /* [N, K/32] E4M4, or [N, K/GROUP] 16 bits and fp16 */
    const float *codebook;    /* [2^BITS]; unused with GROUP */
    u32 rows, columns;        /* N, K */
};

/* Exchange bits between two words, so that each has the bits of `mask` of both. */
__device__ __forceinline__ void exchange(u32 &low, u32 &high, int shift, u32 mask) {
    u32 first = low;
    low = choose(mask, first, high << shift);
    high = choose(mask, first >> shift, high);
}

/* Rearrange four planes of 32 columns: byte j of p[r] gets the bits of columns 8j + 2r and 8j + 2r + 1. */
__device__ __forceinline__ void exchange_pairs(u32 (&p)[4]) {
    exchange(p[0], p[1], 2, 0x33333333);
    exchange(p[2], p[3], 2, 0x33333333);
    exchange(p[0], p[2], 4, 0x0f0f0f0f);
    exchange(p[1], p[3], 4, 0x0f0f0f0f);
}

/* The code of a column of the entry `index`, in which each plane has the bits of COUNT adjacent columns. */
template <int COUNT> __device__ __forceinline__ u32 code_of(u32 index, int column) {
    u32 code = 0;
#pragma unroll
    for (int plane = 0; plane < (BITS == 8 ? 4 : BITS); plane++)
        code |= (index >> (plane * COUNT + column) & 1) << plane;
    return code;
}

/* Decode E4M4: its bits are those of fp32 with another bias, also for subnormal numbers. */
__device__ __forceinline__ float e4m4(u32 code) { return __uint_as_float(code << 19) * 0x1p116f; }
