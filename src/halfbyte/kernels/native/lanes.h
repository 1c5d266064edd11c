/* Vectors of as many floats as a register of the CPU has (LANES: 16 with AVX-512, 8 with AVX2), and look-ups of codes
   in tables of up to 32 floats. Shuffles act on each 128 bits, as the instructions of AVX2 do. */

#ifndef HALFBYTE_LANES
#define HALFBYTE_LANES

#include "vectors.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#error "lanes.h needs AVX2"
#endif

typedef float fv __attribute__((vector_size(4 * LANES)));
typedef int32_t iv __attribute__((vector_size(4 * LANES)));
typedef uint32_t uv __attribute__((vector_size(4 * LANES)));
typedef uint16_t hv __attribute__((vector_size(4 * LANES)));
typedef uint8_t bv __attribute__((vector_size(4 * LANES)));

/* Lane i of a shuffle of 4, 2 or 1 bytes: index `pattern` within 128 bits, of the second operand if it is out of them. */
#define QUARTER4(a, b, c, d, l) (a) + (l), (b) + (l), (c) + (l), (d) + (l)
#if LANES == 16
#define SHUFFLE32(x, y, a, b, c, d)                                                                                   \
    (uv) __builtin_shufflevector((uv)(x), (uv)(y), QUARTER4(a, b, c, d, 0), QUARTER4(a, b, c, d, 4),                     \
                                 QUARTER4(a, b, c, d, 8), QUARTER4(a, b, c, d, 12))
#else
#define SHUFFLE32(x, y, a, b, c, d) \
    (uv) __builtin_shufflevector((uv)(x), (uv)(y), QUARTER4(a, b, c, d, 0), QUARTER4(a, b, c, d, 4))
#endif
#define LOW32(x, y) SHUFFLE32(x, y, 0, LANES, 1, LANES + 1)
#define HIGH32(x, y) SHUFFLE32(x, y, 2, LANES + 2, 3, LANES + 3)
#define LOW64(x, y) SHUFFLE32(x, y, 0, 1, LANES, LANES + 1)
#define HIGH64(x, y) SHUFFLE32(x, y, 2, 3, LANES + 2, LANES + 3)

INLINE fv load_lanes(const float *from) {
    fv values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE void store_lanes(float *to, fv values) { memcpy(to, &values, sizeof values); }

/* The first values of a vector, 2, 4 or 8 times each. */
#if LANES == 16
#define REPEAT2(v) __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)
#define REPEAT4(v) __builtin_shufflevector(v, v, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
#define REPEAT8(v) __builtin_shufflevector(v, v, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1)
#else
#define REPEAT2(v) __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3)
#define REPEAT4(v) __builtin_shufflevector(v, v, 0, 0, 0, 0, 1, 1, 1, 1)
#define REPEAT8(v) ((fv){0} + v[0])
#endif

INLINE uv widen(const uint8_t *from) { /* LANES bytes */
#if LANES == 8 && !defined(__clang__) /* GCC 12 converts lane by lane */
    typedef char c16v __attribute__((vector_size(16)));
    typedef int64_t two __attribute__((vector_size(16)));
    int64_t bytes;
    memcpy(&bytes, from, 8);
    return (uv)__builtin_ia32_pmovzxbd256((c16v)(two){bytes, 0});
#else
    typedef uint8_t narrow __attribute__((vector_size(LANES)));
    narrow bytes;
    memcpy(&bytes, from, LANES);
    return __builtin_convertvector(bytes, uv);
#endif
}

INLINE float sum_lanes(fv v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof lanes);
#if LANES > 8
    for (int i = 0; i < 8; i++) lanes[i] += lanes[i + 8];
#endif
    for (int i = 0; i < 4; i++) lanes[i] += lanes[i + 4];
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

/* ---- look-ups: 8 codes of 4 bits in each word; out[j]: the values of the j-th codes of all words */

#if LANES == 16

typedef struct {
    fv low, high;
} table;

INLINE table table_of(const float *values) { /* 32 floats */
    return (table){load_lanes(values), load_lanes(values + 16)};
}

INLINE fv lookup16(fv values, uv index) { /* reads the low four bits */
#ifdef __clang__
    return __builtin_ia32_permvarsf512(values, (iv)index);
#else
    return __builtin_shuffle(values, (iv)index);
#endif
}

INLINE fv lookup32(const table *t, uv index) { /* reads the low five bits */
#ifdef __clang__
    return __builtin_ia32_vpermi2varps512(t->low, (iv)index, t->high);
#else
    return __builtin_shuffle(t->low, t->high, (iv)index);
#endif
}

/* fifth: the plane of fifth bits (5-bit codes), of which code j is bit 4·j + shift. */
INLINE void decode8(const table *t, uv words, uv fifth, const int shift, fv out[8], const int bits, const int narrow) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
        out[j] = bits < 5 ? lookup16(t->low, words >> (4 * j))
                          : lookup32(t, (words >> (4 * j) & 15) | fifth >> (4 * j + shift) << 4);
}

#else

#define ZIP8(x, y, f)                                                                                                 \
    (hv) __builtin_shufflevector(x, y, f, f + 32, f + 1, f + 33, f + 2, f + 34, f + 3, f + 35, f + 4, f + 36, f + 5,    \
                                 f + 37, f + 6, f + 38, f + 7, f + 39, f + 16, f + 48, f + 17, f + 49, f + 18, f + 50, \
                                 f + 19, f + 51, f + 20, f + 52, f + 21, f + 53, f + 22, f + 54, f + 23, f + 55)
#define ZIP16(x, y, f)                                                                                                \
    (fv) __builtin_shufflevector(x, y, f, f + 16, f + 1, f + 17, f + 2, f + 18, f + 3, f + 19, f + 8, f + 24, f + 9,    \
                                 f + 25, f + 10, f + 26, f + 11, f + 27)
#define TWICE(...) {__VA_ARGS__, __VA_ARGS__}

typedef char c32v __attribute__((vector_size(32)));

typedef struct { /* byte b of each value, 16 values in each 128 bits; values 16 to 31 for 5-bit codes */
    bv low[4], high[4];
    fv eight; /* the first eight values */
} table;

INLINE table table_of(const float *values) { /* 32 floats */
    uint8_t bytes[2][4][4 * LANES];
    for (int i = 0; i < 32; i++)
        for (int lane = 0; lane < 4 * LANES; lane += 16) {
            uint32_t bits;
            memcpy(&bits, values + i, 4);
            for (int b = 0; b < 4; b++) bytes[i / 16][b][lane + i % 16] = (uint8_t)(bits >> (8 * b));
        }
    table t;
    memcpy(t.low, bytes[0], sizeof t.low);
    memcpy(t.high, bytes[1], sizeof t.high);
    memcpy(&t.eight, values, sizeof t.eight);
    return t;
}

INLINE bv lookup_bytes(bv values, bv index) { /* of 16 values, in each 128 bits; index < 16 */
    return (bv)__builtin_ia32_pshufb256((c32v)values, (c32v)index);
}

INLINE bv select_bytes(bv mask, bv yes, bv no) { /* by the highest bit of each byte */
    return (bv)__builtin_ia32_pblendvb256((c32v)no, (c32v)yes, (c32v)mask);
}

/* narrow: the values' low 16 bits are zero, and codes have at most 4 bits. */
INLINE void decode8(const table *t, uv words, uv fifth, const int shift, fv out[8], const int bits, const int narrow) {
    if (bits < 4) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) out[j] = __builtin_ia32_permvarsf256(t->eight, (iv)(words >> (4 * j)));
        return;
    }
    /* Byte r of word w to byte 4·r + w, or (narrow) to 8·(r / 2) + 2·w + r % 2. */
    const bv by_word = TWICE(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const bv by_pair = TWICE(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    bv bytes = lookup_bytes((bv)words, narrow ? by_pair : by_word), top = lookup_bytes((bv)fifth, by_word);
    bv index[2] = {bytes & 15, (bv)((uv)bytes >> 4) & 15}, part[2][4];
#pragma GCC unroll 4
    for (int b = narrow ? 2 : 0; b < 4; b++)
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            part[n][b] = lookup_bytes(t->low[b], index[n]);
            if (bits < 5) continue;
            bv upper = (bv)((uv)top << (7 - 4 * n - shift));
            part[n][b] = select_bytes(upper, lookup_bytes(t->high[b], index[n]), part[n][b]);
        }
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
        hv high[2] = {ZIP8(part[n][2], part[n][3], 0), ZIP8(part[n][2], part[n][3], 8)};
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++)
            if (narrow) {
                out[4 * u + n] = (fv)((uv)high[u] << 16);
                out[4 * u + 2 + n] = (fv)((uv)high[u] & 0xffff0000u);
            } else {
                hv low = u ? ZIP8(part[n][0], part[n][1], 8) : ZIP8(part[n][0], part[n][1], 0);
                out[4 * u + n] = ZIP16(low, high[u], 0);
                out[4 * u + 2 + n] = ZIP16(low, high[u], 4);
            }
    }
}

#endif

#endif
