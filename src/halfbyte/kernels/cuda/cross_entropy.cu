/* Rows of logits, turned in place into the gradients of their cross-entropies: each is read once and written once.

A block takes row after row and holds what it takes whole: of a chunk of THREADS pieces of 8 logits a thread has one
piece, the first KEPT chunks of a row in registers, the others in a ring of shared memory. While a row is written the
next one comes into the places that fall free, AHEAD chunks before it is summed, and is summed. What a thread reads of
the ring it has copied itself, so warps wait for each other once a row only, where their sums meet.

Sums are relative to an origin of the thread's own, in units of log 2. It moves only where a logit is higher by more
than SLACK: fp32 has room for sums of 2^SLACK, and most pieces cost no rescaling.

Constants: THREADS, KEPT, AHEAD, BF16 (else fp16), SMOOTHING and ENTROPY (0 or 1: are they asked for). */

#include "warp.cuh"
#include "matrix.cuh"

constexpr int IGNORED = -1, OUTSIDE = -2; /* instead of a label */
constexpr u32 WARPS = THREADS / 32, CHUNK = THREADS * 16; /* bytes */
constexpr float SLACK = 32, LOWEST = -3.40282347e38f, LN_2 = 0.693147181f;

struct Task {
    u16 *logits;
    const long long *labels;
    float *loss, *logsumexp, *entropy;
    u64 stride;
    long long ignore;
    u32 rows, vocabulary, chunks; /* `chunks`: of a row, in shared memory */
    float slope, outer, smoothing, z_loss;
};

LAYOUT(AHEAD * CHUNK + 2 * WARPS * sizeof(float4), CHUNK, sizeof(Task)); /* and CHUNK for each of a row's chunks */

__device__ __forceinline__ void unpack(uint4 v, float (&x)[8]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        x[2 * i] = number<BF16>((u16)words[i]);
        x[2 * i + 1] = BF16 ? __uint_as_float(words[i] & 0xffff0000) : number<BF16>((u16)(words[i] >> 16));
    }
}

__device__ __forceinline__ float sum(const float (&x)[8]) {
    return (x[0] + x[1] + (x[2] + x[3])) + (x[4] + x[5] + (x[6] + x[7]));
}

struct Sums {
    float origin = LOWEST, total = 0, moment = 0, plain = 0; /* Σ 2^(z − origin), Σ z 2^(z − origin), Σ z */

    __device__ __forceinline__ void move(float to) {
        float shrink = exp2_approx(origin - to);
        total *= shrink, moment *= shrink, origin = to;
    }

    /* A piece, of whose logits `left` are of the row. */
    __device__ __forceinline__ void add(uint4 v, int left, float outer) {
        if (left <= 0)
            return;
        float x[8];
        unpack(v, x);
        if (left < 8)
#pragma unroll
            for (int i = 1; i < 8; i++)
                x[i] = i < left ? x[i] : __uint_as_float(0xff800000); /* −inf */
        float top = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
        if (top * outer > origin + SLACK)
            move(top * outer);
        float power[8], products[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            power[i] = exp2_approx(fmaf(x[i], outer, -origin));
            products[i] = power[i] > 0 ? power[i] * (x[i] * outer) : 0;
            x[i] = i < left ? x[i] * outer : 0;
        }
        total += sum(power);
        if (ENTROPY)
            moment += sum(products);
        if (SMOOTHING)
            plain += sum(x);
    }

    /* The sums of 2 · `from` neighbouring lanes. */
    template <u32 FROM> __device__ __forceinline__ void gather() {
        float top = origin;
#pragma unroll
        for (u32 mask = FROM; mask; mask /= 2)
            top = fmaxf(top, shuffle(top, mask));
        move(top);
#pragma unroll
        for (u32 mask = FROM; mask; mask /= 2) {
            total += shuffle(total, mask);
            if (ENTROPY)
                moment += shuffle(moment, mask);
            if (SMOOTHING)
                plain += shuffle(plain, mask);
        }
    }
};

/* What makes gradients of a row's logits. */
struct Gradient {
    int label;
    float logsumexp, factor, share, whole; /* the first in units of log 2 */

    /* Over the piece `at`, of whose logits `left` are of the row. */
    __device__ __forceinline__ void put(u16 *row, u32 at, int left, uint4 v, float outer) const {
        if (left <= 0)
            return;
        float x[8];
        unpack(v, x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = fmaf(exp2_approx(fmaf(x[i], outer, -logsumexp)), factor, -share);
        if ((u32)label - at < 8)
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] -= (u32)label - at == i ? whole : 0;
        v = make_uint4(pair<BF16>(x[0], x[1]), pair<BF16>(x[2], x[3]), pair<BF16>(x[4], x[5]), pair<BF16>(x[6], x[7]));
        if (label == IGNORED)
            v = make_uint4(0, 0, 0, 0);
        if (left >= 8) {
            *(uint4 *)(row + at) = v;
            return;
        }
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 7; i++)
            if (i < left)
                row[at + i] = (u16)(words[i / 2] >> i % 2 * 16);
    }
};

/* The block's row k, and its label; past its last row an ignored one. */
__device__ __forceinline__ u32 row_of(const Task &t, u32 k) {
    return blockIdx.x + k * gridDim.x;
}
__device__ __forceinline__ int label_of(const Task &t, u32 row) {
    long long label = row < t.rows ? t.labels[row] : t.ignore;
    return label == t.ignore ? IGNORED : label < 0 || label >= t.vocabulary ? OUTSIDE : (int)label;
}

/* The losses of a row from the sums of all threads; what its gradients are made with. */
__device__ __forceinline__ Gradient finish(const Task &t, Sums sums, u32 row, int label, float at_label, float4 *scratch) {
    const u32 lane = threadIdx.x % 32;
    sums.gather<16>();
    if (lane == 0)
        scratch[threadIdx.x / 32] = make_float4(sums.origin, sums.total, sums.moment, sums.plain);
    __syncthreads();
    float4 part = scratch[lane % WARPS];
    sums.origin = part.x, sums.total = part.y, sums.moment = part.z, sums.plain = part.w;
    sums.gather<WARPS / 2>();
    float logsumexp = sums.origin + log2f(sums.total);
    if (label == OUTSIDE)
        logsumexp = __uint_as_float(0x7fc00000); /* NaN */
    float natural = logsumexp * LN_2, loss = logsumexp - at_label;
    if (SMOOTHING)
        loss += t.smoothing * (at_label - sums.plain / t.vocabulary);
    if (threadIdx.x == 0) {
        bool ignored = label == IGNORED;
        t.loss[row] = ignored ? 0 : loss * LN_2 + t.z_loss * natural * natural;
        t.logsumexp[row] = ignored ? 0 : natural;
        if (ENTROPY)
            t.entropy[row] = ignored ? 0 : (logsumexp - sums.moment / sums.total) * LN_2;
    }
    return {label, logsumexp, t.slope * (1 + 2 * t.z_loss * natural), t.slope * t.smoothing / t.vocabulary,
            t.slope * (1 - t.smoothing)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) cross_entropy(Task t) {
    griddepcontrol_wait();
    const u32 mine = threadIdx.x * 8, slots = t.chunks + AHEAD;
    u8 *ring = shared + threadIdx.x * 16;
    float4 *scratch = (float4 *)(shared + slots * CHUNK);
    u32 now = row_of(t, 0), freed = 0, filled = t.chunks;
    int label = label_of(t, now);
    u16 *row = t.logits + now * t.stride, *before = row;
    Gradient gradient = {IGNORED};
    uint4 kept[KEPT];

    auto fetch = [&](u32 slot, const u16 *from, u32 chunk, bool live) {
        u32 at = (KEPT + chunk) * (THREADS * 8) + mine;
        bool inside = live && at < t.vocabulary;
        copy<16>(ring + slot * CHUNK, inside ? from + at : from, inside);
        commit();
    };
    /* Slot of chunk i of the first row: `filled` + i. */
    for (u32 i = 0; i < AHEAD; i++)
        fetch((filled + i) % slots, row, i, label != IGNORED);
    for (u32 k = 0;; k++) { /* row k − 1 is written, row k summed, row k + 1 begun */
        const bool sums = now < t.rows;
        const bool live = label != IGNORED;
        const u32 next = row_of(t, k + 1);
        const int next_label = label_of(t, next);
        u16 *after = next < t.rows ? t.logits + next * t.stride : row;
        float at_label = threadIdx.x == 0 && label >= 0 ? number<BF16>(row[label]) * t.outer : 0;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) {
            u32 at = i * (THREADS * 8) + mine;
            if (k)
                gradient.put(before, at, 8, kept[i], t.outer);
            if (live)
                kept[i] = from_global(row + at);
        }
        Sums found;
        for (u32 i = 0; i < t.chunks; i++) {
            const u32 at = (KEPT + i) * (THREADS * 8) + mine;
            const int left = (int)(t.vocabulary - at);
            if (k)
                gradient.put(before, at, left, *(const uint4 *)(ring + freed * CHUNK), t.outer);
            bool same = i + AHEAD < t.chunks;
            fetch(freed, same ? row : after, same ? i + AHEAD : i + AHEAD - t.chunks, same ? live : next_label != IGNORED);
            wait<AHEAD>();
            if (live)
                found.add(*(const uint4 *)(ring + filled * CHUNK), left, t.outer);
            freed = freed + 1 == slots ? 0 : freed + 1;
            filled = filled + 1 == slots ? 0 : filled + 1;
        }
        if (!sums)
            return;
        if (live)
#pragma unroll
            for (u32 i = 0; i < KEPT; i++)
                found.add(kept[i], 8, t.outer);
        gradient = finish(t, found, now, label, at_label, scratch + k % 2 * WARPS);
        before = row, row = after, now = next, label = next_label;
    }
}
