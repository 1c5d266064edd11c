/* y = factor · x Wᵀ + b for up to 16 rows of x on tensor cores, for packed formats of W, on GPUs from Ampere on.

W is the left operand of mma.m16n8k16 and x the right one: a warp has RT tiles of 16 rows of W and NT tiles of 8 rows of
x. The order of K within a product is free, so each lane reads its own words of W as they are stored, and the values of x
that belong to them. Nothing is exchanged between lanes, and weights do not pass through shared memory, of which only
tables and sums need some: the kernel fits devices with 100 KiB.

Work is measured in units of 256 columns of a tile, which have two chunks of 128. A block has WR groups of WK warps. The
warps of a group divide the units of a tile among them and add their sums in a fixed order. Words and values of x are
loaded two chunks in advance, into registers. Integer instructions are the bottleneck, so addresses are incremented and
not computed anew, and the scales of a unit are loaded at once. Before griddepcontrol_wait() only weights are read.

A format is a class W with the weight's shape (rows, a multiple of 16, and columns, of 256), and

    Codes, Scales    a lane's words of a chunk, and its scales of a unit
    Source           addresses of a lane's words in all RT tiles: seek, load, load_scales, next
    TABLE, build     bytes of tables at the start of shared memory; fills them and reads single numbers
    X, x_offset      columns between the x of neighbouring lanes of a row; column of the 8 values of word j
    NIBBLES          whether word j decodes to columns (0, 4), (1, 5), (2, 6), (3, 7), or to (0, 1), (2, 3), ...
    operands         decodes word j: left operands of two products
    RUNS, scale      parts of a chunk whose sums are scaled by two numbers, for rows g and g + 8 of the left operand
                     (g = lane / 4); 0: operands are scaled
    row              row of W, of a tile's 16, that is row r of the left operand
    factor           of all sums

Constants: NT, RT, WR, WK, BF16 (else fp16). */

#pragma once

#include "warp.cuh"

constexpr u32 ROWS = 16, CHUNK = 128, UNIT = 2 * CHUNK, WARPS = WR * WK, THREADS = 32 * WARPS;

#define FEW_ROWS __launch_bounds__(THREADS, NT *RT > 2 ? 256 / THREADS : 512 / THREADS)

/* Products of two pairs of numbers. Before Hopper, bf16 has them only with a sum; a sum with -0 changes nothing. */
__device__ __forceinline__ u32 scaled(u32 a, u32 b) { return fused<BF16>(a, b, 0x80008000); }

/* Eight neighbouring values of x as right operands of two products. */
template <bool NIBBLES> __device__ __forceinline__ void right_operands(u32 (&b)[4], uint4 eight) {
    if (NIBBLES) {
        b[0] = __byte_perm(eight.x, eight.z, 0x5410), b[1] = __byte_perm(eight.x, eight.z, 0x7632);
        b[2] = __byte_perm(eight.y, eight.w, 0x5410), b[3] = __byte_perm(eight.y, eight.w, 0x7632);
    } else
        b[0] = eight.x, b[1] = eight.y, b[2] = eight.z, b[3] = eight.w;
}

/* The share of a warp: units first to first + count of each of its group's tiles. */
struct Share {
    u32 group, split, first, count;

    __device__ __forceinline__ Share(u32 warp, u32 units) : group(warp / WK), split(warp % WK) {
        u32 most = (units + WK - 1) / WK;
        first = min(split * most, units), count = min(most, units - first);
    }
};

/* Add the sums of a group's warps and write y. `top`: the first row of the group's tiles. */
template <typename W>
__device__ __forceinline__ void finish(
    float (&total)[RT][NT][4], const Share &share, const W &w, u16 *out, const u16 *bias, u32 batch, u32 top, u32 lane) {
    u32 each = batch * ROWS * RT;
    float *sums = (float *)(shared + W::TABLE) + share.group * WK * each;
    group_sync<32 * WK>(share.group); /* the sums of the last tiles have been read */
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                if (m < batch)
                    sums[share.split * each + (m * RT + r) * ROWS + W::row(lane / 4 + i / 2 * 8)] = total[r][n][i];
                total[r][n][i] = 0;
            }
    group_sync<32 * WK>(share.group);
    for (u32 i = share.split * 32 + lane; i < each; i += 32 * WK) {
        u32 row = top + i % (ROWS * RT);
        float sum = 0;
#pragma unroll
        for (u32 k = 0; k < WK; k++)
            sum += sums[k * each + i];
        float shift = bias ? number<BF16>(bias[row]) : 0.0f;
        out[(u64)(i / (ROWS * RT)) * w.rows + row] = (u16)pair<BF16>(sum * w.factor() + shift, 0.0f);
    }
}

/* The kernel. */
template <typename W>
__device__ __forceinline__ void few_rows(W w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    u32 lane = threadIdx.x % 32, g = lane / 4;
    const Share share(uniform(threadIdx.x / 32), w.columns / UNIT);
    u32 tiles = (w.rows + ROWS * RT - 1) / (ROWS * RT), stride = gridDim.x * WR;
    u32 tile = share.group * gridDim.x + blockIdx.x;
    bool busy = share.count && tile < tiles;

    typename W::Codes codes[2][RT];
    typename W::Scales scales[RT], later[RT];
    typename W::Source source;
    auto seek = [&](u32 to) { /* the last tiles are moved back to end at row N: rows in two tiles get equal values */
        source.seek(w, min(to * ROWS * RT, w.rows - ROWS * RT), share.first, lane);
    };
    seek(tile);
    if (busy)
        source.load_scales(scales, w), source.load(codes[0], w, 0), source.load(codes[1], w, 1);
    if (W::TABLE) {
        w.build();
        __syncthreads();
    }
    griddepcontrol_wait();

    const u16 *begin = x + (u64)g * w.columns + share.first * UNIT + lane % 4 * W::X, *from = begin;
    u64 apart = 8 * (u64)w.columns;
    uint4 values[2][NT][4] = {};
    auto load_x = [&](int chunk) {
#pragma unroll
        for (int n = 0; n < NT; n++)
            if (8 * n + g < batch)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    values[chunk][n][j] = from_global(from + n * apart + chunk * CHUNK + W::x_offset(j));
    };
    if (busy)
        load_x(0), load_x(1);

    float total[RT][NT][4] = {};
    auto multiply_chunk = [&](int chunk) {
        float run[RT][NT][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 b[NT][4];
#pragma unroll
            for (int n = 0; n < NT; n++)
                right_operands<W::NIBBLES>(b[n], values[chunk][n][j]);
#pragma unroll
            for (int r = 0; r < RT; r++) {
                u32 a[2][4];
                w.operands(a, codes[chunk][r], scales[r], chunk, j, lane);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float(&sum)[4] = W::RUNS ? run[r][n] : total[r][n];
                    multiply<BF16>(sum, a[0], b[n][0], b[n][1]);
                    multiply<BF16>(sum, a[1], b[n][2], b[n][3]);
                }
                if (W::RUNS && (j + 1) % (4 / (W::RUNS ? W::RUNS : 1)) == 0) {
                    float scale[2];
                    w.scale(scale, scales[r], chunk, j);
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            total[r][n][i] += scale[i / 2] * run[r][n][i], run[r][n][i] = 0;
                }
            }
        }
    };

    for (; tile < tiles; tile += stride) {
        for (u32 left = share.count; left; left--) {
            bool more = left > 1 || tile + stride < tiles;
            multiply_chunk(0);
            if (left > 1)
                source.next(w), from += UNIT;
            else if (more)
                seek(tile + stride), from = begin;
            if (more)
                source.load_scales(later, w), source.load(codes[0], w, 0), load_x(0);
            multiply_chunk(1);
            if (more)
                source.load(codes[1], w, 1), load_x(1);
#pragma unroll
            for (int r = 0; r < RT; r++)
                scales[r] = later[r];
        }
        finish(total, share, w, out, bias, batch, min(tile * ROWS * RT, w.rows - ROWS * RT), lane);
    }
}

/* Formats whose rows have their codes in sequence, two columns a byte, which a table of 64 KiB decodes: each lane has
its own copy of an entry, to avoid bank conflicts. */
struct ByRows {
    static constexpr bool NIBBLES = false;
    static constexpr int RUNS = 0;
    static constexpr u32 BYTES = 65536, X = 32; /* bytes of the table */

    struct Codes {
        uint4 words[2]; /* of rows g and g + 8 */
    };
    static constexpr __device__ __forceinline__ u32 x_offset(int j) { return 8 * j; }
    static __device__ __forceinline__ u32 row(u32 r) { return r; }

    /* Entry `byte` of the table: the pair of numbers of its two columns. */
    static __device__ __forceinline__ void put(u32 byte, u32 copies, u32 pair) {
        *(uint4 *)(shared + byte * 256 + copies * 16) = make_uint4(pair, pair, pair, pair);
    }
    /* Left operands of two products, from word j of a lane's rows, scaled by a pair of equal numbers for each. */
    static __device__ __forceinline__ void
    look_up(u32 (&a)[2][4], const Codes &codes, const u32 (&scale)[2], int j, u32 lane) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 four = codes.words[half];
            u32 word = j == 0 ? four.x : j == 1 ? four.y : j == 2 ? four.z : four.w;
#pragma unroll
            for (int p = 0; p < 4; p++) {
                u32 numbers = look<u32, 0>(__byte_perm(word, lane * 4, 0x5504 | p << 4));
                a[p / 2][half + p % 2 * 2] = scaled(numbers, scale[half]);
            }
        }
    }
    /* Addresses of a lane's words, of rows g, g + 8, g + 16, ...; the columns of a unit. */
    struct Words {
        const u8 *at[2 * RT];

        __device__ __forceinline__ void seek(const u8 *packed, u32 columns, u32 top, u32 unit, u32 lane) {
#pragma unroll
            for (int i = 0; i < 2 * RT; i++)
                at[i] = packed + (u64)(top + lane / 4 + 8 * i) * (columns / 2) + unit * (UNIT / 2) + lane % 4 * 16;
        }
        __device__ __forceinline__ void load(Codes (&codes)[RT], int chunk) const {
#pragma unroll
            for (int i = 0; i < 2 * RT; i++)
                codes[i / 2].words[i % 2] = read_once<uint4>(at[i] + chunk * (CHUNK / 2));
        }
        __device__ __forceinline__ void next() {
#pragma unroll
            for (int i = 0; i < 2 * RT; i++)
                at[i] += UNIT / 2;
        }
    };
};
