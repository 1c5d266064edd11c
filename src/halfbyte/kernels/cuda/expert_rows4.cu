/* The experts' MLP for the few tokens of a decoding step, with NF4 and FP4 weights in blocks of 64. Two kernels: the
first (DOWN 0) computes h = silu(gate) · up for each of a token's top_k experts, the second (DOWN 1) the weighted sum of
their down projections.

The scheme is mma_gemv.cuh's for one row of x: W is the left operand, and columns of the right one are slices of K. A
unit is 16 rows of an expert by 256 columns. The first kernel takes 8 rows of gate and 8 of up, so that a lane has both
values of a pair. The second iterates over a token's experts and weights their sums as they are added. A group of WK
warps has a tile of rows; its warps alternate over units and load AHEAD units in advance. Codes are loaded directly to
registers, since no other warp needs them: a lane has two slices, one block. The first kernel rounds its sums to x's
dtype, like stored gate and up.

Constants: DOWN, WR, WK, AHEAD, NESTED, BF16 (else fp16), ORIGIN. */

#include "warp.cuh"

constexpr u32 THREADS = 32 * WR * WK;

#include "table4.cuh"

struct Chosen {
    const u16 *x;             /* [tokens, columns], or [tokens · top_k, columns] where DOWN */
    const long long *experts; /* [tokens, top_k] */
    const void *weights;      /* [tokens, top_k], where DOWN */
    u16 *out;                 /* [tokens · top_k, rows / 2], or [tokens, rows] where DOWN */
    u32 tokens, top_k, wide;  /* `wide`: weights are fp32 */

    __device__ __forceinline__ float weight(u32 slot) const {
        return wide ? ((const float *)weights)[slot] : number<BF16>(((const u16 *)weights)[slot]);
    }
};

/* A lane's part of a unit: rows g and g + 8 of the tile, slices 2t and 2t + 1; slice g of x if it is one of these. */
struct Unit {
    uint4 codes[2][2];
    u32 absmax[2];
    float second[2], weight;
    const u16 *x;

    __device__ __forceinline__ void load(const Table4 &w, const Chosen &chosen, u32 tile, u32 unit, u32 lane) {
        u32 g = lane / 4, t = lane % 4, k_tiles = w.columns / 256, k_tile = unit % k_tiles, tiles = w.rows / 16;
        u32 slot = DOWN ? tile / tiles * chosen.top_k + unit / k_tiles : tile / tiles;
        u32 row = tile % tiles * (DOWN ? 16 : 8) + g, apart = DOWN ? 8 : w.rows / 2;
        u64 first = (u64)chosen.experts[slot] * w.rows + row;
#pragma unroll
        for (u32 high = 0; high < 2; high++) {
            u64 now = first + high * apart;
            const u8 *from = w.packed + now * (w.columns / 2) + k_tile * 128 + t * 32;
            codes[high][0] = from_global(from), codes[high][1] = from_global(from + 16);
            u64 block = now * (w.columns / 64) + k_tile * 4 + t;
            if (NESTED)
                absmax[high] = w.absmax[block], second[high] = w.second[block / 256];
            else
                second[high] = ((const float *)w.absmax)[block];
        }
        x = chosen.x + (u64)(DOWN ? slot : slot / chosen.top_k) * w.columns + k_tile * 256 + g * 32;
        weight = DOWN ? chosen.weight(slot) : 1.0f;
    }

    /* Add the unit's products to the sums of rows g and g + 8. */
    __device__ __forceinline__ void add_to(float (&total)[2], float shift, u32 lane) const {
        uint4 slice[4];
        u32 lane4 = lane * 4;
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            slice[i] = lane / 8 == lane % 4 ? from_global(x + 8 * i) : make_uint4(0, 0, 0, 0);
        const u32 *word[2] = {(const u32 *)codes[0], (const u32 *)codes[1]}, *right = (const u32 *)slice;
        float sum[2][4] = {};
#pragma unroll
        for (u32 j = 0; j < 8; j++) /* four columns of each slice */
#pragma unroll
            for (u32 u = 0; u < 2; u++) {
                u32 a[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    a[i] = Table4::look_up<u32, 0>(word[i % 2][4 * u + j / 2], j % 2 * 2 + i / 2, lane4);
                multiply<BF16>(sum[u], a, right[2 * j], right[2 * j + 1]);
            }
#pragma unroll
        for (u32 high = 0; high < 2; high++) {
            float scale = second[high];
            if (NESTED)
                scale = Table4::look_up<float, 128>(absmax[high], 0, lane4) * scale + shift;
            total[high] += weight * scale * (sum[0][2 * high] + sum[1][2 * high + 1]);
        }
    }
};

constexpr u32 SUMS = Table4::TABLE; /* two sets, [WR][WK][16] each */

LAYOUT(SUMS + 2 * WR * WK * 64, 0, sizeof(Table4), sizeof(Chosen));

extern "C" __global__ void __launch_bounds__(THREADS, 1) expert_rows4(Table4 w, const Chosen chosen) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / WK, own = warp % WK;
    u32 tiles = w.rows / 16 * chosen.tokens * (DOWN ? 1 : chosen.top_k);
    u32 units = w.columns / 256 * (DOWN ? chosen.top_k : 1), stride = gridDim.x * WR;
    w.build();
    __syncthreads();
    griddepcontrol_wait();
    float shift = NESTED ? *w.offset : 0.0f, *sums = (float *)(shared + SUMS) + group * WK * 16;
    u32 tile = group * gridDim.x + blockIdx.x, turn = 0;
    Unit units_ahead[AHEAD];
    u32 next_tile = tile, next = own;
    auto fetch = [&](Unit &unit) { /* load the next unit, if there is one */
        if (next_tile >= tiles || own >= units)
            return;
        unit.load(w, chosen, next_tile, next, lane);
        next += WK;
        if (next >= units)
            next = own, next_tile += stride;
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        fetch(units_ahead[i]);
    for (; tile < tiles; tile += stride, turn ^= WR * WK * 16) {
        float total[2] = {};
        for (u32 unit = own; unit < units; unit += WK) {
            units_ahead[0].add_to(total, shift, lane);
#pragma unroll
            for (u32 i = 0; i + 1 < AHEAD; i++)
                units_ahead[i] = units_ahead[i + 1];
            fetch(units_ahead[AHEAD - 1]);
        }
#pragma unroll
        for (u32 high = 0; high < 2; high++) {
            total[high] += shuffle(total[high], 1);
            total[high] += shuffle(total[high], 2);
            if (lane % 4 == 0)
                sums[turn + own * 16 + high * 8 + lane / 4] = total[high];
        }
        group_sync<32 * WK>(group);
        u32 i = own * 32 + lane, each = DOWN ? 16 : 8;
        if (i < each) {
            float sum[2] = {};
            for (u32 k = 0; k < WK; k++)
                sum[0] += sums[turn + k * 16 + i], sum[1] += sums[turn + k * 16 + (i ^ 8)];
            if (!DOWN) {
                float gate = number<BF16>(pair<BF16>(sum[0], 0.0f)), up = number<BF16>(pair<BF16>(sum[1], 0.0f));
                sum[0] = gate / (1 + expf(-gate)) * up;
            }
            chosen.out[(u64)tile * each + i] = (u16)pair<BF16>(sum[0], 0.0f);
        }
    }
}
