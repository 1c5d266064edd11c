/* x·Wᵀ for a few rows of x with weights in 2 to 8 bits, decoded in registers, in fp32.

   A library is compiled for each format, which takes GCC 1 to 2 seconds; a single one would take half a minute.

   A format is a layout of codes, a table of their values, and a kind of scales. A row of W is multiplied a chunk at a
   time; the lanes of a vector are runs of codes that share a scale, x is in the order in which codes are decoded
   (`arrange`), and a lane's sum is multiplied by its scale once. A row's sums do not depend on the other rows of x. */

#include <stdlib.h>

#include "lanes.h"
#include "threads.h"

enum { NIBBLES, PLANES, INT8, FLOAT8 }; /* layouts */

#ifndef LAYOUT      /* one library for each form: few_rows.py defines these */
#define LAYOUT NIBBLES
#define BITS 4      /* of a code */
#define NARROW 0    /* whether the low 16 bits of all values of codes are zero; not with 5-bit codes */
#define ZEROS 0     /* whether groups have zeros; the table then has codes less 2^(BITS − 1) */
#endif

enum { PLAIN, NESTED, OF_E4M3, OF_E8M0, OF_E4M4, OF_BF16, OF_FP16 }; /* scales */
enum { MOST_ROWS = 4, NESTED_BLOCK = 256, PLANE = 32, BYTES = 128, SEGMENT = 2048 };

typedef struct {
    const uint8_t *packed;
    const void *scales, *zeros;        /* zeros: fp16, or NULL */
    const float *second, *code;        /* nested: code[scale] · second[block / 256] + factor */
    const float *codebook;             /* 32 floats */
    int64_t rows, columns, stride;     /* stride: bytes of a packed row */
    int64_t block, scale_stride, tall; /* columns of a scale; scales of a row; rows that share them */
    float factor;                      /* of all scales, but for nested ones */
    int32_t scale, swapped;            /* swapped: the high nibble comes first */
} packed_weight;

enum { WHOLE_BYTES = LAYOUT == INT8 || LAYOUT == FLOAT8 };
enum { RUN = WHOLE_BYTES ? BYTES : LAYOUT == PLANES ? PLANE : 8 }; /* codes that share a scale */
enum { CHUNK = WHOLE_BYTES ? BYTES : RUN * LANES };

INLINE int64_t padded_to(const packed_weight *w) { return (w->columns + CHUNK - 1) / CHUNK * CHUNK; }

/* Floats of an arranged row: x, then sums of 32 values where the weight has zeros. */
INLINE int64_t arranged_floats(const packed_weight *w) { return padded_to(w) + (ZEROS ? padded_to(w) / PLANE : 0); }

/* Column of lane i of the vector j of a chunk. */
INLINE int64_t column_of(const packed_weight *w, int64_t j, int64_t i) {
    if (LAYOUT == NIBBLES) return 8 * i + (j ^ w->swapped);
    if (LAYOUT == PLANES) return PLANE * i + j / 8 + j % 8 * 4;
    return j / 4 * 4 * LANES + 4 * i + j % 4;
}

/* The rows of x [batch, columns] in the order of the codes: vectors of LANES, one of each of M rows in turn. Columns and
   rows beyond the last are zeros. */
static void arrange(const packed_weight *w, const float *x, int64_t batch, int64_t M, float *out) {
    int64_t padded = padded_to(w), columns = w->columns;
    for (int64_t k = 0; k < padded; k += CHUNK)
        for (int64_t j = 0; j < CHUNK / LANES; j++)
            for (int64_t m = 0; m < M; m++)
                for (int i = 0; i < LANES; i++, out++) {
                    int64_t at = k + column_of(w, j, i);
                    *out = at < columns && m < batch ? x[m * columns + at] : 0.0f;
                }
    if (!ZEROS) return;
    for (int64_t k = 0; k < padded; k += CHUNK)
        for (int64_t m = 0; m < M; m++)
            for (int64_t at = k; at < k + CHUNK; at += PLANE, out++) {
                *out = 0;
                for (int64_t i = at; m < batch && i < at + PLANE && i < columns; i++) *out += x[m * columns + i];
            }
}

/* ---- scales */

INLINE fv from_bits(uv small, uv exact, uv normal) { /* exact where small, else normal */
    return (fv)((exact & small) | (normal & ~small));
}

INLINE fv e4m4(uv code) { /* formats/bitplane.py */
    uv exact = (uv)(__builtin_convertvector((iv)code, fv) * 0x1p-14f);
    return from_bits((uv)((iv)code < 16), exact, (code + 0x740u) << 19);
}

INLINE fv e4m3(uv code) { /* not negative, not NaN */
    uv exact = (uv)(__builtin_convertvector((iv)code, fv) * 0x1p-9f);
    return from_bits((uv)((iv)code < 8), exact, (code << 20) + (120u << 23));
}

INLINE fv e8m0(uv code) { return (fv)((code << 23) | ((uv)((iv)code == 0) & 0x400000u)); }

/* Repeat each of `count` values `share` times, a vector at a time; values are read up to LANES beyond `count`. */
INLINE void spread_scales(const float *values, int64_t count, int64_t share, float *out) {
    if (share >= LANES)
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < share; j += LANES, out += LANES) store_lanes(out, (fv){0} + values[i]);
    else if (share == 1)
        for (int64_t i = 0; i < count; i += LANES) store_lanes(out + i, load_lanes(values + i));
    else if (share == 2)
        for (int64_t i = 0; i < count; i += LANES / 2, out += LANES) store_lanes(out, REPEAT2(load_lanes(values + i)));
    else if (share == 4)
        for (int64_t i = 0; i < count; i += LANES / 4, out += LANES) store_lanes(out, REPEAT4(load_lanes(values + i)));
    else
        for (int64_t i = 0; i < count; i += LANES / 8, out += LANES) store_lanes(out, REPEAT8(load_lanes(values + i)));
}

INLINE float half_to_float(const void *from, int64_t at) { return (float)((const _Float16 *)from)[at]; }

/* Scales, and zeros, of the `lanes` lanes of row `row` from column k on; zeros beyond the last scale of the row. */
INLINE void scales_of(const packed_weight *w, int64_t row, int64_t k, int64_t lanes, float *out, float *zeros) {
    int64_t share = w->block > RUN ? w->block / RUN : 1, first = row / w->tall * w->scale_stride + k / w->block;
    if (share > lanes) share = lanes;
    int64_t count = (lanes + share - 1) / share, left = w->scale_stride - k / w->block;
    float values[SEGMENT / 8 + 2 * LANES], centres[SEGMENT / PLANE + 2 * LANES];
    int64_t stored = count < left ? count : left;
    const uint8_t *bytes = (const uint8_t *)w->scales + first;
    if (w->scale == PLAIN)
        for (int64_t i = 0; i < stored; i++) values[i] = ((const float *)w->scales)[first + i] * w->factor;
    else if (w->scale == NESTED)
        for (int64_t i = 0; i < stored;) {
            int64_t block = (first + i) / NESTED_BLOCK, stop = (block + 1) * NESTED_BLOCK - first;
            float second = w->second[block];
            for (; i < stored && i < stop; i++) values[i] = w->code[bytes[i]] * second + w->factor;
        }
    else if (w->scale == OF_BF16)
        for (int64_t i = 0; i < stored; i++) {
            uint32_t bits = (uint32_t)((const uint16_t *)w->scales)[first + i] << 16;
            memcpy(values + i, &bits, 4);
        }
    else if (w->scale == OF_FP16)
        for (int64_t i = 0; i < stored; i++) values[i] = half_to_float(w->scales, first + i);
    else
        for (int64_t i = 0; i < stored; i += LANES) {
            uint8_t copy[LANES] = {0};
            const uint8_t *from = bytes + i;
            if (stored - i < LANES) from = memcpy(copy, from, (size_t)(stored - i));
            uv codes = widen(from);
            fv decoded = w->scale == OF_E4M3 ? e4m3(codes) : w->scale == OF_E8M0 ? e8m0(codes) : e4m4(codes);
            store_lanes(values + i, decoded * w->factor);
        }
    for (int64_t i = stored; i < count; i++) values[i] = 0;
    spread_scales(values, count, share, out);
    if (ZEROS) {
        for (int64_t i = 0; i < stored; i++)
            centres[i] = half_to_float(w->zeros, first + i) - (float)(1 << (BITS - 1));
        for (int64_t i = stored; i < count; i++) centres[i] = 0;
        spread_scales(centres, count, share, zeros);
    }
}

/* ---- codes */

/* Planes of LANES blocks of 32 codes: bit j of plane[b] is bit b of code j, a block a lane. */
INLINE void planes_of(const uint8_t *from, uv plane[8], const int bits) {
#pragma GCC unroll 2
    for (int begin = 0; begin < bits; begin += 4) {
        int from_plane = bits == 5 && begin ? 1 : begin; /* 16 bytes within the block's 20 */
        uv r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
            for (int l = 0; l < LANES / 4; l++)
                memcpy((uint8_t *)&r[i] + 16 * l, from + (4 * l + i) * 4 * bits + 4 * from_plane, 16);
        uv a = LOW32(r[0], r[1]), b = LOW32(r[2], r[3]), c = HIGH32(r[0], r[1]), d = HIGH32(r[2], r[3]);
        uv p[4] = {LOW64(a, b), HIGH64(a, b), LOW64(c, d), HIGH64(c, d)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (bits != 5 || !begin) plane[begin + i] = begin + i < bits ? p[i] : (uv){0};
        if (bits == 5 && begin) plane[4] = p[3];
    }
}

INLINE void exchange(uv *a, uv *b, const uint32_t mask, const int shift) {
    uv difference = ((*a >> shift) ^ *b) & mask;
    *b ^= difference;
    *a ^= difference << shift;
}

/* From four planes to words of 4-bit codes: the code f of word q was at 4·f + q. Bits above `bits` are garbage. */
INLINE void interleave(uv p[4], const int bits) {
    if (bits > 2) exchange(p, p + 2, 0x33333333u, 2);
    else p[2] = p[0] >> 2;
    if (bits > 3) exchange(p + 1, p + 3, 0x33333333u, 2);
    else p[3] = p[1] >> 2;
    exchange(p, p + 1, 0x55555555u, 1);
    exchange(p + 2, p + 3, 0x55555555u, 1);
}

/* part[m] (+)= the sum of count products, in two chains, so that the CPU computes several at once. */
INLINE void add(fv *part, const fv *values, const float *x, const int count, const int M, const int first) {
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
        fv even = values[0] * load_lanes(x + LANES * m), odd = values[1] * load_lanes(x + LANES * (M + m));
#pragma GCC unroll 8
        for (int j = 2; j < count; j += 2) {
            even += values[j] * load_lanes(x + LANES * (j * M + m));
            odd += values[j + 1] * load_lanes(x + LANES * (j * M + M + m));
        }
        part[m] = first ? even + odd : part[m] + (even + odd);
    }
}

INLINE void add_nibbles(const table *t, const uint8_t *codes, const float *x, fv *part, const int M) {
    fv values[8];
    uv words;
    memcpy(&words, codes, sizeof words);
    decode8(t, words, words, 0, values, 4, NARROW);
    add(part, values, x, 8, M, 1);
}

INLINE void add_planes(const table *t, const uint8_t *codes, const float *x, fv *part, const int M) {
    fv values[8];
    uv plane[8];
    planes_of(codes, plane, BITS);
    interleave(plane, BITS);
    if (BITS == 8) interleave(plane + 4, 4);
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        if (BITS == 8)
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                uv low = plane[q] >> (4 * j) & 15, high = plane[q + 4] >> (4 * j) & 15;
                values[j] = __builtin_convertvector((iv)(low | high << 4) - 128, fv);
            }
        else decode8(t, plane[q], BITS == 5 ? plane[4] : plane[q], q, values, BITS, NARROW);
        add(part, values, x + 8 * LANES * q * M, 8, M, q == 0);
    }
}

INLINE fv float8(uv codes) { /* the low byte of each word, E4M3 */
    uv magnitude = codes & 0x7fu, sign = codes << 24 & 0x80000000u;
    iv small = (iv)magnitude < 8;
    iv normal = (iv)((magnitude << 20) + (120u << 23)), exact = (iv)(__builtin_convertvector((iv)magnitude, fv) * 0x1p-9f);
    return (fv)((exact & small) | (normal & ~small) | (iv)sign);
}

INLINE void add_bytes(const uint8_t *codes, const float *x, fv *part, const int M) {
#pragma GCC unroll 8
    for (int at = 0; at < BYTES; at += 4 * LANES) {
        fv values[4];
        uv words;
        memcpy(&words, codes + at, sizeof words);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            values[j] = LAYOUT == INT8 ? __builtin_convertvector((iv)(words << (24 - 8 * j)) >> 24, fv)
                                         : float8(words >> (8 * j));
        add(part, values, x + at * M, 4, M, at == 0);
    }
}

/* Add the products of `count` chunks of one row of W to totals [M]. left: readable bytes of codes. */
INLINE void add_chunks(const table *t, const uint8_t *codes, int64_t left, const float *x, const float *sums, int64_t count,
                       const float *scales, const float *zeros, fv *totals, const int M) {
    const int64_t bytes = CHUNK * BITS / 8, slack = LAYOUT == PLANES ? 16 : 0;
    uint8_t tail[PLANE * LANES + 16];
    int64_t readable = left / bytes < count ? left / bytes : count;
    if (readable && readable * bytes + slack > left) readable--;
    if (readable < count) {
        memset(tail, 0, sizeof tail);
        memcpy(tail, codes + readable * bytes, (size_t)(left - readable * bytes < bytes ? left - readable * bytes : bytes));
    }
    fv total[MOST_ROWS];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) total[m] = totals[m];
    for (int64_t i = 0; i < count; i++, x += CHUNK * M) {
        const uint8_t *from = i < readable ? codes + i * bytes : tail;
        fv part[MOST_ROWS];
        if (LAYOUT == NIBBLES) add_nibbles(t, from, x, part, M);
        else if (LAYOUT == PLANES) add_planes(t, from, x, part, M);
        else add_bytes(from, x, part, M);
        fv scale = WHOLE_BYTES ? (fv){0} + scales[i] : load_lanes(scales + LANES * i);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            fv sum = part[m];
            if (ZEROS) sum -= load_lanes(zeros + LANES * i) * load_lanes(sums + LANES * (M * i + m));
            total[m] += sum * scale;
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) totals[m] = total[m];
}

/* y[m, row] of rows [first, last) of W and `batch` of M arranged rows of x. W is read in its order in memory. */
INLINE void product_rows(const packed_weight *w, const float *x, float *y, int64_t first, int64_t last,
                         int64_t batch, const int M) {
    int64_t padded = padded_to(w), end = w->rows * w->stride;
    float scales[SEGMENT / 8 + LANES], zeros[SEGMENT / PLANE + LANES];
    table t;
    if (LAYOUT == NIBBLES || LAYOUT == PLANES) t = table_of(w->codebook);
    else memset(&t, 0, sizeof t);
    for (int64_t row = first; row < last; row++) {
        fv total[MOST_ROWS];
        memset(total, 0, sizeof total);
        __asm__ volatile("" : : "r"(total) : "memory"); /* keep it in memory: GCC 12 takes minutes otherwise */
        for (int64_t k = 0; k < padded; k += SEGMENT) {
            int64_t stop = padded < k + SEGMENT ? padded : k + SEGMENT, at = row * w->stride + k * BITS / 8;
            scales_of(w, row, k, (stop - k) / RUN, scales, zeros);
            add_chunks(&t, w->packed + at, end - at, x + k * M, x + (padded + k / PLANE) * M,
                       (stop - k) / CHUNK, scales, zeros, total, M);
        }
        for (int64_t m = 0; m < batch; m++) y[m * w->rows + row] = sum_lanes(total[m]);
    }
}

typedef struct {
    const packed_weight *w;
    const float *x;
    float *y;
    int64_t batch;
} product;

static void product_piece(const void *job, int64_t first, int64_t last) {
    const product *p = job;
    if (p->batch == 1) product_rows(p->w, p->x, p->y, first, last, 1, 1);
    else if (p->batch == 2) product_rows(p->w, p->x, p->y, first, last, 2, 2);
    else product_rows(p->w, p->x, p->y, first, last, p->batch, MOST_ROWS);
}

enum { PIECE = 1 << 15 }; /* least weights per piece: some microseconds of work */

/* y [batch, rows] = x·Wᵀ for x [batch, columns]. Returns 0, or 1 if memory is exhausted. */
int halfbyte_few_rows(const packed_weight *w, const float *x, float *y, int64_t batch, int threads) {
    int64_t width = arranged_floats(w), step = PIECE / w->columns;
    float *arranged = aligned_alloc(64, ((size_t)(width * (batch > 2 ? MOST_ROWS : batch)) * sizeof(float) + 63) / 64 * 64);
    if (!arranged) return 1;
    for (int64_t m = 0; m < batch; m += MOST_ROWS) {
        int64_t count = batch - m < MOST_ROWS ? batch - m : MOST_ROWS;
        arrange(w, x + m * w->columns, count, count > 2 ? MOST_ROWS : count, arranged);
        product job = {w, arranged, y + m * w->rows, count};
        spread(product_piece, &job, w->rows, step < 16 ? 16 : step, threads);
    }
    free(arranged);
    return 0;
}
