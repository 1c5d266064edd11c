/* Values of k-bit weights in bit planes, in 16 bits and bit-equal to ops.bitplane: codebook[code] · scale in fp32,
rounded.

A warp takes 32 blocks of 32 weights at a time. A lane has 8 columns, part = lane % 4, of the four blocks j · 8 + lane
/ 4: of each word the byte `part`, put together from four words. When their bits are exchanged, byte j of a word is an
index of the table for columns of block j, and an entry is those columns' fp32 numbers: four at 2 bits, else two. What
a lane decodes of a block is one 16-byte store, and the warp's stores are 512 bytes in a row. An entry has copies for
128 bytes, one for each of the lanes that are served together. Each warp's words and scales are copied ahead, to a ring
of STAGES slots of its own.

Constants: BITS (2 to 5), BF16 (else fp16), THREADS, STAGES. */

#include "planes.cuh"

constexpr u32 ENTRIES = BITS == 3 ? 64 : BITS == 5 ? 1024 : 256;
constexpr u32 SIZE = BITS == 2 ? 16 : 8; /* bytes of an entry, which has copies for 128 bytes */
constexpr u32 WORDS = 128 * BITS, SLOT = WORDS + 32; /* bytes of a warp's 32 blocks: words, and with their scales */

LAYOUT(128 * ENTRIES + THREADS / 32 * STAGES * SLOT, 0);

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

/* Begin to copy 32 blocks, from `block` on, to a slot. */
__device__ __forceinline__ void fetch(u8 *slot, const u32 *packed, const u8 *scales, u32 block, u32 lane) {
    const u8 *from = (const u8 *)(packed + (u64)block * BITS);
#pragma unroll
    for (u32 first = 0; first < SLOT; first += 512) {
        u32 at = first + lane * 16;
        if (at < SLOT)
            copy<16>(slot + at, at < WORDS ? from + at : scales + block + (at - WORDS), true);
    }
}

/* A lane's words of block j · 8 + lane / 4 in a slot. */
__device__ __forceinline__ void load(u32 (&word)[BITS], const u8 *slot, int j, u32 lane) {
    const u32 *from = (const u32 *)slot + (j * 8 + lane / 4) * BITS;
    if (BITS == 2)
        *(uint2 *)word = *(const uint2 *)from;
    else if (BITS == 4)
        *(uint4 *)word = *(const uint4 *)from;
    else
#pragma unroll
        for (int i = 0; i < BITS; i++)
            word[i] = from[i];
}

__device__ __forceinline__ void decode(const u8 *slot, u16 *out, u32 block, float factor, u32 place, u32 lane) {
    u32 word[4][BITS], p[4] = {}, fifth = 0, selector = lane % 4 * 0x11 + 0x40;
#pragma unroll
    for (int j = 0; j < 4; j++)
        load(word[j], slot, j, lane);
#pragma unroll
    for (int i = 0; i < BITS; i++) { /* the lane's bytes of a plane, those of block j in byte j */
        u32 low = __byte_perm(word[0][i], word[1][i], selector), high = __byte_perm(word[2][i], word[3][i], selector);
        (i < 4 ? p[i] : fifth) = __byte_perm(low, high, 0x5410);
    }
    if (BITS == 2)
        exchange(p[0], p[1], 4, 0x0f0f0f0f);
    else
        exchange_pairs(p);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float scale = e4m4(slot[WORDS + j * 8 + lane / 4]) * factor;
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
        store(out + (u64)(block + 8 * j) * 32 + lane * 8, make_uint4(value[0], value[1], value[2], value[3]));
    }
}

/* `blocks` is a multiple of 32. */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
dequantize_planes(
    const u32 *packed, const u8 *scales, const float *factor, const float *codebook, u16 *out, u32 blocks) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, place = address(shared) + lane % (128 / SIZE) * SIZE;
    u8 *ring = shared + 128 * ENTRIES + warp * STAGES * SLOT;
    /* Warps' blocks are dealt out one multiprocessor after another, so that the last round is spread over all. */
    u32 stride = gridDim.x * THREADS, block = (warp * gridDim.x + blockIdx.x) * 32, next = block, filled = 0, now = 0;
    auto fetch_next = [&] {
        if (next < blocks)
            fetch(ring + filled, packed, scales, next, lane);
        next += stride, filled = filled + SLOT == STAGES * SLOT ? 0 : filled + SLOT;
        commit();
    };
    for (int i = 0; i < STAGES - 1; i++)
        fetch_next();
    float by = *factor;
    build(codebook);
    __syncthreads();
    griddepcontrol_wait(); /* all that is read before are weights */
    for (; block < blocks; block += stride) {
        wait<STAGES - 2>();
        __syncwarp(); /* every lane's copies are there, and every lane has read the slot that is filled next */
        fetch_next();
        decode(ring + now, out, block, by, place, lane);
        now = now + SLOT == STAGES * SLOT ? 0 : now + SLOT;
    }
}
