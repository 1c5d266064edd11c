/* More PTX of warp.cuh's kind: 8×8 matrices of 16-bit numbers in a warp, special functions, FP8 in pairs. Lane
   g * 4 + t holds numbers 2t and 2t + 1 of a matrix's row g, as in the operands and sums of multiply(). */

#pragma once

#include "warp.cuh"

/* Load four matrices from shared memory, whose 32 rows of 16 bytes the 32 lanes point to; plain and transposed. */
__device__ __forceinline__ void load_matrices(u32 (&m)[4], const u8 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address(row)) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], const u8 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address(row)) : "memory");
}

/* Transpose a matrix. */
__device__ __forceinline__ u32 transpose(u32 matrix) {
    u32 other;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(matrix));
    return other;
}

/* d = a b; multiply() accumulates. */
template <bool BFLOAT>
__device__ __forceinline__ void multiply_from_zero(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (BFLOAT)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The larger of a magnitude and |x|; NaN if either is NaN. */
__device__ __forceinline__ float larger(float magnitude, float x) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(magnitude), "f"(fabsf(x)));
    return y;
}

/* Atomically raise a non-negative number in global memory to at least `value`. */
__device__ __forceinline__ void raise(float *to, float value) {
    asm volatile("red.global.max.s32 [%0], %1;" ::"l"(to), "r"(__float_as_int(value)) : "memory");
}

/* Two floats in FP8, E5M2 or E4M3, saturating; the first in the low byte. */
template <bool E5M2> __device__ __forceinline__ u32 float8(float first, float second) {
    u16 both;
    if (E5M2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
}

/* Store 8 bytes to global memory, evict-first. */
__device__ __forceinline__ void store(void *pointer, uint2 v) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(v.x), "r"(v.y) : "memory");
}
