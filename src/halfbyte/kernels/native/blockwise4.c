/* CPU twins of halfbyte.ops.blockwise4 in portable vector C (GCC and Clang vector extensions, no intrinsics).

   Sixteen values at a time: a 16-entry fp32 table is one vector register, so a lookup is one permute where the CPU has
   it (AVX-512's vpermps). Each call does the blocks [first, last), so that threads share nothing. Build without
   contraction: a nested scale is a product, rounded, plus the offset, rounded. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint8_t b16v __attribute__((vector_size(16)));
typedef uint16_t h16v __attribute__((vector_size(32)));
typedef _Float16 half16v __attribute__((vector_size(32)));

enum { FP32, BF16, FP16 };
enum { NESTED_BLOCK = 256 };

static inline f16v lookup(f16v table, i16v index) {
#ifdef __clang__
    f16v out;
    for (int i = 0; i < 16; i++) out[i] = table[index[i]];
    return out;
#else
    return __builtin_shuffle(table, index);
#endif
}

static inline void store(void *out, int64_t at, f16v values, int dtype, int count) {
    char buffer[64];
    if (dtype == FP32) {
        memcpy(buffer, &values, 64);
    } else if (dtype == BF16) { /* round to nearest even; the values are finite */
        i16v bits = (i16v)values;
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        h16v half = __builtin_convertvector(bits, h16v);
        memcpy(buffer, &half, 32);
    } else {
        half16v half = __builtin_convertvector(values, half16v);
        memcpy(buffer, &half, 32);
    }
    int size = dtype == FP32 ? 4 : 2;
    if (count == 16) memcpy((char *)out + at * size, buffer, 16 * size);
    else memcpy((char *)out + at * size, buffer, (size_t)count * size);
}

static inline f16v load(const void *in, int64_t at, int dtype, int count) {
    f16v values = {0};
    if (dtype == FP32) {
        memcpy(&values, (const float *)in + at, (size_t)count * 4);
    } else {
        h16v raw = {0};
        memcpy(&raw, (const uint16_t *)in + at, (size_t)count * 2);
        if (dtype == BF16) values = (f16v)(__builtin_convertvector(raw, i16v) << 16);
        else values = __builtin_convertvector((half16v)raw, f16v);
    }
    return values;
}

/* second == NULL: absmax is fp32 per block; else it is uint8, decoded as code[q] * second[block / 256] + offset. */
void halfbyte_dequantize4(const uint8_t *packed, const void *absmax, const float *second, const float *code, float offset,
                          const float *codebook, void *out, int64_t numel, int64_t blocksize, int64_t first, int64_t last,
                          int dtype) {
    f16v table;
    memcpy(&table, codebook, 64);
    for (int64_t block = first; block < last; block++) {
        float scale = second ? code[((const uint8_t *)absmax)[block]] * second[block / NESTED_BLOCK] + offset
                             : ((const float *)absmax)[block];
        int64_t end = (block + 1) * blocksize < numel ? (block + 1) * blocksize : numel;
        for (int64_t at = block * blocksize; at < end; at += 16) {
            int count = end - at < 16 ? (int)(end - at) : 16;
            b16v bytes = {0};
            memcpy(&bytes, packed + at / 2, count == 16 ? 8 : (size_t)(count + 1) / 2);
            b16v high = bytes >> 4, low = bytes & 15;
            b16v nibbles = __builtin_shufflevector(high, low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            store(out, at, lookup(table, __builtin_convertvector(nibbles, i16v)) * scale, dtype, count);
        }
    }
}

void halfbyte_quantize4(const void *weight, uint8_t *packed, float *absmax, const float *midpoints, const uint8_t *code_of_rank,
                        int64_t numel, int64_t blocksize, int64_t first, int64_t last, int dtype) {
    for (int64_t block = first; block < last; block++) {
        int64_t begin = block * blocksize;
        int64_t end = begin + blocksize < numel ? begin + blocksize : numel;
        f16v most = {0};
        i16v broken = {0};
        for (int64_t at = begin; at < end; at += 16) {
            f16v values = load(weight, at, dtype, end - at < 16 ? (int)(end - at) : 16);
            f16v magnitude = (f16v)((i16v)values & 0x7FFFFFFF);
            broken |= magnitude != magnitude;
            i16v larger = magnitude > most;
            most = (f16v)(((i16v)magnitude & larger) | ((i16v)most & ~larger));
        }
        float largest = 0;
        for (int i = 0; i < 16; i++) {
            if (most[i] > largest) largest = most[i];
            if (broken[i]) largest = INFINITY; /* the caller looks for it and names the tensor */
        }
        int partial = end - begin < blocksize;
        float divisor = largest > 1e-38f ? largest : 1e-38f;
        absmax[block] = partial && largest < 1e-38f ? 1e-38f : largest;
        float reciprocal = 1.0f / divisor;
        for (int64_t at = begin; at < end; at += 16) {
            int count = end - at < 16 ? (int)(end - at) : 16;
            f16v values = load(weight, at, dtype, count);
            f16v scaled = partial ? values / divisor : values * reciprocal;
            i16v rank = {0}; /* scaled beyond ±1 by rounding needs no clamp: the outer midpoints lie within */
            for (int i = 0; i < 15; i++) rank -= scaled > midpoints[i];
            uint8_t codes[16];
            for (int i = 0; i < 16; i++) codes[i] = code_of_rank[rank[i]];
            for (int i = 0; i < (count + 1) / 2; i++) packed[at / 2 + i] = (uint8_t)(codes[2 * i] << 4 | codes[2 * i + 1]);
        }
    }
}
