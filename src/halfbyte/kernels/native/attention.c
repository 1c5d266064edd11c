/* CPU kernels of halfbyte.ops.attention, in fp32: causal attention of documents that may share a prompt, and its
   backward.

   A piece is a tree (a prompt with its answers, or one document) and a key head with the queries that share it. Blocks
   of queries meet blocks of keys, first the prompt's, then their own document's, both from their first token on. So a
   document's result depends only on its own tokens, and every sum has one order. The forward keeps a running maximum
   (Dao et al. 2022, arXiv:2205.14135, section 3.1); the backward recomputes the scores from their logsumexp (Dao 2023,
   arXiv:2307.08691, algorithm 2). Matmuls use 8 rows by 32 columns in registers. */

#include <stdlib.h>

#include "threads.h"
#include "vectors.h"

enum { BLOCK = 64, STRIP = 16, ROWS = 8, MOST_SIZE = 256 };

typedef struct { const float *at; int64_t row, head; } rows_in; /* [tokens, heads, size] and its strides */

typedef struct {
    rows_in q, k, v, o, dout;
    float *out, *logsumexp, *dq, *dk, *dv; /* [N, Hq, D], [Hq, N]; [N, Hq, D], [N, Hk, D] twice */
    const float *sums;                     /* logsumexp of the forward */
    const int32_t *begins, *lasts, *openings, *closings; /* of queries; the last two may be NULL: no prompts */
    int64_t tokens, skipped, heads, kv_heads, size;      /* skipped: tokens before the first query */
    float scale;
    int32_t threads;
    /* set here */
    const int64_t *trees;
    int64_t count;
    atomic_int *failed;
} attention;

typedef struct {
    float q[MOST_SIZE * BLOCK], dout[MOST_SIZE * BLOCK]; /* transposed: [size, BLOCK] */
    float scores[BLOCK * BLOCK], slopes[BLOCK * BLOCK], acc[BLOCK * MOST_SIZE];
    float top[BLOCK], all[BLOCK], delta[BLOCK];
} block;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

/* c [rows, 16·wide] += a·b, or = if `overwrite`. a has row stride BLOCK, or is transposed if `transposed`. */
INLINE void tile(const float *a, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t depth, int overwrite,
                 const int transposed, const int rows, const int wide) {
    f16v total[ROWS][2], right[2];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) total[i][j] = overwrite ? (f16v){0} : load(c + i * c_row + 16 * j);
    for (int64_t k = 0; k < depth; k++) {
        for (int j = 0; j < wide; j++) right[j] = load(b + k * b_row + 16 * j);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < wide; j++) total[i][j] += (transposed ? a[k * BLOCK + i] : a[i * BLOCK + k]) * right[j];
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) store(c + i * c_row + 16 * j, total[i][j]);
}

INLINE void product(const float *a, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t rows,
                    int64_t columns, int64_t depth, int overwrite, const int transposed) {
    const int64_t next = transposed ? 1 : BLOCK;
    for (int64_t r = 0; r < rows;) {
        int taken = rows - r >= ROWS ? ROWS : rows - r >= 4 ? 4 : 1;
        for (int64_t n = 0; n < columns; n += 32) {
            const float *left = a + r * next, *right = b + n;
            float *to = c + r * c_row + n;
            if (columns - n >= 32) {
                if (taken == ROWS) tile(left, right, b_row, to, c_row, depth, overwrite, transposed, ROWS, 2);
                else if (taken == 4) tile(left, right, b_row, to, c_row, depth, overwrite, transposed, 4, 2);
                else tile(left, right, b_row, to, c_row, depth, overwrite, transposed, 1, 2);
            } else {
                if (taken == ROWS) tile(left, right, b_row, to, c_row, depth, overwrite, transposed, ROWS, 1);
                else if (taken == 4) tile(left, right, b_row, to, c_row, depth, overwrite, transposed, 4, 1);
                else tile(left, right, b_row, to, c_row, depth, overwrite, transposed, 1, 1);
            }
        }
        r += taken;
    }
}

/* Matmuls with a plain and a transposed left operand. */
static void multiply(const float *a, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t rows,
                     int64_t columns, int64_t depth, int overwrite) {
    product(a, b, b_row, c, c_row, rows, columns, depth, overwrite, 0);
}

static void multiply_transposed(const float *a, const float *b, int64_t b_row, float *c, int64_t c_row, int64_t rows,
                            int64_t columns, int64_t depth, int overwrite) {
    product(a, b, b_row, c, c_row, rows, columns, depth, overwrite, 1);
}

/* Transpose rows [first, first + count) of a head to [size, stride], padded with zeros to a multiple of 16. */
static void transpose(const rows_in *from, int64_t head, int64_t first, int64_t count, int64_t size, float *to,
                 int64_t stride) {
    const float *rows = from->at + first * from->row + head * from->head;
    for (int64_t t = 0; t < round16(count); t += 16)
        for (int64_t d = 0; d < size; d++)
            for (int64_t i = t; i < t + 16; i++) to[d * stride + i] = i < count ? rows[i * from->row + d] : 0.0f;
}

/* Token ranges that a document's queries attend to, in order: its prompt, and itself. */
typedef struct { int64_t begin, end, opening, closing; } document;

static document document_at(const attention *p, int64_t begin, int64_t most) {
    int64_t end = begin + 1, query = begin - p->skipped;
    while (end < most && p->begins[end - p->skipped] == p->begins[query]) end++;
    return (document){begin, end, p->openings ? p->openings[query] : 0, p->openings ? p->closings[query] : 0};
}

/* scores = q·k of a block of `rows` queries with `count` keys; on the diagonal, only strips with visible keys. */
static void score(const float *transposed_q, const float *transposed_k, int64_t stride, float *scores, int64_t rows,
                  int64_t count, int64_t size, int diagonal) {
    for (int64_t i = 0; i < rows; i += STRIP) {
        int64_t columns = round16(diagonal ? least(count, i + STRIP) : count);
        multiply_transposed(transposed_q + i, transposed_k, stride, scores + i * BLOCK, BLOCK, least(STRIP, rows - i), columns, size, 1);
    }
}

static i16v before(int64_t first, int64_t limit) {
    i16v place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return place < (int32_t)(limit - first);
}

static void softmax_row(const attention *p, block *w, int64_t i, int64_t limit) { /* transpose a row of scores into weights */
    float *row = w->scores + i * BLOCK;
    f16v none = (f16v){0} - INFINITY, most = none;
    for (int64_t n = 0; n < limit; n += 16) {
        f16v x = choose(before(n, limit), load(row + n) * p->scale, none);
        store(row + n, x);
        most = choose(x > most, x, most);
    }
    float higher = w->top[i];
    for (int j = 0; j < 16; j++) higher = most[j] > higher ? most[j] : higher;
    f16v fade = exp_of((f16v){0} + (w->top[i] - higher)), total = {0};
    for (int64_t n = 0; n < limit; n += 16) {
        f16v e = exp_of(load(row + n) - higher);
        store(row + n, e);
        total += e;
    }
    w->all[i] = w->all[i] * fade[0] + sum(total);
    w->top[i] = higher;
    if (fade[0] != 1.0f)
        for (int64_t d = 0; d < p->size; d += 16) store(w->acc + i * p->size + d, load(w->acc + i * p->size + d) * fade[0]);
}

static void attend(const attention *p, block *w, const float *keys, int64_t stride, int64_t tree, document of, int64_t head,
                   int64_t first) {
    int64_t rows = least(BLOCK, of.end - first), size = p->size, key_head = head / (p->heads / p->kv_heads);
    transpose(&p->q, head, first - p->skipped, rows, size, w->q, BLOCK);
    memset(w->acc, 0, (size_t)(rows * size) * sizeof(float));
    for (int64_t i = 0; i < rows; i++) w->top[i] = -INFINITY, w->all[i] = 0;
    for (int own = 0; own < 2; own++) {
        int64_t from = own ? of.begin : of.opening, to = own ? first + rows : of.closing;
        for (int64_t at = from; at < to; at += BLOCK) {
            int64_t count = least(BLOCK, to - at);
            int diagonal = own && at == first;
            score(w->q, keys + at - tree, stride, w->scores, rows, count, size, diagonal);
            for (int64_t i = 0; i < rows; i++) softmax_row(p, w, i, diagonal ? i + 1 : count);
            const float *values = p->v.at + at * p->v.row + key_head * p->v.head;
            for (int64_t i = 0; i < rows; i += STRIP)
                multiply(w->scores + i * BLOCK, values, p->v.row, w->acc + i * size, size, least(STRIP, rows - i), size,
                         diagonal ? least(count, i + STRIP) : count, 0);
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t query = first - p->skipped + i;
        float *out = p->out + (query * p->heads + head) * size;
        for (int64_t d = 0; d < size; d += 16) store(out + d, load(w->acc + i * size + d) / w->all[i]);
        p->logsumexp[head * (p->tokens - p->skipped) + query] = w->top[i] + logf(w->all[i]);
    }
}

static void forward(const void *job, int64_t first, int64_t last) {
    const attention *p = job;
    int64_t group = p->heads / p->kv_heads;
    for (int64_t piece = first; piece < last; piece++) {
        int64_t tree = p->trees[piece / p->kv_heads], end = p->trees[piece / p->kv_heads + 1], head = piece % p->kv_heads;
        int64_t stride = round16(end - tree) + 16;
        float *keys = malloc((size_t)(p->size * stride) * sizeof(float));
        block *w = malloc(sizeof(block));
        if (keys && w) {
            transpose(&p->k, head, tree, end - tree, p->size, keys, stride);
            for (int64_t at = tree + p->skipped; at < end;) {
                document of = document_at(p, at, end);
                for (int64_t h = head * group; h < (head + 1) * group; h++)
                    for (int64_t q = of.begin; q < of.end; q += BLOCK) attend(p, w, keys, stride, tree, of, h, q);
                at = of.end;
            }
        } else atomic_store(p->failed, 1);
        free(keys), free(w);
    }
}

/* Turn a row of scores into weights, and dout·v in `slopes` into the gradient of q·k. */
INLINE void differentiate(const attention *p, block *w, int64_t i, int64_t limit, int64_t width, float sums) {
    float *weights = w->scores + i * BLOCK, *slopes = w->slopes + i * BLOCK;
    for (int64_t n = 0; n < width; n += 16) {
        f16v e = choose(before(n, limit), exp_of(load(weights + n) * p->scale - sums), (f16v){0});
        store(weights + n, e);
        store(slopes + n, e * (load(slopes + n) - w->delta[i]) * p->scale);
    }
}

typedef struct { float *keys, *values, *dk, *dv; int64_t stride, tree; } tree_of_head; /* [size, stride]; dk, dv: [tokens, size] */

static void differentiate_block(const attention *p, block *w, const tree_of_head *t, document of, int64_t head,
                                int64_t first) {
    int64_t rows = least(BLOCK, of.end - first), size = p->size, key_head = head / (p->heads / p->kv_heads);
    const float *queries = p->q.at + first * p->q.row + head * p->q.head;
    const float *dout = p->dout.at + first * p->dout.row + head * p->dout.head;
    const float *out = p->o.at + first * p->o.row + head * p->o.head, *sums = p->sums + head * p->tokens + first;
    transpose(&p->q, head, first, rows, size, w->q, BLOCK);
    transpose(&p->dout, head, first, rows, size, w->dout, BLOCK);
    memset(w->acc, 0, (size_t)(rows * size) * sizeof(float));
    for (int64_t i = 0; i < rows; i++) w->delta[i] = dot(dout + i * p->dout.row, out + i * p->o.row, size);
    for (int own = 0; own < 2; own++) {
        int64_t from = own ? of.begin : of.opening, to = own ? first + rows : of.closing;
        for (int64_t at = from; at < to; at += BLOCK) {
            int64_t count = least(BLOCK, to - at), place = at - t->tree;
            int diagonal = own && at == first;
            score(w->q, t->keys + place, t->stride, w->scores, rows, count, size, diagonal);
            score(w->dout, t->values + place, t->stride, w->slopes, rows, count, size, diagonal);
            for (int64_t i = 0; i < rows; i++) {
                int64_t width = round16(diagonal ? least(count, i / STRIP * STRIP + STRIP) : count);
                differentiate(p, w, i, diagonal ? i + 1 : count, width, sums[i]);
            }
            const float *keys = p->k.at + at * p->k.row + key_head * p->k.head;
            for (int64_t i = 0; i < rows; i += STRIP)
                multiply(w->slopes + i * BLOCK, keys, p->k.row, w->acc + i * size, size, least(STRIP, rows - i), size,
                         diagonal ? least(count, i + STRIP) : count, 0);
            for (int64_t j = 0; j < count; j += STRIP) {
                int64_t seen = diagonal ? j : 0, strip = least(STRIP, count - j), to_key = (place + j) * size;
                multiply_transposed(w->slopes + seen * BLOCK + j, queries + seen * p->q.row, p->q.row, t->dk + to_key, size, strip,
                                size, rows - seen, 0);
                multiply_transposed(w->scores + seen * BLOCK + j, dout + seen * p->dout.row, p->dout.row, t->dv + to_key, size,
                                strip, size, rows - seen, 0);
            }
        }
    }
    for (int64_t i = 0; i < rows; i++)
        memcpy(p->dq + ((first + i) * p->heads + head) * size, w->acc + i * size, (size_t)size * sizeof(float));
}

static void backward(const void *job, int64_t first, int64_t last) {
    const attention *p = job;
    int64_t group = p->heads / p->kv_heads, size = p->size;
    for (int64_t piece = first; piece < last; piece++) {
        int64_t tree = p->trees[piece / p->kv_heads], end = p->trees[piece / p->kv_heads + 1], head = piece % p->kv_heads;
        int64_t stride = round16(end - tree) + 16, count = end - tree;
        float *room = malloc((size_t)(2 * size * stride) * sizeof(float));
        float *sums = calloc((size_t)(2 * size * count), sizeof(float));
        block *w = malloc(sizeof(block));
        if (room && sums && w) {
            tree_of_head t = {room, room + size * stride, sums, sums + size * count, stride, tree};
            transpose(&p->k, head, tree, count, size, t.keys, stride);
            transpose(&p->v, head, tree, count, size, t.values, stride);
            for (int64_t at = tree; at < end;) {
                document of = document_at(p, at, end);
                for (int64_t h = head * group; h < (head + 1) * group; h++)
                    for (int64_t q = of.begin; q < of.end; q += BLOCK) differentiate_block(p, w, &t, of, h, q);
                at = of.end;
            }
            for (int64_t i = 0; i < count; i++) {
                int64_t to = ((tree + i) * p->kv_heads + head) * size;
                memcpy(p->dk + to, t.dk + i * size, (size_t)size * sizeof(float));
                memcpy(p->dv + to, t.dv + i * size, (size_t)size * sizeof(float));
            }
        } else atomic_store(p->failed, 1);
        free(room), free(sums), free(w);
    }
}

/* Returns 0, or 1 if memory is exhausted. With queries for the last tokens only, all tokens are one tree, since a later
   query's prompt may be anywhere. */
static int each_tree(attention *p, stage run) {
    int64_t *trees = malloc((size_t)(p->tokens + 1) * sizeof(int64_t)), count = 0;
    atomic_int failed = trees == NULL;
    if (trees) {
        for (int64_t at = 0; at < p->tokens; at = p->skipped ? p->tokens : p->lasts[at]) trees[count++] = at;
        trees[count] = p->tokens;
        p->trees = trees, p->count = count, p->failed = &failed;
        spread(run, p, count * p->kv_heads, 1, p->threads);
    }
    free(trees);
    return atomic_load(&failed);
}

int halfbyte_attention(attention *p) { return each_tree(p, forward); }
int halfbyte_attention_backward(attention *p) { return each_tree(p, backward); }
