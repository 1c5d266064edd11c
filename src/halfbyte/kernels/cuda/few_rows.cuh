/* y = factor · x Wᵀ + b for up to 64 rows of x on tensor cores, for packed formats of W, on GPUs from Turing on.

W is the left operand of mma.m16n8k16 and x the right one: a warp has RT tiles of 16 rows of W and NT tiles of 8 rows of
x. The order of K within a product is free, so each lane reads its own words of W as they are stored, and the values of x
that belong to them. Nothing is exchanged between lanes, and weights do not pass through shared memory, of which only
tables and sums need some: the kernel fits Turing's 64 KiB.

Work is measured in units of 256 columns of a tile, which have two chunks of 128. Words are loaded two chunks in advance,
into registers. Integer instructions are the bottleneck, so addresses are incremented and not computed anew, and the
scales of a unit are loaded at once. Before griddepcontrol_wait() only weights are read. Two kernels share this:
few_rows_whole.cuh for up to 8 rows, few_rows_split.cuh for more.

A format is a class W with the weight's shape (rows, a multiple of 16, and columns, of 256), and

    Codes, Scales    a lane's words of a chunk, of LANE bytes, and its scales of a unit
    Source<COUNT>    addresses of a lane's words in COUNT tiles: seek, load, load_scales; next skips to a later unit;
                     copy and take load a chunk of one tile through shared memory
    TABLE, build     bytes of tables at the start of shared memory; fills them and reads single numbers
    GAPS             whether entries of 256 bytes of the table use 128, so that sums and more numbers are between them
    X, x_offset      columns between the x of neighbouring lanes of a row; column of the 8 values of word j
    operands         decodes word j: left operands of two products, with columns (0, 1), (2, 3), (4, 5), (6, 7)
    RUNS, scale      parts of a chunk whose sums are scaled by two numbers, for rows g and g + 8 of the left operand
                     (g = lane / 4); 0: operands are scaled
    OWN              with ONE row of x, RUNS of which each lane's columns have scales of their own
    row              row of W, of a tile's 16, that is row r of the left operand
    factor           of all sums

A source ends with PRODUCT(its name, W), which defines the kernel. decode.cu takes only the class.

One row of x needs one of a right operand's eight columns. With ONE it is in four: column 2t has the values of lanes t
(lane % 4), and zeros for the others. A lane's sums of column 2t are then those of its own columns, which need not share a
scale with other lanes': sums are scaled in fp32, and not each pair of weights. This is the scheme of mma_gemv.cuh.

Constants: NT, RT, WR, WK, BF16 (else fp16, the only one before Ampere), SPLIT (which kernel), ONE; LAYERS: in decode.cu. */

#pragma once

#include "warp.cuh"

#ifndef LAYERS
#define LAYERS 0
#endif

constexpr u32 ROWS = 16, CHUNK = 128, UNIT = 2 * CHUNK, WARPS = WR * WK, THREADS = 32 * WARPS;

/* Products of two pairs of numbers. Before Hopper, bf16 has them only with a sum; a sum with -0 changes nothing. */
__device__ __forceinline__ u32 scaled(u32 a, u32 b) { return fused<BF16>(a, b, 0x80008000); }

/* fp16 is too narrow for the smallest scales of some formats: there, scales times 256 are used, and sums divided by it.
An error is then as small as in a weight rounded to fp16, whose values must be below 256. */
constexpr float ENLARGED = BF16 ? 1.0f : 256.0f;

/* Offset of word i of the gaps between a table's entries. */
constexpr __device__ __forceinline__ u32 gap(u32 i) { return i / 32 * 256 + 128 + i % 32 * 4; }

/* Add the products of a chunk to the sums. `weight(r)`: the weight of tile r; `right(n, j)`: the 8 values of word j of a
lane's row of x in tile n. */
template <typename W, typename Weights, typename Right>
__device__ __forceinline__ void multiply_chunk(
    float (&total)[RT][NT][4], Weights weight, const typename W::Codes (&codes)[RT],
    const typename W::Scales (&scales)[RT], int chunk, u32 lane, Right right) {
    constexpr int RUNS = ONE && W::OWN ? W::OWN : W::RUNS;
    float run[RT][NT][4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; n++)
            b[n] = right(n, j);
#pragma unroll
        for (int r = 0; r < RT; r++) {
            u32 a[2][4];
            const W &w = weight(r);
            w.operands(a, codes[r], scales[r], chunk, j, lane);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float(&sum)[4] = RUNS ? run[r][n] : total[r][n];
                multiply<BF16>(sum, a[0], b[n].x, b[n].y);
                multiply<BF16>(sum, a[1], b[n].z, b[n].w);
            }
            if (RUNS && (j + 1) % (4 / (RUNS ? RUNS : 1)) == 0) {
                float scale[2];
                weight(r).scale(scale, scales[r], chunk, j, lane);
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        total[r][n][i] += scale[i / 2] * run[r][n][i], run[r][n][i] = 0;
            }
        }
    }
}

/* Whether a lane has values of x in tile n. */
template <typename W> __device__ __forceinline__ bool has_x(u32 lane, int n, u32 batch) {
    return ONE && W::OWN ? lane / 4 == lane % 4 * 2 : 8 * n + lane / 4 < batch;
}

/* Add the sums of four lanes, if they have columns of their own. */
template <typename W> __device__ __forceinline__ void add_lanes(float (&total)[RT][NT][4]) {
    if (ONE && W::OWN)
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                total[r][0][i] += shuffle(total[r][0][i], 1), total[r][0][i] += shuffle(total[r][0][i], 2);
}

/* Formats with two columns a byte, which a table of 64 KiB decodes: each lane has its own copy of an entry, to avoid bank
conflicts. */
struct ByPairs {
    static constexpr bool GAPS = true;
    static constexpr u32 TABLE = 65536;

    /* Entry `byte` of the table: the pair of numbers of its two columns. */
    static __device__ __forceinline__ void put(u32 byte, u32 copies, u32 pair) {
        *(uint4 *)(shared + byte * 256 + copies * 16) = make_uint4(pair, pair, pair, pair);
    }
    /* The entry of byte p of a word. */
    static __device__ __forceinline__ u32 pair_of(u32 word, int p, u32 lane) {
        return look<u32, 0>(__byte_perm(word, lane * 4, 0x5504 | p << 4));
    }
};

/* Of these, formats whose rows have their codes in sequence. */
struct ByRows : ByPairs {
    static constexpr int RUNS = 0;
    static constexpr u32 X = 32, LANE = 32;

    struct Codes {
        uint4 words[2]; /* of rows g and g + 8 */
    };
    static constexpr __device__ __forceinline__ u32 x_offset(int j) { return 8 * j; }
    static __device__ __forceinline__ u32 row(u32 r) { return r; }

    /* Left operands of two products, from word j of a lane's rows; with SCALED, times a pair of equal numbers. */
    template <bool SCALED> static __device__ __forceinline__ void
    look_up(u32 (&a)[2][4], const Codes &codes, const u32 (&scale)[2], int j, u32 lane) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 four = codes.words[half];
            u32 word = j == 0 ? four.x : j == 1 ? four.y : j == 2 ? four.z : four.w;
#pragma unroll
            for (int p = 0; p < 4; p++)
                a[p / 2][half + p % 2 * 2] = SCALED ? scaled(pair_of(word, p, lane), scale[half]) : pair_of(word, p, lane);
        }
    }
    /* Addresses of a lane's words, of rows g, g + 8, g + 16, ...; the columns of a unit. */
    template <int COUNT> struct Words {
        const u8 *at[2 * COUNT];

        __device__ __forceinline__ void seek(const u8 *packed, u32 columns, u32 top, u32 unit, u32 lane) {
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++)
                at[i] = packed + (u64)(top + lane / 4 + 8 * i) * (columns / 2) + unit * (UNIT / 2) + lane % 4 * 16;
        }
        __device__ __forceinline__ void load(Codes *codes, int chunk) const {
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++)
                codes[i / 2].words[i % 2] = read_once<uint4>(at[i] + chunk * (CHUNK / 2));
        }
        /* Of rows 2, 3, 6 and 7, the halves are exchanged, so that neighbouring lanes read from all banks. */
        __device__ __forceinline__ void copy(u8 *to, int chunk, u32 lane) const {
#pragma unroll
            for (int i = 0; i < 2; i++)
                ::copy<16>(to + i * 512 + (lane ^ lane >> 2 & 2) * 16, at[i] + chunk * (CHUNK / 2), true);
        }
        static __device__ __forceinline__ void take(Codes &codes, const u8 *from, u32 lane) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                codes.words[i] = *(const uint4 *)(from + i * 512 + (lane ^ lane >> 2 & 2) * 16);
        }
        /* The same of a lane's 16 columns of each 64. */
        static __device__ __forceinline__ void take_halves(Codes &codes, const u8 *from, u32 lane) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u8 *row = from + i * 512 + lane / 4 * 64 + lane % 4 * 8;
                u32 second = lane >> 2 & 2 ? 0 : 32;
                uint2 low = *(const uint2 *)(row + 32 - second), high = *(const uint2 *)(row + second);
                codes.words[i] = make_uint4(low.x, low.y, high.x, high.y);
            }
        }
        __device__ __forceinline__ void next(u32 units) {
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++)
                at[i] += units * (UNIT / 2);
        }
    };
};

#if defined(PRODUCT)
#elif SPLIT
#include "few_rows_split.cuh"
#else
#include "few_rows_whole.cuh"
#endif
