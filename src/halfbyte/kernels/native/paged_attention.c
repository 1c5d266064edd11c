/* CPU kernel of halfbyte.ops.paged_attention: one new token per sequence over keys and values in pages, in fp32.

   A piece is a sequence's key head with the queries that share it. Pages are processed in order with flash attention's
   running maximum (Dao et al. 2022, arXiv:2205.14135, section 3.1), so a sequence's sums depend only on its tokens. */

#include "threads.h"
#include "vectors.h"

enum { PAGE = 64, MOST_SIZE = 256 };

typedef struct {
    const float *q; /* [rows, heads, size] */
    float *out;
    const void *keys, *values; /* [pages, kv_heads, PAGE, size], fp32 or bf16 */
    const int32_t *tables, *lengths; /* [rows, stride], [rows] */
    const float *sinks; /* [heads]; NULL: none */
    int64_t stride, rows, heads, kv_heads, size, window; /* window 0: all */
    float scale, softcap;                                /* softcap 0: none */
    int32_t bf16, threads;
} paged;

INLINE f16v tanh_of(f16v x) {
    f16v e = exp_of(-2.0f * (f16v)((u16v)x & 0x7fffffffu)), positive = (1.0f - e) / (1.0f + e);
    return (f16v)((u16v)positive | ((u16v)x & 0x80000000u));
}

/* acc [size] = fade · acc + Σ weight·value over slots [from, to) of a page, `wide` vectors at a time; bf16 in the order
   of `deinterleave`. */
INLINE void mix(const float *weights, const void *values, float *acc, int64_t size, int64_t from, int64_t to, float fade,
                const int wide, const int bf16) {
    for (int64_t d = 0; d < size; d += 16 * wide) {
        f16v total[4], even, odd;
        for (int i = 0; i < wide; i++) total[i] = load(acc + d + 16 * i) * fade;
        for (int64_t j = from; j < to; j++) {
            int64_t at = j * size + d;
            if (bf16)
                for (int i = 0; i < wide; i += 2) {
                    halves((const uint16_t *)values + at + 16 * i, &even, &odd);
                    total[i] += weights[j] * even;
                    total[i + 1] += weights[j] * odd;
                }
            else
                for (int i = 0; i < wide; i++) total[i] += weights[j] * load((const float *)values + at + 16 * i);
        }
        for (int i = 0; i < wide; i++) store(acc + d + 16 * i, total[i]);
    }
}

INLINE void attend(const paged *p, int64_t row, int64_t head, const int bf16) {
    int64_t size = p->size, key_head = head / (p->heads / p->kv_heads), end = p->lengths[row];
    int64_t first = p->window && end > p->window ? end - p->window : 0;
    float q[MOST_SIZE], acc[MOST_SIZE] = {0}, weights[PAGE];
    float top = p->sinks ? p->sinks[head] : -INFINITY, all = p->sinks ? 1 : 0;
    memcpy(q, p->q + (row * p->heads + head) * size, (size_t)size * sizeof(float));
    if (bf16) deinterleave(q, size, 0);
    for (int64_t start = first / PAGE * PAGE; start < end; start += PAGE) {
        int64_t page = p->tables[row * p->stride + start / PAGE], at = (page * p->kv_heads + key_head) * PAGE * size;
        int64_t from = first > start ? first - start : 0, to = end - start < PAGE ? end - start : PAGE;
        const void *keys = bf16 ? (void *)((uint16_t *)p->keys + at) : (void *)((float *)p->keys + at);
        const void *values = bf16 ? (void *)((uint16_t *)p->values + at) : (void *)((float *)p->values + at);
        for (int64_t j = 0; j < PAGE; j++) {
            weights[j] = -INFINITY;
            if (j >= from && j < to)
                weights[j] = p->scale * (bf16 ? dot_bf16(q, (const uint16_t *)keys + j * size, size)
                                              : dot(q, (const float *)keys + j * size, size));
        }
        float higher = top;
        for (int64_t j = from; j < to; j++) {
            if (p->softcap) {
                f16v capped = p->softcap * tanh_of((f16v){0} + weights[j] / p->softcap);
                weights[j] = capped[0];
            }
            higher = weights[j] > higher ? weights[j] : higher;
        }
        f16v fade = exp_of((f16v){0} + (top - higher));
        all *= fade[0];
        for (int64_t j = 0; j < PAGE; j += 16) {
            f16v e = exp_of(load(weights + j) - higher);
            store(weights + j, e);
            all += sum(e);
        }
        if (size % 64 == 0) mix(weights, values, acc, size, from, to, fade[0], 4, bf16);
        else mix(weights, values, acc, size, from, to, fade[0], bf16 ? 2 : 1, bf16);
        top = higher;
    }
    float *out = p->out + (row * p->heads + head) * size;
    for (int64_t d = 0; d < size; d += 16) store(out + d, load(acc + d) / all);
    if (bf16) deinterleave(out, size, 1);
}

static void piece(const void *job, int64_t first, int64_t last) {
    const paged *p = job;
    int64_t group = p->heads / p->kv_heads;
    for (int64_t pair = first; pair < last; pair++)
        for (int64_t head = pair % p->kv_heads * group; head < (pair % p->kv_heads + 1) * group; head++)
            if (p->bf16) attend(p, pair / p->kv_heads, head, 1);
            else attend(p, pair / p->kv_heads, head, 0);
}

void halfbyte_paged_attention(const paged *p) {
    int64_t tokens = 1;
    for (int64_t row = 0; row < p->rows; row++) tokens += p->lengths[row];
    int64_t each = tokens / (p->rows ? p->rows : 1) * p->size * (p->heads / p->kv_heads);
    spread(piece, p, p->rows * p->kv_heads, 1 + (1 << 15) / (each + 1), p->threads);
}
