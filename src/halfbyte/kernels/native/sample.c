/* CPU kernel of halfbyte.ops.sample: Philox-4x32-10 (Salmon et al. 2011, section 3.3), sixteen counters at a time. */

#include "threads.h"
#include "vectors.h"

typedef uint64_t u8w __attribute__((vector_size(64)));

typedef struct {
    const float *logits;   /* [rows, vocabulary] */
    const int64_t *places; /* [rows, 3]: prompt, generation, position */
    const uint8_t *kept;   /* [rows, vocabulary], or NULL */
    int64_t *tokens;
    float *log_probs;
    int64_t rows, vocabulary, seed;
    float temperature;
    int32_t threads;
} sampler;

enum { CHUNK = 64, ROUNDS = 10 };

INLINE void multiply(u16v x, uint32_t by, u16v *high, u16v *low) {
    u8w even = ((u8w)x & 0xffffffffu) * by, odd = ((u8w)x >> 32) * by;
    *high = (u16v)((even >> 32) | (odd & 0xffffffff00000000u));
    *low = (u16v)((even & 0xffffffffu) | (odd << 32));
}

INLINE u16v interleave(u16v a, u16v b, const int upper) {
    return upper ? __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
                 : __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

/* 64 words: those of the counters `quarter` to quarter + 15, in order. */
INLINE void philox(uint32_t quarter, const int64_t *place, int64_t seed, u16v out[4]) {
    const u16v lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    u16v c0 = lanes + quarter, c1 = (u16v){0} + (uint32_t)place[2], c2 = (u16v){0} + (uint32_t)place[1];
    u16v c3 = (u16v){0} + (uint32_t)place[0], high[2], low[2];
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
    for (int i = 0; i < ROUNDS; i++) {
        multiply(c0, 0xD2511F53u, &high[0], &low[0]);
        multiply(c2, 0xCD9E8D57u, &high[1], &low[1]);
        c0 = high[1] ^ c1 ^ k0, c1 = low[1], c2 = high[0] ^ c3 ^ k1, c3 = low[0];
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    u16v evens[2] = {interleave(c0, c2, 0), interleave(c0, c2, 1)}, odds[2] = {interleave(c1, c3, 0), interleave(c1, c3, 1)};
    for (int i = 0; i < 4; i++) out[i] = interleave(evens[i / 2], odds[i / 2], i % 2);
}

/* log(x) of normal x > 0, to 1 or 2 ulp (the polynomial of Cephes' logf). */
INLINE f16v log_of(f16v x) {
    i16v bits = (i16v)x, power = (bits >> 23) - 126;
    f16v m = (f16v)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    i16v small = m < 0.707106781f;
    m = choose(small, m + m, m) - 1.0f;
    f16v n = __builtin_convertvector(power + small, f16v), square = m * m; /* `small` is -1 where true */
    f16v p = 7.0376836292e-2f * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    return m + (p * m * square - 2.12194440e-4f * n - 0.5f * square) + 0.693359375f * n;
}

/* -log E for E = -log(1 - v), with v from a random word. */
INLINE f16v gumbel(u16v word) {
    f16v high = __builtin_convertvector((i16v)(word >> 8), f16v), low = __builtin_convertvector((i16v)(word & 0xff), f16v);
    f16v v = (high * 256.0f + (low + 0.5f)) * 0x1p-32f; /* rounded once; the reference rounds conversion and sum */
    v = choose(v > 1.0f - 0x1p-24f, (f16v){0} + (1.0f - 0x1p-24f), v);
    f16v series = v * (1.0f + v * (0.5f + v * (1.0f / 3 + v * 0.25f)));
    return -log_of(choose(v < 0x1p-6f, series, -log_of(1.0f - v)));
}

static void row_of(const sampler *s, int64_t row) {
    const float *logits = s->logits + row * s->vocabulary;
    const uint8_t *kept = s->kept ? s->kept + row * s->vocabulary : 0;
    const i16v lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f16v top = (f16v){0} - INFINITY, best = top, total = {0};
    i16v where = {0}, unknown = {0};
    float t = s->temperature ? s->temperature : 1.0f;
    for (int pass = 0; pass < 2; pass++) {
        float highest = -INFINITY;
        for (int i = 0; i < 16; i++) highest = top[i] > highest ? top[i] : highest;
        for (int64_t at = 0; at < s->vocabulary; at += CHUNK) {
            float z[CHUNK];
            int64_t left = s->vocabulary - at < CHUNK ? s->vocabulary - at : CHUNK;
            for (int i = 0; i < CHUNK; i++) z[i] = -INFINITY;
            memcpy(z, logits + at, (size_t)left * sizeof(float));
            u16v words[4];
            if (pass && s->temperature) philox((uint32_t)(at / 4), s->places + 3 * row, s->seed, words);
            for (int i = 0; i < CHUNK; i += 16) {
                f16v score = load(z + i) / t;
                if (!pass) {
                    unknown |= score != score;
                    top = choose(score > top, score, top);
                    continue;
                }
                total += exp_of(score - highest);
                if (s->temperature) score += gumbel(words[i / 16]);
                if (kept)
                    for (int j = 0; j < 16; j++)
                        if (i + j >= left || !kept[at + i + j]) score[j] = -INFINITY;
                i16v better = score > best;
                best = choose(better, score, best);
                where = ((lanes + (int32_t)(at + i)) & better) | (where & ~better);
            }
        }
        if (pass) {
            int found = 0;
            for (int i = 1; i < 16; i++)
                if (best[i] > best[found] || (best[i] == best[found] && where[i] < where[found])) found = i;
            int64_t token = where[found];
            s->tokens[row] = token;
            s->log_probs[row] = logits[token] / t - highest - logf(sum(total));
        }
    }
    for (int i = 0; i < 16; i++)
        if (unknown[i]) s->log_probs[row] = NAN;
}

static void piece(const void *job, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) row_of(job, row);
}

void halfbyte_sample(const sampler *s) { spread(piece, s, s->rows, 1, s->threads); }
