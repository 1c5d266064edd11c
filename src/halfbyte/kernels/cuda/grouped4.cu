/* Grouped GEMMs of experts with NF4 and FP4 weights, see grouped.cuh and wgmma4.cuh. */

#include "warp.cuh"
#include "grouped.cuh"
#include "wgmma4.cuh"

LAYOUT(SHARED<Weight> + 16, 0, sizeof(Weight), sizeof(Grouped));

extern "C" __global__ void __launch_bounds__(LIMIT, 1)
grouped4(Weight w, const Grouped grouped, const u16 *x, float4 *partials) {
    w.shift = NESTED ? *w.offset : 0.0f;
    grouped_product(w, grouped, x, partials);
}
