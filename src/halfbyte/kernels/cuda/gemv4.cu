/* y = x Wᵀ + b for a few rows of x and a 4-bit weight, on tensor cores. Compiled by NVRTC for each set of constants below.

A packed byte is two weights, neighbours along K. The table in shared memory has for each of the 256 bytes both values,
in x's dtype, as one 4-byte word; it has 32 such copies, one for each lane, so that lanes never wait for each other. An
entry takes 256 bytes: 32 words of weights, then 32 words of the nested scale's value for the same byte. So an address is
entry · 256 + lane · 4, which one PRMT puts together, and two weights cost one PRMT and one LDS.

What LDS gives is an operand of mma.m16n8k16 as it stands, W being on the left. With g = lane / 4 and t = lane % 4 a lane
holds rows g and g + 8 of the 16, and of 64 columns of K (a block, which has one scale for a row) the 16 that begin at 16 t:
8 bytes of W and 32 of x, each in its order in memory. The four products of a block see these columns in another order
than K's, W and x in the same one. fp32 sums of a block are scaled and added up in fp32.

A warp multiplies 16·RT rows by 256 columns of K (a step) at a time; a block of WR×WK warps has 16·RT·WR rows, and
its WK warps, like the S blocks of a cluster, take turns over the steps. Each warp copies its steps to shared memory ahead,
asynchronously. At the end of a tile the sums of all WK·S warps are added in a fixed order.

Constants: RT, NT (tiles of 8 rows of x), WR, WK, S, STAGES (slots of the ring, one being computed on), NESTED, BF16. */

#include "warp.cuh"

constexpr u32 WARP_ROWS = 16 * RT, ROWS = WARP_ROWS * WR, WARPS = WR * WK, THREADS = 32 * WARPS;
constexpr u32 TABLE = 65536, CODES = 128 * WARP_ROWS, SCALE = NESTED ? 4 : 16;
constexpr u32 SLOT = CODES + WARP_ROWS * (NESTED ? 8 : 16); /* codes, scales of 4 blocks a row, second scales */

/* What the table has for byte i of a word; `lane4` is lane · 4. */
template <typename T, u32 AT> __device__ __forceinline__ T look_up(u32 word, int i, u32 lane4) {
    return *(const T *)(shared + AT + __byte_perm(word, lane4, 0x5504 | i << 4));
}

struct Weight {
    const u8 *packed, *absmax; /* [N, K/2]; [N, K/64], bytes if nested, else fp32 */
    const float *second;       /* [N·K/16384] */
    u32 rows, columns;         /* N, K */
};

/* Begin to copy one step of a tile's rows `row` ... into a slot. 16-byte pieces of a row change places by the row's
   number modulo 4, so that reading 8 bytes of each of 4 rows takes every bank once. */
__device__ __forceinline__ void fetch(const Weight &w, u8 *slot, u32 row, u32 step, u32 lane) {
    u32 at = lane / 8, piece = lane % 8;
#pragma unroll
    for (u32 i = 0; i < WARP_ROWS; i += 4) {
        u32 r = row + i + at;
        const u8 *from = w.packed + (u64)r * (w.columns / 2) + step * 128 + piece * 16;
        copy<16>(slot + (i + at) * 128 + (piece ^ (at & 3) << 1) * 16, r < w.rows ? from : w.packed, r < w.rows);
    }
#pragma unroll
    for (u32 i = lane; i < WARP_ROWS; i += 32) {
        u64 block = (u64)(row + i) * (w.columns / 64) + step * 4;
        bool inside = row + i < w.rows;
        block = inside ? block : 0;
        copy<SCALE>(slot + CODES + i * SCALE, w.absmax + block * (SCALE / 4), inside);
        if (NESTED)
            copy<4>(slot + CODES + WARP_ROWS * 4 + i * 4, w.second + block / 256, inside);
    }
}

__device__ __forceinline__ void build_table(const float *codebook, const float *code) {
    for (u32 i = threadIdx.x; i < TABLE / 16; i += THREADS) { /* 8 pieces of weights, 8 of scales to an entry */
        u32 entry = i / 16, word = 0;
        if (i % 16 < 8)
            word = pair<BF16>(codebook[entry >> 4], codebook[entry & 15]);
        else if (NESTED)
            word = __float_as_uint(code[entry]);
        ((uint4 *)shared)[i] = make_uint4(word, word, word, word);
    }
}

/* The scale of block b of row `row` of the slot. */
__device__ __forceinline__ float scale_of(const u8 *slot, u32 row, int b, float offset, u32 lane4) {
    if (!NESTED)
        return *(const float *)(slot + CODES + row * 16 + b * 4);
    u32 four = *(const u32 *)(slot + CODES + row * 4);
    float second = *(const float *)(slot + CODES + WARP_ROWS * 4 + row * 4);
    return look_up<float, 128>(four, b, lane4) * second + offset;
}

/* Add a step's products to `sum`. `x` is this lane's first value of row g of x in this step. */
__device__ __forceinline__ void compute(
    float (&sum)[RT][NT][4], const u8 *slot, const u16 *x, u32 columns, u32 batch, float offset, u32 lane) {
    u32 g = lane / 4, t = lane % 4, lane4 = lane * 4;
    const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll(NT *RT < 8 ? 4 : 1)
    for (int b = 0; b < 4; b++) {
        u32 a[RT][4][4];
        float scale[RT][2];
        const u8 *codes = slot + g * 128 + ((b ^ g & 3) << 5) + t * 8;
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) { /* rows g, then g + 8 */
                scale[r][half] = scale_of(slot, 16 * r + g + 8 * half, b, offset, lane4);
                uint2 word = *(const uint2 *)(codes + r * 2048 + half * 1024);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    a[r][i / 2][half + i % 2 * 2] = look_up<u32, 0>(word.x, i, lane4);
                    a[r][2 + i / 2][half + i % 2 * 2] = look_up<u32, 0>(word.y, i, lane4);
                }
            }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 *from = (const uint4 *)(x + (u64)(8 * n) * columns + b * 64);
            bool inside = 8 * n + g < batch;
            uint4 x0 = inside ? __ldg(from) : none, x1 = inside ? __ldg(from + 1) : none;
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

/* Sums [warp of WK, row of x, row of the tile] in shared memory; then y, shared among the cluster's threads. */
__device__ __forceinline__ void finish(
    const float (&sum)[RT][NT][4], float *sums, u16 *out, const u16 *bias, u32 row, u32 rows,
    u32 batch, u32 rank, u32 warp, u32 lane) {
    u32 at = warp % WR * WARP_ROWS + lane / 4;
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                if (m < batch)
                    sums[(warp / WR * batch + m) * ROWS + at + 16 * r + i / 2 * 8] = sum[r][n][i];
            }
    all_arrive<S>();
    for (u32 i = rank * THREADS + threadIdx.x; i < batch * ROWS; i += S * THREADS) {
        u32 n = row + i % ROWS;
        if (n < rows) {
            float total = bias ? number<BF16>(bias[n]) : 0.0f;
#pragma unroll
            for (u32 s = 0; s < S; s++)
#pragma unroll
                for (u32 k = 0; k < WK; k++)
                    total += of_block<S>(sums + k * batch * ROWS + i, s);
            out[(u64)(i / ROWS) * rows + n] = (u16)pair<BF16>(total, 0.0f);
        }
    }
    all_arrive<S>(); /* nobody overwrites, or leaves with, sums that are still read */
}

extern "C" __global__ void
#if S > 1
__cluster_dims__(S, 1, 1)
#endif
__launch_bounds__(THREADS, 1) gemv4(
    Weight w, const float *code, const float *offset_at, const float *codebook, const u16 *x,
    const u16 *bias, u16 *out, u32 batch) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % S;
    u32 tiles = (w.rows + ROWS - 1) / ROWS, steps = w.columns / 256, clusters = gridDim.x / S;
    u32 first = rank * WK + warp / WR, stride = S * WK, warp_row = warp % WR * WARP_ROWS;
    u8 *ring = shared + TABLE + warp * STAGES * SLOT;
    float *sums = (float *)(shared + TABLE + WARPS * STAGES * SLOT);

    u32 next_tile = first < steps ? blockIdx.x / S : tiles, next_step = first, filled = 0;
    auto fetch_next = [&] {
        if (next_tile < tiles) {
            fetch(w, ring + filled * SLOT, next_tile * ROWS + warp_row, next_step, lane);
            next_step += stride;
            if (next_step >= steps)
                next_step = first, next_tile += clusters;
        }
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        commit();
    };
    for (int i = 0; i < STAGES - 1; i++)
        fetch_next();
    build_table(codebook, code);
    float offset = NESTED ? *offset_at : 0.0f;
    __syncthreads();

    u32 stage = 0;
    const u16 *x_lane = x + (u64)(lane / 4) * w.columns + lane % 4 * 16;
    for (u32 tile = blockIdx.x / S; tile < tiles; tile += clusters) {
        float sum[RT][NT][4] = {};
        for (u32 step = first; step < steps; step += stride) {
            wait<STAGES - 2>();
            __syncwarp(); /* every lane's copies are there, and every lane has read the slot that is filled next */
            fetch_next();
            compute(sum, ring + stage * SLOT, x_lane + step * 256, w.columns, batch, offset, lane);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        finish(sum, sums, out, bias, tile * ROWS, w.rows, batch, rank, warp, lane);
    }
}
