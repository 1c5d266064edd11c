/* CPU kernel of halfbyte.ops.optimizer: weights, states and corrections of all parameters of a launch, in one pass.

   A tile of a parameter is decoded to fp32 buffers that fit the L1 cache, updated and encoded again; fp32 tensors are
   updated in place. Operations and their order are the reference's, without FMA, so results are equal to it. */

#include <math.h>

#include "threads.h"
#include "values.h"

#ifndef __clang__
#pragma GCC optimize("no-trapping-math") /* GCC then vectorizes loops with a choice between two results */
#endif

enum { ADAMW, ADEMAMIX, LION, MOMENTUM, RMSPROP, ADAGRAD };
enum { STATE_FP32, STATE_BF16, DYNAMIC8, COMPANDED8 };
enum { NO_TRUST, LAMB, LARS, CLIP }; /* ops.optimizer.TRUSTS */
enum { NEAREST, STOCHASTIC, CORRECTION8, CORRECTION16 };
enum { TILE = 512, GRAIN = 32, LARGEST_BLOCK = 256 };

typedef struct { /* of a parameter: ops.optimizer.Coefficients */
    float scale, decay, rate, root, eps, alpha, beta1, rest1, beta2, rest2, beta3, rest3, first;
} coefficients;

typedef struct { void *codes, *scales; } state;

typedef struct { /* a row of the address table */
    int64_t elements, row;
    void *weight;
    const void *gradient;
    void *correction;
    state states[3];
    int64_t number, first; /* ops.optimizer.Parameters.draws */
} parameter;

typedef struct { /* of the signed or the unsigned codes of a storage */
    const float *values;     /* of each code, for a scale of 1 */
    const uint32_t *buckets; /* entries of `dynamic_block` */
} code_table;

typedef struct {
    const parameter *parameters;
    const int64_t *ends; /* number of tiles up to and including each parameter */
    const coefficients *coefficients;
    const float *steps;
    code_table tables[2]; /* unsigned, signed */
    int64_t tiles;
    double *squares; /* [tiles, 2], written if there is a trust ratio, in place of an update */
    int32_t rule, storage, rounding, weight, gradient, threads, trust;
} update_job;

/* Rules: p, g and the states are fp32 [n]. */

static void adamw(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, coefficients c,
                  int n) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * c.scale, decayed = p[i] - c.decay * p[i];
        m[i] = c.beta1 * m[i] + c.rest1 * grad;
        v[i] = c.beta2 * v[i] + c.rest2 * grad * grad;
        p[i] = decayed - c.rate * m[i] / (sqrtf(v[i]) * c.root + c.eps);
    }
}

static void ademamix(float *restrict p, const float *restrict g, float *restrict fast, float *restrict slow,
                     float *restrict v, coefficients c, int n) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * c.scale, decayed = p[i] - c.decay * p[i];
        fast[i] = c.beta1 * fast[i] + c.rest1 * grad;
        slow[i] = c.beta3 * slow[i] + c.rest3 * grad;
        v[i] = c.beta2 * v[i] + c.rest2 * grad * grad;
        p[i] = decayed - c.rate * (fast[i] * c.first + c.alpha * slow[i]) / (sqrtf(v[i]) * c.root + c.eps);
    }
}

static void lion(float *restrict p, const float *restrict g, float *restrict m, coefficients c, int n) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * c.scale, decayed = p[i] - c.decay * p[i], mixed = c.beta1 * m[i] + c.rest1 * grad;
        float sign = (mixed > 0 ? 1.0f : 0.0f) - (mixed < 0 ? 1.0f : 0.0f);
        m[i] = c.beta2 * m[i] + c.rest2 * grad;
        p[i] = decayed - c.rate * sign;
    }
}

static void momentum(float *restrict p, const float *restrict g, float *restrict m, coefficients c, int n) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * c.scale + c.decay * p[i];
        m[i] = c.beta1 * m[i] + grad;
        p[i] = p[i] - c.rate * m[i];
    }
}

static void rmsprop(float *restrict p, const float *restrict g, float *restrict v, coefficients c, int n) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * c.scale + c.decay * p[i];
        v[i] = c.beta1 * v[i] + c.rest1 * grad * grad;
        p[i] = p[i] - c.rate * grad / (sqrtf(v[i]) + c.eps);
    }
}

static void adagrad(float *restrict p, const float *restrict g, float *restrict v, coefficients c, int n) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * c.scale + c.decay * p[i];
        v[i] = v[i] + grad * grad;
        p[i] = p[i] - c.rate * grad / (sqrtf(v[i]) + c.eps);
    }
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Conversion of n values of a tensor, from element `at` on. */

static void widen(float *restrict out, const void *restrict in, int64_t at, int n, int dtype) {
    const uint16_t *bits = (const uint16_t *)in + at;
    const _Float16 *halves = (const _Float16 *)in + at;
    if (dtype == BF16)
        for (int i = 0; i < n; i++) out[i] = float_of((uint32_t)bits[i] << 16);
    else
        for (int i = 0; i < n; i++) out[i] = (float)halves[i];
}

static void narrow(void *restrict out, const float *restrict in, int64_t at, int n, int dtype) {
    uint16_t *halves = (uint16_t *)out + at;
    if (dtype == FP16) {
        for (int i = 0; i < n; i++) ((_Float16 *)halves)[i] = (_Float16)in[i];
        return;
    }
    for (int i = 0; i < n; i++) { /* to the nearest, ties to even; NaN is 0x7fc0 as torch's */
        uint32_t bits = bits_of(in[i]), near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        halves[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : near);
    }
}

/* Storages. Loops run over whole blocks; values behind the parameter's end are zero. */

INLINE int block_of(int storage) { return storage == COMPANDED8 ? 32 : 256; }

INLINE float scale_at(state s, int64_t number, int storage) {
    if (storage == COMPANDED8) return (float)((const _Float16 *)s.scales)[number];
    return ((const float *)s.scales)[number];
}

INLINE void decode_as(state s, int64_t start, int n, float *restrict out, const float *restrict values, int storage,
                      int is_signed) {
    const int block = block_of(storage), blocks = (n + block - 1) / block;
    const uint8_t *codes = (const uint8_t *)s.codes + start;
    uint8_t copy[TILE];
    if (n % block) codes = memcpy(copy, codes, (size_t)n); /* loops read whole blocks */
    for (int b = 0; b < blocks; b++, codes += block, out += block) {
        float scale = scale_at(s, start / block + b, storage);
        for (int i = 0; i < block; i++) out[i] = values[codes[i]] * scale;
        if (storage == COMPANDED8 && !is_signed)
            for (int i = 0; i < block; i++) out[i] *= out[i];
    }
    if (n % block) memset(out - (block - n % block), 0, (size_t)(block - n % block) * 4);
}

/* Codes of dynamic8 for the values of one block, whose magnitudes are at most `divisor`.

   `key` is the ratio's bits as an integer with the same order. A bucket holds the keys that are equal but for the
   lowest `shift` bits; at most one midpoint of neighbouring codes is among them. A bucket's entry has the number of
   smaller midpoints in its upper 8 bits. Adding the lower bits of the key carries into them if the key is above the
   midpoint.
   Loops are separate because scalar loads from the table are faster than gathers on current processors. */
INLINE void dynamic_block(const float *restrict values, float divisor, uint8_t *restrict codes,
                          const uint32_t *restrict buckets, int is_signed, int square) {
    const int block = block_of(DYNAMIC8), shift = is_signed ? 17 : 16;
    const int32_t lowest = is_signed ? -(0x3f800000 >> shift) - 1 : 0; /* bucket of -1 */
    const uint32_t least = is_signed ? 128 : 1;
    uint16_t bucket[LARGEST_BLOCK];
    uint32_t sums[LARGEST_BLOCK];
    for (int i = 0; i < block; i++) {
        int32_t key = (int32_t)bits_of(values[i] / divisor);
        if (is_signed) key ^= (key >> 31) & 0x7fffffff;
        bucket[i] = (uint16_t)((key >> shift) - lowest);
        sums[i] = (uint32_t)key & ((1u << shift) - 1);
    }
    for (int i = 0; i < block; i++) sums[i] += buckets[bucket[i]];
    for (int i = 0; i < block; i++) {
        uint32_t code = sums[i] >> 24;
        if (square) code = values[i] > 0 && code < least ? least : code;
        codes[i] = (uint8_t)code;
    }
}

INLINE void companded_block(const float *restrict values, float divisor, uint8_t *restrict codes, int is_signed,
                            int square) {
    const float even = 12582912.0f; /* adding and subtracting 1.5·2^23 rounds to the nearest even integer */
    for (int i = 0; i < 32; i++) {
        float ratio = values[i] / divisor;
        ratio = ratio > 1.0f ? 1.0f : ratio;
        if (is_signed) {
            ratio = ratio < -1.0f ? -1.0f : ratio;
            codes[i] = (uint8_t)(int32_t)(127.0f * (2.0f * ratio / (1.0f + fabsf(ratio))) + even - even);
        } else {
            int32_t code = (int32_t)(255.0f * ratio + even - even);
            if (square) code = values[i] > 0 && code < 1 ? 1 : code;
            codes[i] = (uint8_t)code;
        }
    }
}

INLINE void encode_as(state s, int64_t start, int n, float *restrict values, const code_table *table, int storage,
                      int is_signed, int square) {
    const int block = block_of(storage), blocks = (n + block - 1) / block;
    uint8_t *codes = (uint8_t *)s.codes + start, buffer[LARGEST_BLOCK];
    for (int b = 0; b < blocks; b++, values += block, codes += block) {
        int64_t number = start / block + b;
        if (storage == COMPANDED8 && !is_signed)
            for (int i = 0; i < block; i++) values[i] = sqrtf(values[i]);
        int32_t top = 0; /* bits of magnitudes are ordered like them */
        for (int i = 0; i < block; i++) {
            int32_t size = (int32_t)(bits_of(values[i]) & 0x7fffffffu);
            top = size > top ? size : top;
        }
        float scale = float_of((uint32_t)top);
        if (storage == COMPANDED8) {
            _Float16 half = (_Float16)scale;
            ((_Float16 *)s.scales)[number] = half;
            scale = (float)half;
        } else {
            ((float *)s.scales)[number] = scale;
        }
        float divisor = scale == 0.0f ? 1.0f : scale;
        int left = n - b * block < block ? n - b * block : block;
        uint8_t *to = left < block ? buffer : codes;
        if (storage == COMPANDED8) companded_block(values, divisor, to, is_signed, square);
        else if (top < 0x7f800000) dynamic_block(values, divisor, to, table->buckets, is_signed, square);
        else memset(to, 0, (size_t)block); /* NaN or Inf: any codes will do */
        if (left < block) memcpy(codes, buffer, (size_t)left);
    }
}

#define BY_SIGN(function, storage, ...)                                        \
    if (is_signed) function(__VA_ARGS__, storage, 1);                          \
    else function(__VA_ARGS__, storage, 0)

static void decode(const update_job *job, state s, int64_t start, int n, float *out, int is_signed) {
    const float *values = job->tables[is_signed].values;
    switch (job->storage) {
    case STATE_BF16: widen(out, s.codes, start, n, BF16); break;
    case DYNAMIC8: BY_SIGN(decode_as, DYNAMIC8, s, start, n, out, values); break;
    case COMPANDED8: BY_SIGN(decode_as, COMPANDED8, s, start, n, out, values); break;
    }
}

/* Unsigned states are second moments; signed ones are with RMSprop and Adagrad. */
#define BY_KIND(storage)                                                       \
    if (!is_signed) encode_as(s, start, n, values, table, storage, 0, 1);      \
    else if (square) encode_as(s, start, n, values, table, storage, 1, 1);     \
    else encode_as(s, start, n, values, table, storage, 1, 0)

static void encode(const update_job *job, state s, int64_t start, int n, float *values, int is_signed, int square) {
    const code_table *table = &job->tables[is_signed];
    switch (job->storage) {
    case STATE_BF16: narrow(s.codes, values, start, n, BF16); break;
    case DYNAMIC8: BY_KIND(DYNAMIC8); break;
    case COMPANDED8: BY_KIND(COMPANDED8); break;
    }
}

/* Rounding of bf16 weights. */

static void add_correction(float *p, const void *correction, int64_t start, int n, int rounding) {
    const int8_t *bytes = (const int8_t *)correction + start;
    const int16_t *words = (const int16_t *)correction + start;
    if (rounding == CORRECTION8)
        for (int i = 0; i < n; i++) p[i] = float_of(bits_of(p[i]) + ((uint32_t)bytes[i] << 8));
    else
        for (int i = 0; i < n; i++) p[i] = float_of(bits_of(p[i]) + (uint32_t)words[i]);
}

static void split_correction(float *restrict p, void *restrict correction, int64_t start, int n, int rounding) {
    int8_t *bytes = (int8_t *)correction + start;
    int16_t *words = (int16_t *)correction + start;
    for (int i = 0; i < n; i++) {
        uint32_t bits = bits_of(p[i]);
        if (rounding == CORRECTION8) bits = (bits + 0x80) & ~0xffu;
        uint32_t near = (bits + 0x8000) & ~0xffffu;
        p[i] = float_of(near);
        if (rounding == CORRECTION8) bytes[i] = (int8_t)((int32_t)(bits - near) >> 8);
        else words[i] = (int16_t)(bits - near);
    }
}

/* ops.optimizer.hash32 */
INLINE uint32_t hashed(uint32_t x, uint32_t step, uint32_t number) {
    for (int i = 0; i < 2; i++) {
        x ^= i ? number : step;
        x = (x ^ x >> 16) * 0x85EBCA6Bu;
        x = (x ^ x >> 13) * 0xC2B2AE35u;
        x ^= x >> 16;
    }
    return x;
}

static void round_stochastically(float *p, uint64_t first, int n, uint32_t step, uint32_t number) {
    for (int i = 0; i < n; i++) {
        uint64_t element = first + (uint64_t)i;
        uint32_t noise = hashed((uint32_t)(element ^ element >> 32), step, number) & 0xffff;
        p[i] = float_of((bits_of(p[i]) + noise) & ~0xffffu);
    }
}

static void update_tile(const update_job *job, const parameter *entry, int64_t start) {
    float buffers[5][TILE] __attribute__((aligned(64)));
    int n = entry->elements - start < TILE ? (int)(entry->elements - start) : TILE;
    coefficients c = job->coefficients[entry->row];
    const int many = job->rule == ADEMAMIX ? 3 : job->rule == ADAMW ? 2 : 1;
    const int square = job->rule == RMSPROP || job->rule == ADAGRAD;
    float *p = job->weight == FP32 ? (float *)entry->weight + start : buffers[0], *s[3];
    const float *g = job->gradient == FP32 ? (const float *)entry->gradient + start : buffers[1];
    if (job->weight != FP32) widen(p, entry->weight, start, n, job->weight);
    if (job->gradient != FP32) widen(buffers[1], entry->gradient, start, n, job->gradient);
    if (job->rounding >= CORRECTION8) add_correction(p, entry->correction, start, n, job->rounding);
    for (int i = 0; i < many; i++) {
        s[i] = job->storage == STATE_FP32 ? (float *)entry->states[i].codes + start : buffers[2 + i];
        decode(job, entry->states[i], start, n, s[i], many == 1 || i < many - 1);
    }
    switch (job->rule) {
    case ADAMW: adamw(p, g, s[0], s[1], c, n); break;
    case ADEMAMIX: ademamix(p, g, s[0], s[1], s[2], c, n); break;
    case LION: lion(p, g, s[0], c, n); break;
    case MOMENTUM: momentum(p, g, s[0], c, n); break;
    case RMSPROP: rmsprop(p, g, s[0], c, n); break;
    case ADAGRAD: adagrad(p, g, s[0], c, n); break;
    }
    for (int i = 0; i < many; i++) encode(job, entry->states[i], start, n, s[i], many == 1 || i < many - 1, square);
    uint32_t step = (uint32_t)(int64_t)job->steps[entry->row];
    uint64_t first = (uint64_t)(entry->first + start);
    if (job->rounding == STOCHASTIC) round_stochastically(p, first, n, step, (uint32_t)entry->number);
    else if (job->rounding != NEAREST) split_correction(p, entry->correction, start, n, job->rounding);
    if (job->weight != FP32) narrow(entry->weight, p, start, n, job->weight);
}

/* Of n values, at most TILE, of which those up to the next multiple of LANES are overwritten. */
static double sum_of_squares(float *x, int n) {
    enum { LANES = 32 };
    double lanes[LANES] = {0}, sum = 0;
    for (int i = n; i % LANES; i++) x[i] = 0;
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += (double)x[i + j] * (double)x[i + j];
    for (int j = 0; j < LANES; j++) sum += lanes[j];
    return sum;
}

/* Squares of the weights of a tile, and of what the trust ratio compares with them: ops.optimizer.scale_by_trust. */
static void square_tile(const update_job *job, const parameter *entry, int64_t start, double *out) {
    float p[TILE], g[TILE], moved[TILE], s[2][TILE];
    int n = entry->elements - start < TILE ? (int)(entry->elements - start) : TILE;
    coefficients c = job->coefficients[entry->row], step = c;
    const int many = job->rule == ADAMW ? 2 : 1;
    if (job->weight == FP32) memcpy(p, (const float *)entry->weight + start, (size_t)n * 4);
    else widen(p, entry->weight, start, n, job->weight);
    if (job->gradient == FP32) memcpy(g, (const float *)entry->gradient + start, (size_t)n * 4);
    else widen(g, entry->gradient, start, n, job->gradient);
    if (job->rounding >= CORRECTION8) add_correction(p, entry->correction, start, n, job->rounding);
    for (int i = 0; i < n; i++) g[i] *= c.scale;
    out[0] = sum_of_squares(p, n);
    if (job->trust == LARS) {
        out[1] = sum_of_squares(g, n);
        return;
    }
    for (int i = 0; i < many; i++) {
        if (job->storage == STATE_FP32) memcpy(s[i], (const float *)entry->states[i].codes + start, (size_t)n * 4);
        else decode(job, entry->states[i], start, n, s[i], many == 1 || i < many - 1);
    }
    memset(moved, 0, sizeof moved);
    step.scale = 1, step.decay = 0, step.rate = job->trust == LAMB ? c.rate : c.first;
    if (job->rule == ADAMW) {
        adamw(moved, g, s[0], s[1], step, n);
    } else {
        for (int i = 0; i < n; i++) g[i] += c.decay * p[i];
        momentum(moved, g, s[0], step, n);
    }
    if (job->trust == LAMB)
        for (int i = 0; i < n; i++) moved[i] = c.decay * p[i] - moved[i];
    out[1] = sum_of_squares(moved, n);
}

static void update_tiles(const void *given, int64_t first, int64_t last) {
    const update_job *job = given;
    int64_t number = 0, start = 0;
    while (job->ends[number] <= first) start = job->ends[number++];
    for (int64_t tile = first; tile < last; tile++) {
        while (job->ends[number] <= tile) start = job->ends[number++];
        const parameter *entry = job->parameters + number;
        if (job->trust) square_tile(job, entry, (tile - start) * TILE, job->squares + 2 * tile);
        else update_tile(job, entry, (tile - start) * TILE);
    }
}

int64_t halfbyte_optimizer_tile(void) { return TILE; }

void halfbyte_update_parameters(const update_job *job) {
    if (job->tiles) spread(update_tiles, job, job->tiles, GRAIN, job->threads);
}

/* ops.optimizer.scheduled_beta3 */
static double scheduled_beta3(double t, double beta1, double beta3, double horizon) {
    double share = fmin(t / fmax(horizon, 1.0), 1.0), low = log(beta1), high = log(beta3);
    double grown = fmin(exp(low * high / ((1.0 - share) * high + share * low)), beta3);
    return horizon > 0 ? grown : beta3;
}

/* ops.optimizer.prepare_step; settings has rows of ops.optimizer.SETTINGS. */
void halfbyte_prepare_step(const double *settings, const int32_t *groups, float *steps, coefficients *out, int64_t n,
                           int rule, double factor, int counted) {
    const int corrects = rule == ADAMW || rule == ADEMAMIX, decoupled = corrects || rule == LION;
    for (int64_t i = 0; i < n; i++) {
        steps[i] += (float)counted;
        if (i && groups[i] == groups[i - 1] && steps[i] == steps[i - 1]) {
            out[i] = out[i - 1];
            continue;
        }
        const double *row = settings + 9 * (int64_t)groups[i], t = steps[i], lr = row[0];
        double beta1 = row[2], beta2 = row[3], beta3 = row[4], alpha = row[6];
        if (rule == ADEMAMIX) {
            if (row[7] > 0) alpha *= fmin(t / row[7], 1.0);
            beta3 = scheduled_beta3(t, beta1, beta3, row[8]);
        }
        double first = corrects ? 1.0 / (1.0 - pow(beta1, t)) : 1.0;
        double root = corrects ? 1.0 / sqrt(1.0 - pow(beta2, t)) : 1.0;
        out[i] = (coefficients){
            .scale = (float)factor,
            .decay = (float)(row[1] * (decoupled ? lr : 1.0)),
            .rate = (float)(lr * (rule == ADAMW ? first : 1.0)),
            .root = (float)root,
            .eps = (float)row[5],
            .alpha = (float)alpha,
            .beta1 = (float)beta1,
            .rest1 = (float)(1.0 - beta1),
            .beta2 = (float)beta2,
            .rest2 = (float)(1.0 - beta2),
            .beta3 = (float)beta3,
            .rest3 = (float)(1.0 - beta3),
            .first = (float)first,
        };
    }
}
