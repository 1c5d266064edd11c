/* Products with k-bit weights in bit planes (ops.bitplane), k = BITS = 2 to 5, rows of whole blocks; see product.cuh.

A lane has whole blocks of 32 columns: BITS words for a row. Transposing 4×4 bits within them leaves in word r, byte j the
codes of columns 8j + r and 8j + r + 4, a fifth plane's two bits apart. Both values come from the table, in x's dtype, as
one word: entries are 256 bytes (32 words, one for a lane; then nothing) where one PRMT makes their address, and 128 bytes
for the 1024 entries of 5 bits. They are multiplied by the block's scale in x's dtype, and x's columns are paired alike. */

#include "product.cuh"

struct Planes {
    const u8 *packed, *scales; /* [N, K/32, BITS] words, [N, K/32] E4M4 */
    const float *codebook;     /* [2^BITS] */
    u32 rows, columns;         /* N, K */

    static constexpr u32 ENTRIES = BITS == 5 ? 1024 : 256, ENTRY = BITS == 5 ? 128 : 256, TABLE = ENTRIES * ENTRY;
    /* Bytes from row to row of a slot: 32·BITS, and more so that rows begin at other banks. */
    static constexpr u32 ROW = BITS == 2 ? 96 : BITS == 3 ? 112 : BITS == 4 ? 192 : 176;
    static constexpr u32 SLOT = ROWS * (ROW + 8), NEIGHBOURS = 32;

    __device__ __forceinline__ void fetch(u8 *slot, u32 row, u32 step, u32 lane) const {
        constexpr u32 PIECES = 2 * BITS;
#pragma unroll
        for (u32 i = lane; i < ROWS * PIECES; i += 32) {
            u32 r = row + i / PIECES, piece = i % PIECES;
            const u8 *from = packed + (u64)r * (columns / 8 * BITS) + step * (32 * BITS) + piece * 16;
            copy<16>(slot + i / PIECES * ROW + piece * 16, r < rows ? from : packed, r < rows);
        }
#pragma unroll
        for (u32 i = lane; i < ROWS * 2; i += 32) {
            u32 r = row + i / 2;
            const u8 *from = scales + (u64)r * (columns / 32) + step * 8 + i % 2 * 4;
            copy<4>(slot + ROWS * ROW + i * 4, r < rows ? from : scales, r < rows);
        }
    }

    __device__ __forceinline__ void build() const {
        for (u32 i = threadIdx.x; i < ENTRIES * 8; i += THREADS) {
            u32 entry = i / 8, low = entry & 15, high = entry >> 4 & 15;
            if (BITS == 5)
                low |= entry >> 8 << 4 & 16, high |= entry >> 9 << 4;
            u32 mask = (1 << BITS) - 1, word = pair<BF16>(codebook[low & mask], codebook[high & mask]);
            *(uint4 *)(shared + entry * ENTRY + i % 8 * 16) = make_uint4(word, word, word, word);
        }
    }

    /* Both columns of byte i; `fifth` has their fifth bits in its byte i. */
    static __device__ __forceinline__ u32 look_up(u32 word, u32 fifth, int i, u32 lane4) {
        if (BITS == 5)
            return *(const u32 *)(shared + (__byte_perm(word, fifth, 0x40 + i * 0x11) & 1023) * ENTRY + lane4);
        return *(const u32 *)(shared + __byte_perm(word, lane4, 0x5504 | i << 4));
    }

    /* E4M4, twice, in x's dtype. */
    static __device__ __forceinline__ u32 scale_of(u32 code) {
        float value = code < 16 ? code * 0x1p-14f : __uint_as_float((code + ((127 - 11) << 4)) << 19);
        return pair<BF16>(value, value);
    }

    /* Two words of which each has the bits of `mask` of one and of the other. */
    static __device__ __forceinline__ void exchange(u32 &low, u32 &high, int shift, u32 mask) {
        u32 first = low;
        low = first & mask | high << shift & ~mask;
        high = first >> shift & mask | high & ~mask;
    }

    /* 32 weights of a row as left operands: a[product][0 or 2 + half]. */
    static __device__ __forceinline__ void decode(u32 (&a)[8][4], int half, const u32 *block, u32 scale, u32 lane4) {
        u32 p[4] = {block[0], block[1], BITS > 2 ? block[2] : 0, BITS > 3 ? block[3] : 0};
        exchange(p[0], p[1], 1, 0x55555555);
        exchange(p[2], p[3], 1, 0x55555555);
        exchange(p[0], p[2], 2, 0x33333333);
        exchange(p[1], p[3], 2, 0x33333333);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            u32 bits = BITS == 5 ? block[BITS - 1] >> r & 0x11111111 : 0;
            u32 fifth = (bits | bits >> 3) & 0x03030303;
#pragma unroll
            for (int j = 0; j < 4; j++)
                a[2 * j + r / 2][half + r % 2 * 2] = times<BF16>(look_up(p[r], fifth, j, lane4), scale);
        }
    }

    __device__ __forceinline__ void compute(Sums &sum, const u8 *slot, const u16 *x, u32 batch, u32 lane) const {
        u32 g = lane / 4, t = lane % 4, lane4 = lane * 4;
        const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < 2; u++) {
            u32 a[RT][8][4];
#pragma unroll
            for (int r = 0; r < RT; r++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 row = 16 * r + g + 8 * half, block[BITS];
                    const u8 *from = slot + row * ROW + (4 * u + t) * 4 * BITS;
                    if (BITS == 4)
                        *(uint4 *)block = *(const uint4 *)from;
                    else
#pragma unroll
                        for (int i = 0; i < BITS; i++)
                            block[i] = ((const u32 *)from)[i];
                    decode(a[r], half, block, scale_of(slot[ROWS * ROW + row * 8 + 4 * u + t]), lane4);
                }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const uint4 *from = (const uint4 *)(x + (u64)(8 * n) * columns + u * 128);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint4 v = 8 * n + g < batch ? from[j] : none; /* columns 8j ... 8j + 7 */
                    u32 first = __byte_perm(v.x, v.z, 0x5410), second = __byte_perm(v.x, v.z, 0x7632);
                    u32 third = __byte_perm(v.y, v.w, 0x5410), fourth = __byte_perm(v.y, v.w, 0x7632);
#pragma unroll
                    for (int r = 0; r < RT; r++) {
                        multiply<BF16>(sum[r][n], a[r][2 * j], first, second);
                        multiply<BF16>(sum[r][n], a[r][2 * j + 1], third, fourth);
                    }
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
planes(Planes w, const u16 *x, const u16 *bias, u16 *out, const float *factor, u32 batch) {
    product(w, x, bias, out, *factor, batch);
}
