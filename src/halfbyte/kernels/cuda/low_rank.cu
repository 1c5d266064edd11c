/* u = x Aᵀ for up to 64 rows of x and an adapter's few rows of A. There is little work, so the latency of loading
matters. A cluster of SPLIT blocks has 16 rows of A and 16 of x; each of its warps has every SPLIT·WARPS-th piece of 32
columns. Sums are added within a block, then sent to the block of the cluster that owns this share of u, and added in a
fixed order.

A is mma's left operand, and K is permuted: a lane's eight columns are the operands of two products.

Constants: SPLIT, WARPS, BF16 (else fp16). */

#include "warp.cuh"

constexpr u32 THREADS = 32 * WARPS, NT = 2, VALUES = 128 * NT, SHARE = VALUES / SPLIT; /* VALUES: of u, per cluster */

LAYOUT((WARPS * VALUES + SPLIT * SHARE) * 4, 0);

extern "C" __global__ void __cluster_dims__(SPLIT) __launch_bounds__(THREADS)
low_rank(const u16 *x, const u16 *a, const u16 *mask, u16 *out, u32 batch, u32 columns, u32 rank) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 block = blockIdx.x % SPLIT, tiles = rank / 16, first = (block * WARPS + warp) * 32;
    u32 tile = blockIdx.x / SPLIT % tiles * 16, begin = blockIdx.x / SPLIT / tiles * 8 * NT; /* rows of A, of x */
    float *sums = (float *)shared, *shares = sums + WARPS * VALUES; /* [WARPS, VALUES], [SPLIT, SHARE] */
    const u16 *rows = a + (u64)(tile + g) * columns + t * 8, *of_x[NT];
    cluster_arrive();
    for (u32 c = first; t == 0 && c < columns; c += 32 * SPLIT * WARPS)
        prefetch(rows + c), prefetch(rows + 8 * (u64)columns + c);
#pragma unroll
    for (u32 n = 0; n < NT; n++) /* rows beyond the batch repeat the last one; their sums are not read */
        of_x[n] = x + (u64)min(begin + 8 * n + g, batch - 1) * columns + t * 8;
    griddepcontrol_wait();

    float sum[NT][4] = {};
#pragma unroll 4
    for (u32 c = first; c < columns; c += 32 * SPLIT * WARPS) {
        uint4 low = from_global(rows + c), high = from_global(rows + 8 * (u64)columns + c), with[NT];
#pragma unroll
        for (u32 n = 0; n < NT; n++)
            with[n] = from_global(of_x[n] + c);
        const u32 one[4] = {low.x, high.x, low.y, high.y}, other[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (u32 n = 0; n < NT; n++) {
            multiply<BF16>(sum[n], one, with[n].x, with[n].y);
            multiply<BF16>(sum[n], other, with[n].z, with[n].w);
        }
    }

#pragma unroll
    for (u32 n = 0; n < NT; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            sums[warp * VALUES + (8 * n + 2 * t + i % 2) * 16 + i / 2 * 8 + g] = sum[n][i];
    __syncthreads();
    cluster_wait(SPLIT); /* all blocks have started */
    for (u32 v = threadIdx.x; v < VALUES; v += THREADS) {
        float total = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++)
            total += sums[w * VALUES + v];
        put_in_cluster(shares + block * SHARE + v % SHARE, v / SHARE, total, SPLIT);
    }
    cluster_arrive();
    cluster_wait(SPLIT);
    for (u32 at = threadIdx.x; at < SHARE; at += THREADS) {
        u32 v = block * SHARE + at, m = begin + v / 16, r = tile + v % 16;
        float total = 0;
#pragma unroll
        for (u32 i = 0; i < SPLIT; i++)
            total += shares[i * SHARE + at];
        u32 u = pair<BF16>(total, 0.0f);
        if (m < batch)
            out[m * rank + r] = (u16)(mask ? times<BF16>(u, mask[m * rank + r]) : u);
    }
}
