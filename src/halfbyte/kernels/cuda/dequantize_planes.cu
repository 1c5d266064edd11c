/* Values of k-bit weights in bit planes, in 16 bits and bit-equal to ops.bitplane: codebook[code] · scale in fp32,
rounded.

A warp takes 32 blocks of 32 weights at a time. A lane has 8 columns, part = lane % 4, of the four blocks j · 8 + lane
/ 4: of each word the byte `part`, put together from four words. When their bits are exchanged, byte j of a word is an
index of the table for columns of block j, and an entry is those columns' fp32 numbers: four at 2 bits, else two. What
a lane decodes of a block is one 16-byte store, and the warp's stores are 512 bytes in a row. An entry has copies for
128 bytes, one for each of the lanes that are served together.

Constants: BITS (2 to 5), BF16 (else fp16), THREADS. */

#include "planes.cuh"

constexpr u32 ENTRIES = BITS == 3 ? 64 : BITS == 5 ? 1024 : 256;
constexpr u32 SIZE = BITS == 2 ? 16 : 8; /* bytes of an entry, which has copies for 128 bytes */

__device__ __forceinline__ void build(const float *codebook) {
    for (u32 index = threadIdx.x; index < ENTRIES; index += THREADS) {
        u32 value[4]; /* four columns, or two of them twice */
#pragma unroll
        for (int c = 0; c < 4; c++)
            value[c] = __float_as_uint(codebook[BITS == 2 ? code_of<4>(index, c) : code_of<2>(index, c % 2)]);
#pragma unroll
        for (u32 i = 0; i < 8; i++) /* neighbours begin at neighbouring places, for the banks' sake */
            *(uint4 *)(shared + index * 128 + (i + index) % 8 * 16) = {value[0], value[1], value[2], value[3]};
    }
}

__device__ __forceinline__ u32 scaled(u32 first, u32 second, float scale) {
    return pair<BF16>(__uint_as_float(first) * scale, __uint_as_float(second) * scale);
}

/* A lane's words and scales of four blocks. */
struct Four {
    u32 word[4][BITS];
    u32 scale[4];

    __device__ __forceinline__ void load(const u32 *packed, const u8 *scales, u32 block, u32 blocks) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 b = block + 8 * j < blocks ? block + 8 * j : blocks - 1;
            const u32 *from = packed + (u64)b * BITS;
            if (BITS == 2)
                *(uint2 *)word[j] = *(const uint2 *)from;
            else if (BITS == 4)
                *(uint4 *)word[j] = *(const uint4 *)from;
            else
#pragma unroll
                for (int i = 0; i < BITS; i++)
                    word[j][i] = from[i];
            scale[j] = scales[b];
        }
    }

    /* The lane's bytes of a plane, those of block j in byte j. */
    __device__ __forceinline__ u32 bytes(int plane, u32 selector) const {
        u32 low = __byte_perm(word[0][plane], word[1][plane], selector);
        return __byte_perm(low, __byte_perm(word[2][plane], word[3][plane], selector), 0x5410);
    }
};

__device__ __forceinline__ void
decode(const Four &four, u16 *out, u32 block, u32 blocks, float factor, u32 place, u32 lane) {
    u32 selector = lane % 4 * 0x11 + 0x40, p[4], fifth = BITS == 5 ? four.bytes(BITS - 1, selector) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        p[i] = i < BITS ? four.bytes(i, selector) : 0;
    if (BITS == 2)
        exchange(p[0], p[1], 4, 0x0f0f0f0f);
    else
        exchange_pairs(p);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float scale = e4m4(four.scale[j]) * factor;
        u32 value[4];
        if (BITS == 2) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 found = from_shared<uint4>(((j ? p[h] >> (8 * j - 7) : p[h] << 7) & 0x7f80) + place);
                value[2 * h] = scaled(found.x, found.y, scale), value[2 * h + 1] = scaled(found.z, found.w, scale);
            }
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                u32 at = (j ? p[r] >> (8 * j - 7) : p[r] << 7) & 0x7f80;
                if (BITS == 5) { /* two bits of the fifth plane are above the byte */
                    int to_right = 8 * j + 2 * r - 15;
                    at |= (to_right > 0 ? fifth >> to_right : fifth << -to_right) & 0x18000;
                }
                uint2 found = from_shared<uint2>(at + place);
                value[r] = scaled(found.x, found.y, scale);
            }
        }
        if (block + 8 * j < blocks)
            store(out + (u64)(block + 8 * j) * 32 + lane % 4 * 8, make_uint4(value[0], value[1], value[2], value[3]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
dequantize_planes(
    const u32 *packed, const u8 *scales, const float *factor, const float *codebook, u16 *out, u32 blocks) {
    u32 lane = threadIdx.x % 32, place = address(shared) + lane % (128 / SIZE) * SIZE;
    /* Warps' blocks are dealt out one multiprocessor after another, so that the last round is spread over all. */
    u32 stride = gridDim.x * THREADS, block = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * 32 + lane / 4;
    float by = *factor;
    Four now, then;
    then.load(packed, scales, block, blocks);
    build(codebook);
    __syncthreads();
    begin_after_others(); /* all that is read before are weights */
    for (; block - lane / 4 < blocks; block += stride) {
        now = then;
        then.load(packed, scales, block + stride, blocks);
        decode(now, out, block, blocks, by, place, lane);
    }
}
