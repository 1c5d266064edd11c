/* The functions of halfbyte/kernels/cuda/matrix.cuh on a CPU; lanes exchange words as in multiply() of warp.cuh. */

#pragma once

#include "warp.cuh"

const u8 *row_of(u32 lane) {
    const u8 *row;
    memcpy(&row, fibers[current->number / 32 * 32 + lane]->a, sizeof row);
    return row;
}
u32 two(const u8 *first, const u8 *second) {
    u16 low, high;
    memcpy(&low, first, 2), memcpy(&high, second, 2);
    return low | (u32)high << 16;
}
void load(u32 (&m)[4], const u8 *row, bool turn) {
    if ((uintptr_t)row % 16)
        fprintf(stderr, "a row of a matrix is not aligned\n"), abort();
    memcpy(current->a, &row, sizeof row);
    __syncwarp();
    u32 g = current->number % 32 / 4, t = current->number % 4;
    for (u32 i = 0; i < 4; i++)
        m[i] = turn ? two(row_of(8 * i + 2 * t) + 2 * g, row_of(8 * i + 2 * t + 1) + 2 * g)
                    : two(row_of(8 * i + g) + 4 * t, row_of(8 * i + g) + 4 * t + 2);
    __syncwarp();
}
void load_matrices(u32 (&m)[4], const u8 *row) { load(m, row, false); }
void load_matrices_transposed(u32 (&m)[4], const u8 *row) { load(m, row, true); }

u32 transpose(u32 matrix) {
    current->b[0] = matrix;
    __syncwarp();
    u32 warp = current->number / 32 * 32, g = current->number % 32 / 4, t = current->number % 4;
    u32 other = 0;
    for (u32 i = 0; i < 2; i++) /* number g of row 2t + i */
        other |= (fibers[warp + (2 * t + i) * 4 + g / 2]->b[0] >> g % 2 * 16 & 0xffff) << 16 * i;
    __syncwarp();
    return other;
}

template <bool BFLOAT> void multiply_from_zero(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    d[0] = d[1] = d[2] = d[3] = 0;
    multiply<BFLOAT>(d, a, b0, b1);
}

float exp2_approx(float x) { return std::exp2(x); }
float rcp_approx(float x) { return 1 / x; }
float larger(float magnitude, float x) {
    return x != x || magnitude != magnitude ? NAN : std::fmax(magnitude, std::fabs(x));
}
void raise(float *to, float value) { *to = std::fmax(*to, value); }

/* Numbers of three bits of mantissa from 2^-6 to 448, or two from 2^-14 to 57344, and subnormals. */
template <bool E5M2> u32 float8(float value) {
    u32 mantissa = E5M2 ? 2 : 3;
    float smallest = E5M2 ? 0x1p-14f : 0x1p-6f, size = std::fmin(std::fabs(value), E5M2 ? 57344.0f : 448.0f);
    u32 sign = std::signbit(value) << 7;
    if (size < smallest)
        return sign | (u32)std::nearbyint(size / smallest * (1 << mantissa));
    u32 bits = __float_as_uint(size / smallest), shift = 23 - mantissa;
    bits = (bits + (1 << shift - 1) - 1 + (bits >> shift & 1)) >> shift;
    return sign | bits - (126 << mantissa); /* 1 has exponent 127, the smallest normal number 1 */
}
template <bool E5M2> u32 float8(float first, float second) { return float8<E5M2>(first) | float8<E5M2>(second) << 8; }

void store(void *pointer, uint2 value) { *(uint2 *)pointer = value; }
