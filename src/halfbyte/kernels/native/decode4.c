/* CPU kernels of the 4-bit GEMV and of halfbyte.ops.decode_layers in portable vector C (GCC and Clang extensions).

   Sixteen weights cost a shift, a permute and an FMA: the lanes of a vector are words of eight codes each, so the j-th
   codes of all lanes are the words shifted by 4j (a permute reads the low four bits), and x is in the same order. A
   vector of words spans 128 weights of a row; its sum is multiplied by the scales of its blocks once.

   A token passes all layers in one call. */

#include <stdlib.h>

#include "threads.h"
#include "vectors.h"

enum { NESTED_BLOCK = 256, CHUNK = 128, MOST_ROWS = 4 };

INLINE f16v silu(f16v x) { /* with exp(-|x|), which cannot overflow */
    f16v e = exp_of((f16v)((u16v)x | 0x80000000u));
    i16v positive = x > 0.0f;
    f16v one = (f16v){0} + 1.0f;
    f16v above = (f16v)(((i16v)one & positive) | ((i16v)e & ~positive));
    return x * above / (1.0f + e);
}

static void rms_norm(const float *x, const float *weight, float eps, float *y, int64_t length) {
    float r = 1.0f / sqrtf(dot(x, x, length) / (float)length + eps);
    for (int64_t i = 0; i < length; i += 16) store(y + i, load(weight + i) * (load(x + i) * r));
}

/* ---- products with 4-bit weights */

typedef struct {
    const uint8_t *packed;
    const void *absmax;
    const float *second, *code; /* second == NULL: absmax is fp32; else code[absmax] · second[block / 256] + offset */
    const float *codebook, *bias, *up; /* up: the adapters' B [rows, rank], or NULL */
    int64_t rows, columns, blocksize, begin, rank; /* begin: its first factor among those of its input */
    float offset;
} weight4;

INLINE float scale_of(const weight4 *w, int64_t block) {
    return w->second ? w->code[((const uint8_t *)w->absmax)[block]] * w->second[(uint64_t)block / NESTED_BLOCK] + w->offset
                     : ((const float *)w->absmax)[block];
}

/* Scales of 128 weights from element `at` on, as lanes of eight weights each. `width`: the block size. */
INLINE f16v scales_of(const weight4 *w, int64_t at, int64_t left, const int width) {
    if (width >= CHUNK) return (f16v){0} + scale_of(w, at / w->blocksize);
    f16v low = (f16v){0} + scale_of(w, at / 64), high = low;
    if (left > 64) high = (f16v){0} + scale_of(w, at / 64 + 1);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
}

INLINE f16v any_scales_of(const weight4 *w, int64_t at, int64_t left) {
    f16v scales = {0};
    for (int i = 0; i < 16 && 8 * i < left; i++) scales[i] = scale_of(w, (at + 8 * i) / w->blocksize);
    return scales;
}

INLINE f16v lookup(i16v table, u16v index) {
#ifdef __clang__
    i16v out;
    for (int i = 0; i < 16; i++) out[i] = table[index[i] & 15];
    return (f16v)out;
#elif defined(__AVX512F__) || !defined(__AVX2__)
    return (f16v)__builtin_shuffle(table, (i16v)index);
#else /* one permute of eight lanes for each half of the table; GCC would split sixteen lanes */
    typedef int32_t i8v __attribute__((vector_size(32)));
    i8v half[2], at[2];
    memcpy(half, &table, 64);
    memcpy(at, &index, 64);
    for (int i = 0; i < 2; i++) {
        i8v upper = at[i] << 28 >> 31, low = __builtin_shuffle(half[0], at[i]), high = __builtin_shuffle(half[1], at[i]);
        at[i] = (high & upper) | (low & ~upper);
    }
    f16v out;
    memcpy(&out, at, 64);
    return out;
#endif
}

/* y[m, row] for rows [first, last): x [M, padded] in the order of `arrange`. width: 64, 128 (and its multiples) or 0. */
INLINE void rows_of(const weight4 *w, const float *x, int64_t padded, float *y, int64_t stride, int64_t first,
                    int64_t last, const int M, const int width) {
    i16v table;
    memcpy(&table, w->codebook, 64);
    for (int64_t row = first; row < last; row++) {
        f16v total[MOST_ROWS] = {{0}};
        for (int64_t k = 0; k < w->columns; k += CHUNK) {
            int64_t at = row * w->columns + k, left = w->columns - k;
            u16v words = {0};
            if (left >= CHUNK) memcpy(&words, w->packed + at / 2, 64);
            else memcpy(&words, w->packed + at / 2, (size_t)left / 2);
            f16v even[MOST_ROWS] = {{0}}, odd[MOST_ROWS] = {{0}}; /* two sums, to shorten the dependency chain */
#pragma GCC unroll 4
            for (int j = 0; j < 8; j += 2) {
                f16v a = lookup(table, words >> (4 * j)), b = lookup(table, words >> (4 * j + 4));
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) {
                    const float *from = x + m * padded + k + 16 * j;
                    even[m] += a * load(from);
                    odd[m] += b * load(from + 16);
                }
            }
            f16v scales = width ? scales_of(w, at, left, width) : any_scales_of(w, at, left);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) total[m] += (even[m] + odd[m]) * scales;
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) y[m * stride + row] = sum(total[m]) + (w->bias ? w->bias[row] : 0.0f);
    }
}

INLINE void products(const weight4 *w, const float *x, int64_t padded, float *y, int64_t stride, int64_t first,
                     int64_t last, const int M) {
    if (w->blocksize == 64) rows_of(w, x, padded, y, stride, first, last, M, 64);
    else if (w->blocksize % CHUNK == 0) rows_of(w, x, padded, y, stride, first, last, M, CHUNK);
    else rows_of(w, x, padded, y, stride, first, last, M, 0);
}

static void gemv(const weight4 *w, const float *x, int64_t padded, float *y, int64_t stride, int64_t first, int64_t last,
                 int batch) {
    if (batch == 1) products(w, x, padded, y, stride, first, last, 1);
    else if (batch == 2) products(w, x, padded, y, stride, first, last, 2);
    else if (batch == 3) products(w, x, padded, y, stride, first, last, 3);
    else products(w, x, padded, y, stride, first, last, 4);
}

static int64_t padded_to(int64_t columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }

/* x [columns] in the order of the codes, padded with zeros to a multiple of CHUNK: the high nibble comes first. */
static void arrange(const float *x, float *out, int64_t columns) {
    for (int64_t k = 0; k < columns; k += CHUNK)
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < 16; i++) {
                int64_t at = k + 8 * i + (j ^ 1);
                out[k + 16 * j + i] = at < columns ? x[at] : 0.0f;
            }
}

typedef struct {
    const weight4 *w;
    const float *x;
    float *y;
    int batch;
} product;

static void product_piece(const void *job, int64_t first, int64_t last) {
    const product *p = job;
    gemv(p->w, p->x, padded_to(p->w->columns), p->y, p->w->rows, first, last, p->batch);
}

enum { PIECE = 1 << 15 }; /* least weights per piece: some microseconds of work */

static int64_t rows_worth(const weight4 *w) {
    int64_t rows = PIECE / w->columns;
    return rows < 16 ? 16 : rows / 16 * 16;
}

/* y [batch, rows] = x·Wᵀ + bias for x [batch, columns]; blocks of 32 or more values that divide a row. Returns 0, or 1
   if memory is exhausted. */
int halfbyte_gemv4(const weight4 *w, const float *x, float *y, int batch, int threads) {
    int64_t padded = padded_to(w->columns);
    float *arranged = aligned_alloc(64, (size_t)(batch * padded) * sizeof(float));
    if (!arranged) return 1;
    for (int m = 0; m < batch; m++) arrange(x + m * w->columns, arranged + m * padded, w->columns);
    product job = {w, arranged, y, batch};
    spread(product_piece, &job, w->rows, rows_worth(w), threads);
    free(arranged);
    return 0;
}

/* ---- all layers */

typedef struct {
    weight4 w[3];
    const float *down, *mask; /* the adapters' A [ranks, columns]; which sequence uses which, [batch, ranks], or NULL */
    int64_t ranks;
} projections;

typedef struct {
    projections qkv, out, gate_up, down;
    const float *norm, *post_norm, *q_norm, *k_norm;
    void *keys, *values; /* [batch, kv_heads, slots, size], fp32 or bf16 */
    int64_t window;       /* 0: all */
} layer4;

typedef struct {
    const layer4 *layers;
    const float *cos, *sin; /* [slots, rotated] */
    const int32_t *padding;
    const int64_t *slot;
    float *scratch; /* halfbyte_decode_scratch's length */
    int64_t count, heads, kv_heads, size, slots, rotated, width, inner, ranks;
    float eps, scale;
    int32_t batch, threads, bf16; /* bf16: dtype of the cache */
} stack4;

typedef struct { /* a stage's job and its buffers in the scratch memory */
    const stack4 *s;
    const layer4 *layer;
    float *hidden; /* [batch, width] */
    float *plain, *arranged, *factors; /* a stage's input [batch, width]; the same in the codes' order; x·Aᵀ */
    float *q, *k, *v, *y; /* [batch, heads · size] ..., and a branch's output [batch, width] */
    float *gate, *up, *scores;
} state;

static int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

static int64_t widest(const stack4 *s) {
    int64_t width = s->width > s->inner ? s->width : s->inner, q = s->heads * s->size;
    return padded_to(width > q ? width : q);
}

static void place(const stack4 *s, state *t) {
    float *next = s->scratch;
    int64_t batch = s->batch, q = s->heads * s->size, kv = s->kv_heads * s->size;
#define NEXT(name, each) (t->name = next, next += round16(batch * (each)))
    NEXT(plain, widest(s)), NEXT(arranged, widest(s)), NEXT(factors, s->ranks);
    NEXT(q, q), NEXT(k, kv), NEXT(v, kv), NEXT(y, s->width);
    NEXT(gate, s->inner), NEXT(up, s->inner), NEXT(scores, s->heads * round16(s->slots));
#undef NEXT
}

int64_t halfbyte_decode_scratch(const stack4 *s) {
    int64_t q = s->heads * s->size, kv = s->kv_heads * s->size;
    return s->batch * (2 * widest(s) + s->ranks + q + 2 * kv + s->width + 2 * s->inner + s->heads * round16(s->slots)) +
           10 * 16;
}

/* Arrange the input in `plain` for the products of `p`, and compute its low-rank factors. */
static void prepare(state *t, const projections *p) {
    int64_t columns = p->w[0].columns;
    for (int m = 0; m < t->s->batch; m++) {
        const float *x = t->plain + m * columns;
        arrange(x, t->arranged + m * padded_to(columns), columns);
        for (int64_t r = 0; r < p->ranks; r++) {
            float u = dot(x, p->down + r * columns, columns);
            t->factors[m * p->ranks + r] = p->mask ? u * p->mask[m * p->ranks + r] : u;
        }
    }
}

/* Rows [first, last) of one linear with its adapters. */
static void linear(const state *t, const projections *p, int which, float *y, int64_t first, int64_t last) {
    const weight4 *w = p->w + which;
    if (first >= last) return;
    gemv(w, t->arranged, padded_to(w->columns), y, w->rows, first, last, t->s->batch);
    if (!w->up) return;
    for (int m = 0; m < t->s->batch; m++)
        for (int64_t row = first; row < last; row++) {
            const float *u = t->factors + m * p->ranks + w->begin, *b = w->up + row * w->rank;
            float added = 0;
            for (int64_t r = 0; r < w->rank; r++) added += u[r] * b[r];
            y[m * w->rows + row] += added;
        }
}

static int64_t within(int64_t at, int64_t rows) { return at < 0 ? 0 : at > rows ? rows : at; }

static void qkv_piece(const void *job, int64_t first, int64_t last) {
    const state *t = job;
    float *out[] = {t->q, t->k, t->v};
    int64_t before = 0;
    for (int i = 0; i < 3; i++) {
        int64_t rows = t->layer->qkv.w[i].rows;
        linear(t, &t->layer->qkv, i, out[i], within(first - before, rows), within(last - before, rows));
        before += rows;
    }
}

static void out_piece(const void *job, int64_t first, int64_t last) {
    const state *t = job;
    linear(t, &t->layer->out, 0, t->y, first, last);
}

static void down_piece(const void *job, int64_t first, int64_t last) {
    const state *t = job;
    linear(t, &t->layer->down, 0, t->y, first, last);
}

static void glu_piece(const void *job, int64_t first, int64_t last) {
    const state *t = job;
    linear(t, &t->layer->gate_up, 0, t->gate, first, last);
    linear(t, &t->layer->gate_up, 1, t->up, first, last);
    for (int m = 0; m < t->s->batch; m++)
        for (int64_t i = m * t->s->inner + first; i < m * t->s->inner + last; i += 16)
            store(t->plain + i, silu(load(t->gate + i)) * load(t->up + i));
}

/* Normalise one head's vector, if the model does, and rotate it. */
static void rotate_head(const state *t, float *x, const float *norm, int64_t position) {
    const stack4 *s = t->s;
    if (norm) rms_norm(x, norm, s->eps, x, s->size);
    const float *cos = s->cos + position * s->rotated, *sin = s->sin + position * s->rotated;
    int64_t half = s->rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* Write a new key or value into the cache. */
INLINE void store_row(void *cache, int64_t at, const float *x, int64_t size, const int bf16) {
    if (!bf16) memcpy((float *)cache + at, x, (size_t)size * 4);
    else for (int64_t i = 0; i < size; i++) ((uint16_t *)cache)[at + i] = to_bf16(x[i]);
}

static void store_new(const state *t) {
    const stack4 *s = t->s;
    for (int64_t pair = 0; pair < s->batch * s->kv_heads; pair++) {
        float *k = t->k + pair * s->size;
        rotate_head(t, k, t->layer->k_norm, *s->slot - s->padding[pair / s->kv_heads]);
        int64_t at = (pair * s->slots + *s->slot) * s->size;
        store_row(t->layer->keys, at, k, s->size, s->bf16);
        store_row(t->layer->values, at, t->v + pair * s->size, s->size, s->bf16);
    }
}

/* out [size] = Σ weight·value over slots [from, to), `wide` vectors at a time; bf16 in the order of `deinterleave`. */
INLINE void weigh(const float *weights, const void *values, float *out, int64_t size, int64_t from, int64_t to, float by,
                const int wide, const int bf16) {
    for (int64_t d = 0; d < size; d += 16 * wide) {
        f16v total[4] = {{0}}, even, odd;
        for (int64_t j = from; j < to; j++) {
            int64_t at = j * size + d;
            if (bf16)
                for (int i = 0; i < wide; i += 2) {
                    halves((const uint16_t *)values + at + 16 * i, &even, &odd);
                    total[i] += weights[j - from] * even;
                    total[i + 1] += weights[j - from] * odd;
                }
            else
                for (int i = 0; i < wide; i++) total[i] += weights[j - from] * load((const float *)values + at + 16 * i);
        }
        for (int i = 0; i < wide; i++) store(out + d + 16 * i, total[i] * by);
    }
}

INLINE void attend(const state *t, int64_t head, const int bf16) { /* head: of batch · heads */
    const stack4 *s = t->s;
    int64_t row = head / s->heads, group = s->heads / s->kv_heads, to = *s->slot + 1, from = s->padding[row];
    int64_t size = s->size, cache = (row * s->kv_heads + head % s->heads / group) * s->slots * size;
    if (t->layer->window && to - t->layer->window > from) from = to - t->layer->window;
    float *q = t->q + head * size, *scores = t->scores + head * round16(s->slots), most = -INFINITY, all = 0;
    rotate_head(t, q, t->layer->q_norm, *s->slot - s->padding[row]);
    if (bf16) deinterleave(q, size, 0);
    for (int64_t j = from; j < to; j++) {
        int64_t at = cache + j * size;
        float score = s->scale * (bf16 ? dot_bf16(q, (const uint16_t *)t->layer->keys + at, size)
                                       : dot(q, (const float *)t->layer->keys + at, size));
        scores[j - from] = score;
        most = score > most ? score : most;
    }
    int64_t seen = round16(to - from);
    for (int64_t j = to - from; j < seen; j++) scores[j] = -INFINITY;
    for (int64_t j = 0; j < seen; j += 16) {
        f16v e = exp_of(load(scores + j) - most);
        store(scores + j, e);
        all += sum(e);
    }
    float *out = t->plain + head * size;
    const void *values = bf16 ? (void *)((uint16_t *)t->layer->values + cache) : (void *)((float *)t->layer->values + cache);
    if (size % 64 == 0) weigh(scores, values, out, size, from, to, 1 / all, 4, bf16);
    else weigh(scores, values, out, size, from, to, 1 / all, bf16 ? 2 : 1, bf16);
    if (bf16) deinterleave(out, size, 1);
}

static void attend_piece(const void *job, int64_t first, int64_t last) {
    const state *t = job;
    for (int64_t head = first; head < last; head++)
        if (t->s->bf16) attend(t, head, 1);
        else attend(t, head, 0);
}

static void add_branch(state *t) {
    for (int64_t i = 0; i < t->s->batch * t->s->width; i += 16) store(t->hidden + i, load(t->hidden + i) + load(t->y + i));
}

static void normalise(state *t, const float *weight) {
    for (int64_t m = 0; m < t->s->batch; m++)
        rms_norm(t->hidden + m * t->s->width, weight, t->s->eps, t->plain + m * t->s->width, t->s->width);
}

/* hidden [batch, width]: the residual stream before all layers, overwritten by that after them. */
void halfbyte_decode(const stack4 *s, float *hidden) {
    state t = {.s = s, .hidden = hidden};
    place(s, &t);
    int threads = s->threads;
    for (int64_t i = 0; i < s->count; i++) {
        const layer4 *layer = t.layer = s->layers + i;
        const weight4 *qkv = layer->qkv.w, *out = layer->out.w, *gate = layer->gate_up.w, *down = layer->down.w;
        normalise(&t, layer->norm);
        prepare(&t, &layer->qkv);
        spread(qkv_piece, &t, qkv[0].rows + qkv[1].rows + qkv[2].rows, rows_worth(qkv), threads);
        store_new(&t);
        spread(attend_piece, &t, s->batch * s->heads, 1 + (1 << 14) / (s->size * (*s->slot + 1)), threads);
        prepare(&t, &layer->out);
        spread(out_piece, &t, out->rows, rows_worth(out), threads);
        add_branch(&t);
        normalise(&t, layer->post_norm);
        prepare(&t, &layer->gate_up);
        spread(glu_piece, &t, gate->rows, rows_worth(gate), threads);
        prepare(&t, &layer->down);
        spread(down_piece, &t, down->rows, rows_worth(down), threads);
        add_branch(&t);
    }
}
