/* CPU kernels of halfbyte.formats.bitplane and halfbyte.formats.hqq: 32 codes at a time, in loops that GCC and Clang vectorize.

   Scales and zeros are fp32, one for each `group` blocks. Each call processes the blocks [first, last), so threads
   share nothing. Compile without contraction: (level - zero) is rounded, then its product with the scale. */

#include <stdint.h>
#include <string.h>

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));

#define INLINE static inline __attribute__((always_inline))

enum { FP32, BF16, FP16 };
enum { BLOCK = 32 };

/* Store the first `count` of 32 values to out[at...] in `dtype`. */
INLINE void store(void *out, int64_t at, const float *values, int dtype, int count) {
    if (dtype == FP32) {
        memcpy((float *)out + at, values, (size_t)count * 4);
    } else if (dtype == BF16) { /* the high half, rounded to nearest even; the values are not NaN */
        uint32_t bits[BLOCK];
        uint16_t high[BLOCK];
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < BLOCK; i++) high[i] = (uint16_t)((bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) >> 16);
        memcpy((uint16_t *)out + at, high, (size_t)count * 2);
    } else {
        _Float16 half[BLOCK];
        for (int i = 0; i < BLOCK; i++) half[i] = (_Float16)values[i];
        memcpy((uint16_t *)out + at, half, (size_t)count * 2);
    }
}

INLINE void load(float *values, const void *in, int64_t at, int dtype) {
    if (dtype == FP32) {
        memcpy(values, (const float *)in + at, BLOCK * 4);
    } else if (dtype == BF16) {
        uint32_t bits[BLOCK];
        for (int i = 0; i < BLOCK; i++) bits[i] = (uint32_t)((const uint16_t *)in)[at + i] << 16;
        memcpy(values, bits, sizeof bits);
    } else {
        for (int i = 0; i < BLOCK; i++) values[i] = (float)((const _Float16 *)in)[at + i];
    }
}

/* values[i] = table[codes[i]] with 32 entries: a permutation of two registers where the CPU has one, never a gather. */
INLINE void lookup(float *values, const float *table, const int32_t *codes) {
#ifdef __clang__
    for (int i = 0; i < BLOCK; i++) values[i] = table[codes[i]];
#else
    f16v half[2], found;
    i16v index;
    memcpy(half, table, sizeof half);
    for (int i = 0; i < BLOCK; i += 16) {
        memcpy(&index, codes + i, sizeof index);
        found = __builtin_shuffle(half[0], half[1], index);
        memcpy(values + i, &found, sizeof found);
    }
#endif
}

INLINE void dequantize(const uint32_t *packed, int k, const float *codebook, int64_t run, const float *scales, const float *zeros,
                       int64_t group, void *out, int64_t width, int64_t blocks_per_row, int64_t first, int64_t last,
                       int dtype) {
    for (int64_t block = first; block < last; block++) {
        const uint32_t *words = packed + block * k;
        float scale = scales[block / group], zero = zeros[block / group], values[BLOCK];
        int32_t codes[BLOCK] = {0};
        for (int b = 0; b < k; b++) {
            uint32_t word = words[b];
            for (int i = 0; i < BLOCK; i++) codes[i] |= (int32_t)((word >> i) & 1) << b;
        }
        if (codebook)
            lookup(values, codebook + block / run * BLOCK, codes);
        else
            for (int i = 0; i < BLOCK; i++) values[i] = (float)codes[i];
        for (int i = 0; i < BLOCK; i++) values[i] = (values[i] - zero) * scale;
        int64_t column = block % blocks_per_row * BLOCK, left = width - column;
        if (left > 0) /* the last blocks of a row's last group may be padding only */
            store(out, block / blocks_per_row * width + column, values, dtype, left < BLOCK ? (int)left : BLOCK);
    }
}

/* codebook: 32 entries, of which 2^k are used, for each `run` blocks; NULL: codes are the values (hqq). */
void halfbyte_dequantize_planes(const uint32_t *packed, int k, const float *codebook, int64_t run, const float *scales,
                                const float *zeros, int64_t group, void *out, int64_t width, int64_t blocks_per_row,
                                int64_t first, int64_t last, int dtype) {
#define RUN(bits) \
    case bits: dequantize(packed, bits, codebook, run, scales, zeros, group, out, width, blocks_per_row, first, last, dtype); break
    switch (k) { RUN(2); RUN(3); RUN(4); RUN(5); RUN(6); RUN(8); }
#undef RUN
}

/* steps and zeros: one per block; midpoints: 2^k - 1. */
void halfbyte_quantize_planes(const void *blocks, const float *steps, const float *zeros, const float *midpoints, int k,
                              uint32_t *packed, int64_t first, int64_t last, int dtype) {
    for (int64_t block = first; block < last; block++) {
        float values[BLOCK];
        uint32_t codes[BLOCK] = {0};
        load(values, blocks, block * BLOCK, dtype);
        for (int i = 0; i < BLOCK; i++) values[i] = values[i] / steps[block] + zeros[block];
        for (int rank = 0; rank < (1 << k) - 1; rank++)
            for (int i = 0; i < BLOCK; i++) codes[i] += values[i] > midpoints[rank];
        for (int b = 0; b < k; b++) {
            uint32_t word = 0;
            for (int i = 0; i < BLOCK; i++) word |= ((codes[i] >> b) & 1) << i;
            packed[block * k + b] = word;
        }
    }
}
