/* Products with NF4 and FP4 weights; see weight4.cuh. */

#include "weight4.cuh"

LAYOUT(Weight::TABLE + WARPS * STAGES * Weight::SLOT, SUMS_OF_ROW, sizeof(Weight));

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemv4(Weight w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    w.shift[0] = w.shift[1] = NESTED ? *w.offset : 0.0f;
    product(w, x, bias, out, 1.0f, batch);
}
