/* GEMM of up to 16 rows with weights in bit planes (formats.bitplane, formats.hqq), see split_k.cuh.

A table in shared memory converts codes to numbers. Of 128 columns a lane has the block of 32 number lane % 4: BITS
words of a row. The order of K is free, so bits are only exchanged between words until a byte has the bits of
neighbouring columns (4 columns at 2 bits, otherwise 2), and x is used in memory order. The byte is the table's index,
and an entry holds these columns' numbers in x's dtype, ready as operands. Each lane has its own copy of an entry to
avoid bank conflicts; two lanes share one at 2 bits, where an entry is 8 bytes, and at 5, with 1024 entries of 4.

x is loaded half a K tile in advance.

Constants: BITS (2, 3, 4, 5 with E4M4 scales per block; 2, 3, 4, 8 with GROUP), GROUP (weights per scale and zero of
HQQ; 0: E4M4), ORIGIN (start of a block's shared memory), and those of split_k.cuh. */

#include "planes.cuh"
#include "split_k.cuh"

constexpr u32 PIECES = 2 * BITS; /* 16-byte copies per row of a K tile */
constexpr int AHEAD = 3; /* look-ups in flight */
/* In a stage: bytes from row to row, and additionally after 4 rows; pairs of bytes copied for a row's scales; bytes of
its scales and, after them, zeros. */
constexpr u32 ROW = BITS == 8 ? 272 : 32 * BITS, SKEW = BITS % 2 ? 16 : 0;
constexpr u32 HALVES = GROUP == 0 ? 4 : GROUP == 32 ? 8 : GROUP == 64 ? 4 : 2;
constexpr u32 SCALES = HALVES * (GROUP ? 4 : 2);
constexpr u32 CODES = ROWS * ROW + ROWS / 4 * SKEW, STAGE = CODES + ROWS * SCALES, RING = STAGES * STAGE;
/* Bytes of the table, and its alignment: an index is a byte of an address, which one PRMT assembles. */
constexpr u32 TABLE = BITS == 3 ? 16384 : 65536, ALIGN = 65536;

/* The table is at a multiple of ALIGN, with as many rings as fit before it, the others and the sums after it. */
constexpr u32 FRONT = (ALIGN - ORIGIN % ALIGN) % ALIGN, BEFORE = FRONT / RING < WARPS ? FRONT / RING : WARPS;
/* Place of byte `at` of a row in a stage: blocks of 8 rows use every bank once (at 8 bits twice). */
__device__ __forceinline__ u32 swizzle(u32 row, u32 at) {
    return row * ROW + row / 4 * SKEW + (BITS == 2 ? at ^ (row & 2) << 4 : BITS == 4 ? at ^ (row & 1) << 6 : at);
}

/* Numbers of an entry's columns 2i and 2i + 1, as a pair. */
template <int COUNT> __device__ __forceinline__ u32 entry(const float *codebook, u32 index, int i) {
    u32 first = code_of<COUNT>(index, 2 * i), second = code_of<COUNT>(index, 2 * i + 1);
    return GROUP ? pair<BF16>((float)first, (float)second) : pair<BF16>(codebook[first], codebook[second]);
}

__device__ __forceinline__ void build(u8 *table, const float *codebook) {
    constexpr u32 ENTRIES = BITS == 3 ? 64 : BITS == 5 ? 1024 : 256, COPIES = BITS == 5 ? 4 : 8; /* of 16 bytes */
    for (u32 i = threadIdx.x; i < ENTRIES * COPIES; i += THREADS) {
        u32 index = i / COPIES, at = index << 8;
        if (BITS == 5)
            at = (index & 255) << 8 | (index >> 8) << 6;
        u32 first = entry<BITS == 2 ? 4 : 2>(codebook, index, 0);
        u32 second = BITS == 2 ? entry<4>(codebook, index, 1) : first;
        *(uint4 *)(table + at + i % COPIES * 16) = make_uint4(first, second, first, second);
    }
}

/* The entry of byte i of `word`. `entry` is the address of this lane's copy of the first entry; at 5 bits it is the
table's address, and byte i of `fifth` has this pair's two bits of the fifth plane above the lane's copy number. */
template <typename T> __device__ __forceinline__ T look_up(u32 word, u32 fifth, int i, u32 entry) {
    if (BITS == 5)
        return from_shared<T>(__byte_perm(fifth, word, 0x40 + i * 0x11) & 0xffff | entry);
    return from_shared<T>(__byte_perm(word, entry, 0x7604 | i << 4));
}

/* A lane's 32 weights of one row. */
struct Block {
    u32 low[4], high[4]; /* planes 0 to 3; planes 4 to 7, or look_up's `fifth` for low[r] */
    u32 scale, zero;     /* pairs of one number in x's dtype; zero: - zero · scale */

    __device__ __forceinline__ void load(const u8 *stage, u32 row, u32 u, u32 lane, u32 odd) {
        u32 b = 4 * u + lane % 4, word[BITS];
        const u8 *from = stage + swizzle(row, b * 4 * BITS), *tail = stage + CODES + row * SCALES;
#pragma unroll
        for (int i = 0; i < BITS; i += BITS % 4 == 0 ? 4 : BITS == 2 ? 2 : 1)
            if (BITS % 4 == 0)
                *(uint4 *)(word + i) = *(const uint4 *)(from + 4 * i);
            else if (BITS == 2)
                *(uint2 *)(word + i) = *(const uint2 *)(from + 4 * i);
            else
                word[i] = ((const u32 *)from)[i];
#pragma unroll
        for (int i = 0; i < 4; i++)
            low[i] = i < BITS ? word[i] : 0, high[i] = 4 + i < BITS ? word[4 + i] : 0;
        if (BITS == 2)
            exchange(low[0], low[1], 4, 0x0f0f0f0f);
        else
            exchange_pairs(low);
        if (BITS == 8)
            exchange_pairs(high);
        if (BITS == 5) {
            u32 fifth = high[0], copies = lane % 16 * 0x04040404;
#pragma unroll
            for (int r = 0; r < 4; r++)
                high[r] = fifth << (6 - 2 * r) & 0xc0c0c0c0 | copies;
        }
        if (GROUP == 0) {
            float value = e4m4(tail[b]);
            scale = pair<BF16>(value, value);
        } else {
            u32 at = GROUP == 256 ? odd : b * 32 / GROUP;
            float s = number<true>(((const u16 *)tail)[at]), z = number<false>(((const u16 *)tail)[HALVES + at]);
            scale = pair<BF16>(s, s), zero = pair<BF16>(-s * z, -s * z);
        }
    }

    /* Decode four columns from 8j + 4h on. */
    __device__ __forceinline__ uint2 decode(int j, int h, u32 entry) const {
        uint2 found;
        if (BITS == 2)
            found = look_up<uint2>(low[h], 0, j, entry);
        else {
            found.x = look_up<u32>(low[2 * h], high[2 * h], j, entry);
            found.y = look_up<u32>(low[2 * h + 1], high[2 * h + 1], j, entry);
        }
        if (BITS == 8) {
            const u32 sixteen = pair<BF16>(16, 16);
            found.x = fused<BF16>(look_up<u32>(high[2 * h], 0, j, entry), sixteen, found.x);
            found.y = fused<BF16>(look_up<u32>(high[2 * h + 1], 0, j, entry), sixteen, found.y);
        }
        return found;
    }

    __device__ __forceinline__ u32 scaled(u32 word) const {
        return GROUP ? fused<BF16>(word, scale, zero) : times<BF16>(word, scale);
    }
};

/* A lane's values of x for 128 columns: of row g of each tile of 8 rows, the 32 from `x` on. */
struct Inputs {
    uint4 v[NT][4];

    __device__ __forceinline__ void load(const u16 *x, u32 columns, u32 batch, u32 lane) {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[n][j] = make_uint4(0, 0, 0, 0);
                if (8 * n + lane / 4 < batch)
                    v[n][j] = from_global(x + (u64)(8 * n) * columns + j * 8);
            }
    }
};

struct Weight : Planes {
    typedef Sums Total[2]; /* for even and odd products */
    const float *from;     /* the factor of all scales */
    float scale;

    static constexpr u32 STAGE = ::STAGE, SUMS = FRONT + TABLE + (WARPS - BEFORE) * RING;

    static __device__ __forceinline__ u32 ring(u32 warp) {
        u32 begin = warp < BEFORE ? warp * RING : FRONT + TABLE + (warp - BEFORE) * RING;
        opaque(begin);
        return begin;
    }
    /* The last tile starts early enough to have all its rows; rows in two tiles get the same result twice. */
    __device__ __forceinline__ u32 first_row(u32 tile) const {
        return tile * ROWS + ROWS <= rows ? tile * ROWS : rows - ROWS;
    }
    __device__ __forceinline__ void build() {
        ::build(shared + FRONT, codebook);
        scale = GROUP ? 1.0f : *from;
    }
    __device__ __forceinline__ float factor() const { return scale; }

    /* Source addresses of a warp: K tile after K tile of its group's tiles. */
    struct Source {
        const Weight &w;
        const u8 *codes, *scales; /* of the next K tile: the warp's codes, this lane's scales */
        u32 tile, k_tile, row, lane;
        u32 from[BITS * RT], to[BITS * RT]; /* a lane's pieces; for even BITS only the first, from which others follow */

        __device__ __forceinline__ Source(const Weight &w, u32 tile, u32 k_tile, u32 lane)
            : w(w), tile(tile), k_tile(k_tile), lane(lane) {
#pragma unroll
            for (u32 i = 0; i < (BITS % 2 ? BITS * RT : 1); i++) {
                u32 piece = lane + 32 * i, r = piece / PIECES, at = piece % PIECES * 16;
                from[i] = r * (w.columns / 8 * BITS) + at, to[i] = swizzle(r, at);
                opaque(from[i]), opaque(to[i]);
            }
            seek();
        }

        __device__ __forceinline__ void seek() {
            row = w.first_row(tile);
            codes = w.packed + (u64)row * (w.columns / 8 * BITS) + k_tile * (32 * BITS);
            u64 at = (u64)row * (w.columns / 32) + k_tile * 8;
            scales = w.scales + at + lane / 2 * (w.columns / 32) + lane % 2 * 4;
        }

        /* Start copying the next K tile to a stage. */
        __device__ __forceinline__ void fetch(u8 *stage) {
            constexpr u32 APART = 32 / PIECES; /* rows between pieces of a lane */
#pragma unroll
            for (u32 i = 0; i < BITS * RT; i++)
                if (BITS % 2)
                    copy<16>(stage + to[i], codes + from[i], true);
                else
                    copy<16>(
                        stage + to[0] + i * APART * ROW, codes + from[0] + i * APART * (w.columns / 8 * BITS), true);
            u8 *tail = stage + CODES;
            if constexpr (GROUP == 0) {
#pragma unroll
                for (u32 i = 0; i < RT; i++)
                    copy<4>(tail + i * 128 + lane * 4, scales + 16 * i * (w.columns / 32), true);
            } else {
                constexpr u32 WORDS = HALVES / 2;
                for (u32 i = lane; i < ROWS * WORDS; i += 32) {
                    u64 first = (u64)(row + i / WORDS) * (w.columns / GROUP) + k_tile * 256 / GROUP;
                    u64 at = (first & ~1ull) * 2 + i % WORDS * 4;
                    copy<4>(tail + i / WORDS * SCALES + i % WORDS * 4, w.scales + at, true);
                    copy<4>(tail + i / WORDS * SCALES + HALVES * 2 + i % WORDS * 4, w.zeros + at, true);
                }
            }
        }

        __device__ __forceinline__ void next(u32 first, u32 k_tiles, u32 stride) {
            k_tile += WK, codes += WK * 32 * BITS, scales += WK * 8;
            if (k_tile >= k_tiles) {
                k_tile = first, tile += stride;
                seek();
            }
        }
    };

    struct Operands {
        const Weight &w;
        const u16 *x;
        u32 batch, lane, entry;
        Inputs now, later; /* of the current half K tile, and of the next one (in flight) */

        __device__ __forceinline__ Operands(const Weight &w, const u16 *from, u32 batch, u32 lane, u32 k_tile)
            : w(w), x(from + (u64)(lane / 4) * w.columns + lane % 4 * 32), batch(batch), lane(lane) {
            entry = ORIGIN + FRONT + (BITS == 5 ? 0 : BITS == 2 ? lane % 16 * 8 : lane * 4);
            now.load(x + k_tile * 256, w.columns, batch, lane);
        }

        /* Add the products of half a K tile, u, to the two sets of sums alternately. */
        __device__ __forceinline__ void compute(Total &sum, const u8 *stage, const Inputs &x, u32 u, u32 odd) const {
#pragma unroll
            for (int r = 0; r < RT; r++) {
                Block block[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 row = 16 * r + lane / 4 + 8 * half;
                    block[half].load(stage, row, u, lane, odd & 1 ^ row & w.columns / 256 & 1);
                }
                uint2 found[8][2];
                auto look_up = [&](int i) {
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        found[i][half] = block[half].decode(i / 2, i % 2, entry);
                };
#pragma unroll
                for (int i = 0; i < AHEAD; i++)
                    look_up(i);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (i + AHEAD < 8)
                        look_up(i + AHEAD);
                    const Block &low = block[0], &high = block[1];
                    const uint2 &first = found[i][0], &second = found[i][1];
                    u32 a[4] = {low.scaled(first.x), high.scaled(second.x), low.scaled(first.y), high.scaled(second.y)};
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        const uint4 &b = x.v[n][i / 2];
                        multiply<BF16>(sum[i % 2][r][n], a, i % 2 ? b.z : b.x, i % 2 ? b.w : b.y);
                    }
                }
            }
        }

        __device__ __forceinline__ void accumulate(Total &sum, const u8 *stage, u32 row, u32 k_tile, u32 next) {
            u32 odd = (row & w.columns / 256) + k_tile;
            later.load(x + k_tile * 256 + 128, w.columns, batch, lane);
            compute(sum, stage, now, 0, odd);
            next *= 256;
            opaque(next);
            now.load(x + next, w.columns, batch, lane);
            compute(sum, stage, later, 1, odd);
        }
    };
};

LAYOUT(Weight::SUMS, SUMS_OF_ROW, sizeof(Planes));

extern "C" __global__ void __launch_bounds__(THREADS, 1)
planes(Planes w, const u16 *x, const u16 *bias, u16 *out, const float *factor, u32 batch) {
    split_k(Weight{w, factor, 0}, x, bias, out, batch);
}
