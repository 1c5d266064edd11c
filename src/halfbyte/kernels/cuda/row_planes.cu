/* GEMV of one row with k-bit weights in bit planes (formats.bitplane), see mma_gemv.cuh; a K slice is a block of W.

A table in shared memory, of which each lane has its own copy, converts a byte with the bits of two columns to their
numbers, ready as operands. At 2 bits, where half a byte would suffice, the byte has the bits of both rows, and two
lanes share an entry of 8 bytes; at 5 bits the fifth plane's bits are additional address bits.

Scales are copied for two K tiles at once, 16 bytes a row.

Constants: BITS (2 to 5), ORIGIN (start of a block's shared memory), and those of mma_gemv.cuh; BATCH is 1. */

#include "mma_gemv.cuh"
#include "planes.cuh"

constexpr u32 ROW = 32 * BITS, PIECES = 2 * BITS; /* bytes and 16-byte copies per row of a K tile */

/* Place of byte `at` of a row, without bank conflicts among lanes that are served together. */
__device__ __forceinline__ u32 swizzle(u32 row, u32 at) { return row * ROW + (BITS == 4 ? at ^ (row & 1) << 4 : at); }

/* Load a lane's blocks 2t and 2t + 1 of a row. */
__device__ __forceinline__ void load(u32 (&word)[2][BITS], const u8 *part, u32 row, u32 lane) {
    u32 words[2 * BITS], t = lane % 4;
    if (BITS == 2)
        *(uint4 *)words = *(const uint4 *)(part + swizzle(row, 16 * t));
    else if (BITS == 4)
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(uint4 *)(words + 4 * i) = *(const uint4 *)(part + swizzle(row, 32 * t + 16 * i));
    else
#pragma unroll
        for (int i = 0; i < BITS; i++)
            *(uint2 *)(words + 2 * i) = *(const uint2 *)(part + swizzle(row, 8 * BITS * t + 8 * i));
#pragma unroll
    for (int i = 0; i < BITS; i++)
        word[0][i] = words[i], word[1][i] = words[BITS + i];
}

/* Scales of a lane's blocks 2t and 2t + 1 of row g + 8 · half. */
__device__ __forceinline__ u32 scales_of(const u8 *scales, int half, u32 lane) {
    return *(const u16 *)(scales + (lane / 4 + 8 * half) * 16 + lane % 4 * 2);
}
__device__ __forceinline__ float scale_of(u32 codes, int u) { return e4m4(u ? codes >> 8 : codes & 255); }

__device__ __forceinline__ u32 two(const float *codebook, u32 index) {
    return pair<BF16>(codebook[code_of<2>(index, 0)], codebook[code_of<2>(index, 1)]);
}

/* A lane's block of rows g and g + 8. Byte j of p[half][r] has the bits of columns 8j + 2r and 8j + 2r + 1; at 2 bits
p[0] has those of both rows. At 5 bits the fifth plane's bits are the highest bit of fifth[half][r]'s byte j and the
lowest of the next byte; bits 2 to 6 are the lane's copy. */
struct Blocks {
    u32 p[2][4], fifth[2][4];

    __device__ __forceinline__ Blocks(const u32 (&first)[BITS], const u32 (&second)[BITS], u32 lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 one = first[BITS - 1], other = second[BITS - 1];
            p[0][i] = BITS == 2 ? (i < 2 ? first[i] : second[i - 2]) : i < BITS ? first[i] : 0;
            p[1][i] = i < BITS ? second[i] : 0;
            fifth[0][i] = __funnelshift_l(one, one, 7 - 2 * i) & 0x81818181 | lane * 0x04040404;
            fifth[1][i] = __funnelshift_l(other, other, 7 - 2 * i) & 0x81818181 | lane * 0x04040404;
        }
        exchange_pairs(p[0]), exchange_pairs(p[1]);
    }

    /* mma's left operand for columns from 8j + 4h on. `entry`: offset of the lane's copy of the first entry. */
    __device__ __forceinline__ void look_up(u32 (&a)[4], int j, int h, u32 entry) const {
        u32 byte = 0x7604 | j << 4, fifth_too = j | (4 + j) << 4 | (j + 1) % 4 << 8;
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (BITS == 2)
                *(uint2 *)(a + 2 * r) = from_shared<uint2>(__byte_perm(p[0][2 * h + r], entry, byte) + ORIGIN);
            else
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 index = p[half][2 * h + r], beside = fifth[half][2 * h + r];
                    u32 at = __byte_perm(index, entry, byte);
                    if (BITS == 5)
                        at = __byte_perm(beside, index, fifth_too) & 0x1fffc;
                    a[2 * r + half] = from_shared<u32>(at + ORIGIN);
                }
    }
};

struct Weight : Planes {
    const float *from; /* the factor of all scales */
    float scale;

    static constexpr u32 TOGETHER = 2, TABLE = BITS == 3 ? 16384 : BITS == 5 ? 131072 : 65536;
    static constexpr u32 TILE = ROWS * ROW, ASIDE = RT * ROWS * 16;

    __device__ __forceinline__ void build() {
        constexpr u32 ENTRIES = BITS == 3 ? 64 : BITS == 5 ? 1024 : 256;
        for (u32 index = threadIdx.x; index < ENTRIES; index += THREADS) {
            u32 first = two(codebook, index), second = BITS == 2 ? two(codebook, index >> 4) : first;
            u32 at = (index & 255) << 8 | (index >> 8 & 1) << 7 | (index >> 9) << 16;
#pragma unroll
            for (u32 i = 0; i < 8; i++) /* adjacent entries start at different places, to avoid bank conflicts */
                *(uint4 *)(shared + at + (i + index) % 8 * 16) = make_uint4(first, second, first, second);
        }
        scale = *from;
    }
    __device__ __forceinline__ float factor() const { return scale; }

    /* Source addresses of a warp: pairs of adjacent K tiles of its group's tiles, RT of them at a time, whose numbers
       differ by `apart`. */
    struct Source {
        const Weight &w;
        const u8 *codes[RT], *scales; /* of the next two K tiles: the warp's codes, this lane's scales */
        u32 tile, two, lane, apart;
        u32 from[BITS], to[BITS]; /* a lane's pieces; for even BITS only the first, from which others follow */

        __device__ __forceinline__ Source(const Weight &w, u32 tile, u32 two, u32 lane, u32 apart)
            : w(w), tile(tile), two(two), lane(lane), apart(apart) {
#pragma unroll
            for (u32 i = 0; i < (BITS % 2 ? BITS : 1); i++) {
                u32 piece = lane + 32 * i, row = piece / PIECES, at = piece % PIECES * 16;
                from[i] = row * (w.columns / 8 * BITS) + at, to[i] = swizzle(row, at);
                opaque(from[i]), opaque(to[i]);
            }
            seek();
        }

        __device__ __forceinline__ void seek() {
#pragma unroll
            for (u32 r = 0; r < RT; r++) {
                u64 row = first_row(w.rows, tile + r * apart);
                codes[r] = w.packed + row * (w.columns / 8 * BITS) + two * (2 * ROW);
            }
            u32 row = first_row(w.rows, tile + lane / ROWS * apart) + lane % ROWS;
            scales = w.scales + (u64)row * (w.columns / 32) + two * 16;
        }

        /* Start copying one of two K tiles to a stage; the scales of both are copied with the first. */
        __device__ __forceinline__ void fetch(u8 *stage, u8 *with, u32 odd, u32 tiles) {
            constexpr u32 APART = 32 / PIECES; /* rows between pieces of a lane */
#pragma unroll
            for (u32 r = 0; r < RT; r++) {
                if (r && tile + apart >= tiles)
                    break;
                u8 *part = stage + r * TILE;
                const u8 *source = codes[r] + odd * ROW;
#pragma unroll
                for (u32 i = 0; i < BITS; i++)
                    if (BITS % 2)
                        copy<16>(part + to[i], source + from[i], true);
                    else
                        copy<16>(
                            part + to[0] + i * APART * ROW, source + from[0] + i * APART * w.columns / 8 * BITS, true);
            }
            if (!odd && tile + lane / ROWS * apart < tiles && lane < RT * ROWS)
                copy<16>(with + lane * 16, scales, true);
        }

        __device__ __forceinline__ void next(u32 first, u32 twos, u32 stride) {
            two += WK, scales += WK * 16;
#pragma unroll
            for (u32 r = 0; r < RT; r++)
                codes[r] += WK * 2 * ROW;
            if (two >= twos) {
                two = first, tile += stride;
                seek();
            }
        }
    };

    /* A lane's number and its offset in an entry of the table. */
    struct Decoder {
        u32 lane, entry;

        __device__ __forceinline__ Decoder(const Weight &, u32 lane)
            : lane(lane), entry(BITS == 2 ? lane % 16 * 8 : lane * 4) {}

        /* Add the products of a tile's 256 columns to the sums of rows g and g + 8. */
        __device__ __forceinline__ void
        add(float (&total)[1][2], const u8 *part, const u8 *scales, const KSlice (&x)[1], u32, u32) const {
            u32 word[2][2][BITS], codes[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                load(word[half], part, lane / 4 + 8 * half, lane), codes[half] = scales_of(scales, half, lane);
#pragma unroll
            for (int u = 0; u < 2; u++) {
                Blocks blocks(word[0][u], word[1][u], lane);
                u32 a[8][4];
                float sum[2][4] = {}; /* for even and odd products */
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    blocks.look_up(a[i], i / 2, i % 2, entry);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (i + AHEAD < 8)
                        blocks.look_up(a[i + AHEAD], (i + AHEAD) / 2, (i + AHEAD) % 2, entry);
                    multiply<BF16>(sum[i % 2], a[i], x[0].v[2 * i], x[0].v[2 * i + 1]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
                    total[0][half] += scale_of(codes[half], u) * (sum[0][2 * half + u] + sum[1][2 * half + u]);
            }
        }
    };
};

LAYOUT(SHARED<Weight>, 0, sizeof(Planes));

extern "C" __global__ void __launch_bounds__(THREADS, 1)
row_planes(Planes w, const u16 *x, const u16 *bias, u16 *out, const float *factor) {
    mma_gemv(Weight{w, factor, 0}, x, bias, out, blockIdx.x, gridDim.x);
}
