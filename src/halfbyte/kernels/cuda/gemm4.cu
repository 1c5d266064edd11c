/* GEMM of up to 64 rows with NF4 and FP4 weights, see gemm.cuh and wgmma4.cuh. */

#include "warp.cuh"
#include "wgmma4.cuh"

LAYOUT(SHARED<Weight>, 0, sizeof(Parts<Weight>), sizeof(Sums));

extern "C" __global__ void __launch_bounds__(BOUND, 1) gemm4(const Parts<Weight> all, const u16 *x, u32 batch) {
    const Part<Weight> &part = all.parts[part_of_block(all.parts)];
    Weight w = part.w;
    w.shift = NESTED ? *w.offset : 0.0f;
    product(w, x, part.partials, batch, blockIdx.x - part.begin, part.blocks);
}
