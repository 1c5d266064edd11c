/* CPU kernels of halfbyte.formats.blockwise4 in portable vector C (GCC and Clang vector extensions, no intrinsics).

   Sixteen values at a time: a 16-entry fp32 table is one vector register, so a look-up is one permute where the CPU has
   it (AVX-512's vpermps). Each call processes the blocks [first, last), so threads share nothing. Compile without
   contraction: a nested scale is a product, rounded, plus the offset, rounded. */

#include <math.h>

#include "values.h"

typedef uint64_t u8v __attribute__((vector_size(64)));
typedef uint8_t b64v __attribute__((vector_size(64)));
typedef uint8_t b8v __attribute__((vector_size(8)));

enum { NESTED_BLOCK = 256 };

INLINE i16v lookup(i16v table, i16v index) {
#ifdef __clang__
    i16v out;
    for (int i = 0; i < 16; i++) out[i] = table[index[i]];
    return out;
#else
    return __builtin_shuffle(table, index);
#endif
}

/* Decode the sixteen values whose codes start at element `at`, of which the first `count` are read. */
INLINE f16v decode(const uint8_t *packed, int64_t at, i16v table, int count) {
    uint32_t word[2] = {0, 0};
    memcpy(word, packed + at / 2, (size_t)(count + 1) / 2);
    uint32_t a = word[0], b = word[1];
    u16v words = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
    u16v shift = {4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24}; /* high nibble of each byte first */
    return (f16v)lookup(table, (i16v)((words >> shift) & 15));
}

/* second == NULL: absmax is fp32 per block; else it is uint8, decoded as code[q] * second[block / 256] + offset. */
INLINE void dequantize(const uint8_t *packed, const void *absmax, const float *second, const float *code, float offset,
                       const float *codebook, void *out, int64_t numel, int64_t blocksize, int64_t first, int64_t last,
                       int dtype) {
    i16v table;
    memcpy(&table, codebook, 64);
    for (int64_t block = first; block < last; block++) {
        float scale = second ? code[((const uint8_t *)absmax)[block]] * second[block / NESTED_BLOCK] + offset
                             : ((const float *)absmax)[block];
        int64_t at = block * blocksize;
        int64_t end = at + blocksize < numel ? at + blocksize : numel;
        for (; at + 16 <= end; at += 16) store_values(out, at, decode(packed, at, table, 16) * scale, dtype, 16);
        if (at < end) store_values(out, at, decode(packed, at, table, (int)(end - at)) * scale, dtype, (int)(end - at));
    }
}

void halfbyte_dequantize4(const uint8_t *packed, const void *absmax, const float *second, const float *code, float offset,
                          const float *codebook, void *out, int64_t numel, int64_t blocksize, int64_t first, int64_t last,
                          int dtype) {
#define RUN(kind) dequantize(packed, absmax, second, code, offset, codebook, out, numel, blocksize, first, last, kind)
    if (dtype == FP32) RUN(FP32);
    else if (dtype == BF16) RUN(BF16);
    else RUN(FP16);
#undef RUN
}

INLINE void encode(uint8_t *packed, int64_t at, i16v codes, int count) {
    u8v pairs = (u8v)codes; /* the even element is the low word */
    b64v bytes = (b64v)((pairs << 4) | (pairs >> 32));
    b8v out = __builtin_shufflevector(bytes, bytes, 0, 8, 16, 24, 32, 40, 48, 56);
    memcpy(packed + at / 2, &out, (size_t)(count + 1) / 2);
}

INLINE void quantize(const void *weight, uint8_t *packed, float *absmax, const float *midpoints, const int32_t *code_of_rank,
                     int64_t numel, int64_t blocksize, int64_t first, int64_t last, int dtype) {
    i16v table;
    memcpy(&table, code_of_rank, 64);
    for (int64_t block = first; block < last; block++) {
        int64_t begin = block * blocksize;
        int64_t end = begin + blocksize < numel ? begin + blocksize : numel;
        i16v most = {0}; /* magnitudes have the same order as floats and as integers, with NaN above Inf */
        for (int64_t at = begin; at < end; at += 16) {
            i16v magnitude = (i16v)load_values(weight, at, dtype, end - at < 16 ? (int)(end - at) : 16) & 0x7FFFFFFF;
            i16v larger = magnitude > most;
            most = (magnitude & larger) | (most & ~larger);
        }
        int32_t bits = 0;
        for (int i = 0; i < 16; i++) bits = most[i] > bits ? most[i] : bits;
        float largest;
        memcpy(&largest, &bits, 4);
        int partial = end - begin < blocksize;
        float divisor = largest > 1e-38f ? largest : 1e-38f;
        absmax[block] = partial && largest < 1e-38f ? 1e-38f : largest;
        float reciprocal = 1.0f / divisor;
        for (int64_t at = begin; at < end; at += 16) {
            int count = end - at < 16 ? (int)(end - at) : 16;
            f16v values = load_values(weight, at, dtype, count);
            f16v scaled = partial ? values / divisor : values * reciprocal;
            i16v rank = {0}; /* values rounded beyond 1 need no clamp: the outer midpoints are below 1 */
            for (int i = 0; i < 15; i++) rank -= scaled > midpoints[i];
            encode(packed, at, lookup(table, rank), count);
        }
    }
}

/* absmax of a block with NaN or Inf is not finite: the caller checks it and names the tensor. */
void halfbyte_quantize4(const void *weight, uint8_t *packed, float *absmax, const float *midpoints,
                        const int32_t *code_of_rank, int64_t numel, int64_t blocksize, int64_t first, int64_t last,
                        int dtype) {
#define RUN(kind) quantize(weight, packed, absmax, midpoints, code_of_rank, numel, blocksize, first, last, kind)
    if (dtype == FP32) RUN(FP32);
    else if (dtype == BF16) RUN(BF16);
    else RUN(FP16);
#undef RUN
}
