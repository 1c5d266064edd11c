/* Conversion of sixteen fp32, bf16 or fp16 values in memory to a vector of floats, and back. */

#ifndef HALFBYTE_VALUES
#define HALFBYTE_VALUES

#include <stdint.h>
#include <string.h>

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h32v __attribute__((vector_size(64)));
typedef uint16_t h16v __attribute__((vector_size(32)));
typedef _Float16 half16v __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

enum { FP32, BF16, FP16 };

/* Store sixteen values, or the first `count`, to out[at...] in `dtype`; fast if the arguments are constants. */
INLINE void store_values(void *out, int64_t at, f16v values, int dtype, int count) {
    if (dtype == FP32) {
        memcpy((float *)out + at, &values, (size_t)count * 4);
    } else if (dtype == BF16) { /* the high half, rounded to nearest even; the values are finite */
        u16v bits = (u16v)values;
        h32v halves = (h32v)(bits + 0x7FFF + ((bits >> 16) & 1));
        h16v high = __builtin_shufflevector(halves, halves, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        memcpy((uint16_t *)out + at, &high, (size_t)count * 2);
    } else {
        half16v half = __builtin_convertvector(values, half16v);
        memcpy((uint16_t *)out + at, &half, (size_t)count * 2);
    }
}

INLINE f16v load_values(const void *in, int64_t at, int dtype, int count) {
    f16v values = {0};
    if (dtype == FP32) {
        memcpy(&values, (const float *)in + at, (size_t)count * 4);
        return values;
    }
    h16v raw = {0}, zero = {0};
    memcpy(&raw, (const uint16_t *)in + at, (size_t)count * 2);
    if (dtype == FP16) return __builtin_convertvector((half16v)raw, f16v);
    h32v wide = __builtin_shufflevector(zero, raw, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25,
                                        10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return (f16v)wide;
}

#endif
