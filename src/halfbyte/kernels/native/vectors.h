/* Vectors of sixteen floats in GCC's and Clang's extensions; lengths are multiples of 16 unless noted. */

#ifndef HALFBYTE_VECTORS
#define HALFBYTE_VECTORS

#include <math.h>

#include "values.h"

#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif

INLINE f16v load(const float *from) {
    f16v values;
    memcpy(&values, from, 64);
    return values;
}

INLINE void store(float *to, f16v values) { memcpy(to, &values, 64); }

INLINE f16v choose(i16v mask, f16v yes, f16v no) { return (f16v)(((i16v)yes & mask) | ((i16v)no & ~mask)); }

/* Make NaN a quiet NaN, which `store_values` preserves. */
INLINE f16v quiet(f16v v) { return choose(v != v, (f16v)((u16v){0} + 0x7fc00000u), v); }

INLINE float sum(f16v v) {
    typedef float f8v __attribute__((vector_size(32)));
    typedef float f4v __attribute__((vector_size(16)));
    f8v h[2];
    memcpy(h, &v, 64);
    f8v eight = h[0] + h[1];
    f4v q[2];
    memcpy(q, &eight, 32);
    f4v four = q[0] + q[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE float dot(const float *a, const float *b, int64_t length) {
    f16v total = {0};
    for (int64_t i = 0; i < length; i += 16) total += load(a + i) * load(b + i);
    return sum(total);
}

/* 32 values in bf16: those at even places, and those at odd ones. No lane changes its width, which GCC would do lane by
   lane; the other operand of a product is in this order, too (`deinterleave`). */
INLINE void halves(const uint16_t *from, f16v *even, f16v *odd) {
    u16v pairs;
    memcpy(&pairs, from, 64);
    *even = (f16v)(pairs << 16);
    *odd = (f16v)(pairs & 0xffff0000u);
}

/* Reorder x in place: of each 32 values those at even places first; or back. */
static void deinterleave(float *x, int64_t length, int back) {
    for (int64_t at = 0; at < length; at += 32) {
        float copy[32];
        memcpy(copy, x + at, sizeof copy);
        for (int i = 0; i < 32; i++) {
            int to = i % 2 * 16 + i / 2;
            if (back) x[at + i] = copy[to];
            else x[at + to] = copy[i];
        }
    }
}

INLINE float dot_bf16(const float *deinterleaved, const uint16_t *b, int64_t length) {
    f16v total[2] = {{0}}, even, odd;
    for (int64_t i = 0; i < length; i += 32) {
        halves(b + i, &even, &odd);
        total[0] += load(deinterleaved + i) * even;
        total[1] += load(deinterleaved + i + 16) * odd;
    }
    return sum(total[0] + total[1]);
}

INLINE uint16_t to_bf16(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* exp(x) for x ≤ 0, to 1 or 2 ulp; 0 below the least normal result. */
INLINE f16v exp_of(f16v x) {
    f16v n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    f16v r = x - n * 0.693145752f - n * 1.42860677e-6f; /* ln 2 in two parts */
    f16v p = 1.0f / 5040 * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    i16v normal = x > -87.0f;
    i16v power = (__builtin_convertvector(n, i16v) + 127) << 23;
    return (f16v)((i16v)(p * (f16v)power) & normal);
}

#endif
