/* GEMM of up to 64 rows with NF4 and FP4 weights, see gemm.cuh and wgmma4.cuh. */

#include "warp.cuh"
#include "wgmma4.cuh"

LAYOUT(SHARED<Weight>, 0, sizeof(Weight), sizeof(Term));

extern "C" __global__ void __launch_bounds__(BOUND, 1) gemm4(Weight w, const u16 *x, float4 *partials, u32 batch) {
    w.shift = NESTED ? *w.offset : 0.0f;
    product(w, x, partials, batch);
}
