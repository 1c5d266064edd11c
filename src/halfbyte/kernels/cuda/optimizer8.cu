/* Optimizer steps with 8-bit state in bitsandbytes' dynamic map, for any number of parameters in one launch.

AdamW moves 16 bytes per fp32 element, and needs six table lookups: one to decode each state, and two or three to encode
it. Lookups of random codes in one table conflict in shared memory's banks, so there are 32 copies of each map, and each
lane reads the copy in its own bank. A block keeps the copies for all its tiles.

A warp updates 256 elements, which share a scale: each lane has two groups of four neighbours. A code is found without a
search: logarithm and fraction give a code that is at most one off, which the midpoints to its neighbours correct.

Constants: RULE, ROUNDING, WEIGHT and GRADIENT (dtypes), ALIGNED (addresses are multiples of 16 bytes). */

#include "warp.cuh"

enum { ADAMW, ADEMAMIX, LION, MOMENTUM, RMSPROP, ADAGRAD };
enum { NEAREST, STOCHASTIC, CORRECTION8, CORRECTION16 };
enum { FP32, BF16, FP16 };

constexpr int THREADS = 512, GROUP = 256, TILE = 2048;
constexpr int STATES = RULE == ADAMW ? 2 : RULE == ADEMAMIX ? 3 : 1;
constexpr bool HAS_UNSIGNED = STATES > 1, SQUARE = RULE == RMSPROP || RULE == ADAGRAD;
constexpr int ROWS = 257; /* a row of -inf below the first code */

struct Step {
    const int2 *tiles; /* number of the parameter, number of the tile in it */
    const long long *table; /* `columns` numbers per parameter: elements, row, weight, gradient, correction, states, draws */
    const float *coefficients; /* 13 per row: ops.optimizer.Coefficients */
    const float *steps;
    const float *found; /* null, or not 0: the step changes nothing */
    const float *values; /* [2, 256]: signed and unsigned map */
    u32 tile_count, columns;
};

LAYOUT((HAS_UNSIGNED ? 2 : 1) * ROWS * 32 * 4, 0, sizeof(Step));

__device__ __forceinline__ float widen(u16 bits, int dtype) {
    if (dtype == BF16) return __uint_as_float((u32)bits << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 narrow(float value, int dtype) {
    u16 bits;
    if (dtype == BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

/* Four neighbours from element `at` on; with FULL a single access, otherwise those below `left`. */
template <int DTYPE, bool FULL>
__device__ __forceinline__ void read(long long base, long long at, long long left, float (&v)[4]) {
    if (FULL && DTYPE == FP32) {
        const float4 four = *(const float4 *)((const float *)base + at);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else if (FULL) {
        const ushort4 four = *(const ushort4 *)((const u16 *)base + at);
        v[0] = widen(four.x, DTYPE), v[1] = widen(four.y, DTYPE), v[2] = widen(four.z, DTYPE), v[3] = widen(four.w, DTYPE);
    } else {
        for (int i = 0; i < 4; i++) {
            v[i] = 0;
            if (at + i < left) v[i] = DTYPE == FP32 ? ((const float *)base)[at + i] : widen(((const u16 *)base)[at + i], DTYPE);
        }
    }
}

template <int DTYPE, bool FULL>
__device__ __forceinline__ void write(long long base, long long at, long long left, const float (&v)[4]) {
    if (FULL && DTYPE == FP32) {
        *(float4 *)((float *)base + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (FULL) {
        *(ushort4 *)((u16 *)base + at) =
            make_ushort4(narrow(v[0], DTYPE), narrow(v[1], DTYPE), narrow(v[2], DTYPE), narrow(v[3], DTYPE));
    } else {
        for (int i = 0; i < 4; i++) {
            if (at + i >= left) continue;
            if (DTYPE == FP32) ((float *)base)[at + i] = v[i];
            else ((u16 *)base)[at + i] = narrow(v[i], DTYPE);
        }
    }
}

/* Bytes, as the four bytes of a word. */
template <bool FULL> __device__ __forceinline__ u32 read_bytes(long long base, long long at, long long left) {
    if (FULL) return *(const u32 *)((const u8 *)base + at);
    u32 word = 0;
    for (int i = 0; i < 4; i++)
        if (at + i < left) word |= (u32)((const u8 *)base)[at + i] << 8 * i;
    return word;
}

template <bool FULL> __device__ __forceinline__ void write_bytes(long long base, long long at, long long left, u32 word) {
    if (FULL) {
        *(u32 *)((u8 *)base + at) = word;
        return;
    }
    for (int i = 0; i < 4; i++)
        if (at + i < left) ((u8 *)base)[at + i] = word >> 8 * i;
}

/* Code of a ratio in [-1, 1]; `map` is this lane's copy of the map. */
template <bool SIGNED, bool POSITIVE> __device__ __forceinline__ u32 encode(float ratio, const float *map) {
    const float size = fabsf(ratio);
    float logarithm, shrink;
    asm("lg2.approx.f32 %0, %1;" : "=f"(logarithm) : "f"(size));
    /* decade e covers (10^(e-7), 10^(e-6)] with 2^e equal cells, twice as many without a sign */
    const int decade = min(max((int)(logarithm * 0.30103f + 7.0f), 0), 6);
    const int cells = (SIGNED ? 1 : 2) << decade;
    asm("ex2.approx.f32 %0, %1;" : "=f"(shrink) : "f"((float)decade * -2.321928095f)); /* 0.2^e = 10^-e * 2^e */
    const float place = size * (shrink * ((SIGNED ? 1e6f : 2e6f) / 0.9f)) - (float)cells * (1.0f / 9.0f);
    const int cell = min(max((int)place, 0), cells - 1) + cells;
    const int code = SIGNED ? 127 + (ratio < 0 ? -cell : cell) : cell - 1;
    const float *own = map + code * 32;
    const float below = own[-32], value = own[0], above = own[32];
    int moved = code + (ratio > __fmul_rn(__fadd_rn(value, above), 0.5f));
    moved -= ratio <= __fmul_rn(__fadd_rn(below, value), 0.5f);
    if (SIGNED && !POSITIVE && moved == 127 && ratio < 0) moved = 126;
    if (POSITIVE && ratio > 0) moved = max(moved, SIGNED ? 128 : 1);
    return moved;
}

struct State {
    long long codes;
    float *scale;
    float values[2][4];

    template <bool FULL> __device__ __forceinline__ void load(const long long *entry, long long at, long long left, const float *map) {
        codes = entry[0];
        scale = (float *)entry[1] + at / GROUP;
        const float old = *scale;
        const int lane = threadIdx.x % 32;
        for (int k = 0; k < 2; k++) {
            const u32 word = read_bytes<FULL>(codes, at + k * 128 + lane * 4, left);
            for (int i = 0; i < 4; i++) values[k][i] = map[(word >> 8 * i & 255) * 32] * old;
        }
    }

    template <bool FULL, bool SIGNED, bool POSITIVE>
    __device__ __forceinline__ void store(long long at, long long left, const float *map) {
        const int lane = threadIdx.x % 32;
        float largest = 0;
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < 4; i++)
                if (FULL || at + k * 128 + lane * 4 + i < left) largest = fmaxf(largest, fabsf(values[k][i]));
        /* floats that are not negative are ordered as integers */
        u32 bits;
        asm("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(bits) : "r"(__float_as_uint(largest)));
        largest = __uint_as_float(bits);
        if (lane == 0) *scale = largest;
        const float inverse = largest == 0 ? 1.0f : __fdiv_rn(1.0f, largest);
        for (int k = 0; k < 2; k++) {
            u32 word = 0;
            for (int i = 0; i < 4; i++) word |= encode<SIGNED, POSITIVE>(values[k][i] * inverse, map) << 8 * i;
            write_bytes<FULL>(codes, at + k * 128 + lane * 4, left, word);
        }
    }
};

__device__ __forceinline__ u32 hash32(long long element, u32 step, u32 number) {
    u32 x = (u32)(element ^ element >> 32) ^ step;
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    x = x ^ x >> 16 ^ number;
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

/* Sums and products that are not fused: the compiler would choose FMAs differently in full and in last groups, and the
   result of an element must not depend on where a parameter is cut, by `shard` or by windows of offloaded state. */
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float mix(float a, float x, float b, float y) { return __fadd_rn(mul(a, x), mul(b, y)); }
__device__ __forceinline__ float less(float a, float b) { return __fadd_rn(a, -b); }

__device__ __forceinline__ float root_of(float x) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

/* Update the 256 elements from `at` on; `left` is the parameter's number of elements. */
template <bool FULL>
__device__ __forceinline__ void update(const Step &step, const long long *entry, long long at, long long left, const float *maps) {
    const int lane = threadIdx.x % 32;
    const u32 row = (u32)entry[1];
    const float *c = step.coefficients + row * 13;
    const float factor = c[0], decay = c[1], rate = c[2], root = c[3], eps = c[4];
    const float beta1 = c[6], rest1 = c[7], beta2 = c[8], rest2 = c[9];
    const float *with_sign = maps + lane, *without = maps + ROWS * 32 + lane;
    float p[2][4], g[2][4];
    u32 bytes[2];
    State s1, s2, s3;
    for (int k = 0; k < 2; k++) {
        const long long place = at + k * 128 + lane * 4;
        read<WEIGHT, FULL>(entry[2], place, left, p[k]);
        read<GRADIENT, FULL>(entry[3], place, left, g[k]);
        if (ROUNDING == CORRECTION8) bytes[k] = read_bytes<FULL>(entry[4], place, left);
    }
    s1.load<FULL>(entry + 5, at, left, with_sign);
    if (STATES == 2) s2.load<FULL>(entry + 7, at, left, without);
    if (STATES == 3) s2.load<FULL>(entry + 7, at, left, with_sign), s3.load<FULL>(entry + 9, at, left, without);
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 4; i++) {
            const long long place = at + k * 128 + lane * 4 + i;
            float w = p[k][i], gradient = mul(g[k][i], factor);
            float &a = s1.values[k][i], &b = s2.values[k][i], &d = s3.values[k][i];
            if (ROUNDING == CORRECTION8) w = __int_as_float(__float_as_int(w) + ((int)(signed char)(bytes[k] >> 8 * i) << 8));
            if (ROUNDING == CORRECTION16 && (FULL || place < left))
                w = __int_as_float(__float_as_int(w) + ((const short *)entry[4])[place]);
            if (RULE == ADAMW || RULE == ADEMAMIX || RULE == LION) w = less(w, mul(decay, w));
            else gradient = __fadd_rn(gradient, mul(decay, w));
            if (RULE == ADAMW) {
                a = mix(beta1, a, rest1, gradient);
                b = mix(beta2, b, mul(rest2, gradient), gradient);
                w = less(w, __fdividef(mul(rate, a), __fadd_rn(mul(root_of(b), root), eps)));
            } else if (RULE == ADEMAMIX) {
                a = mix(beta1, a, rest1, gradient);
                b = mix(c[10], b, c[11], gradient);
                d = mix(beta2, d, mul(rest2, gradient), gradient);
                w = less(w, __fdividef(mul(rate, mix(a, c[12], c[5], b)), __fadd_rn(mul(root_of(d), root), eps)));
            } else if (RULE == LION) {
                const float direction = mix(beta1, a, rest1, gradient);
                w = less(w, direction > 0 ? rate : direction < 0 ? -rate : 0.0f);
                a = mix(beta2, a, rest2, gradient);
            } else if (RULE == MOMENTUM) {
                a = __fadd_rn(mul(beta1, a), gradient);
                w = less(w, mul(rate, a));
            } else {
                a = RULE == RMSPROP ? mix(beta1, a, mul(rest1, gradient), gradient) : __fadd_rn(a, mul(gradient, gradient));
                w = less(w, __fdividef(mul(rate, gradient), __fadd_rn(root_of(a), eps)));
            }
            p[k][i] = w;
        }
    }
    s1.store<FULL, true, SQUARE>(at, left, with_sign);
    if (STATES == 2) s2.store<FULL, false, true>(at, left, without);
    if (STATES == 3) s2.store<FULL, true, false>(at, left, with_sign), s3.store<FULL, false, true>(at, left, without);
    for (int k = 0; k < 2; k++) {
        const long long place = at + k * 128 + lane * 4;
        u32 errors = 0;
        for (int i = 0; i < 4 && ROUNDING != NEAREST; i++) {
            int bits = __float_as_int(p[k][i]);
            if (ROUNDING == STOCHASTIC) {
                const u32 noise = hash32(entry[12] + place + i, (u32)step.steps[row], (u32)entry[11]) & 0xFFFF;
                bits = (bits + (int)noise) & -65536;
            } else {
                if (ROUNDING == CORRECTION8) bits = (bits + 0x80) & -256;
                const int near = (bits + 0x8000) & -65536;
                if (ROUNDING == CORRECTION8) errors |= (u32)(u8)((bits - near) >> 8) << 8 * i;
                else if (FULL || place + i < left) ((short *)entry[4])[place + i] = (short)(bits - near);
                bits = near;
            }
            p[k][i] = __int_as_float(bits);
        }
        if (ROUNDING == CORRECTION8) write_bytes<FULL>(entry[4], place, left, errors);
        write<WEIGHT, FULL>(entry[2], place, left, p[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) optimizer8(Step step) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    if (step.found && *step.found != 0) return;
    float *maps = (float *)shared;
    for (int i = threadIdx.x; i < (HAS_UNSIGNED ? 2 : 1) * ROWS * 32; i += THREADS) {
        const int row = i / 32 % ROWS;
        maps[i] = row ? step.values[(i / 32 / ROWS) * 256 + row - 1] : -__int_as_float(0x7f800000);
    }
    __syncthreads();
    const u32 warps = gridDim.x * (THREADS / 32);
    for (u32 group = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; group < step.tile_count * (TILE / GROUP); group += warps) {
        const int2 tile = step.tiles[group / (TILE / GROUP)];
        const long long *entry = step.table + (long long)tile.x * step.columns;
        const long long at = (long long)tile.y * TILE + group % (TILE / GROUP) * GROUP, left = entry[0];
        if (ALIGNED && at + GROUP <= left) update<true>(step, entry, at, left, maps + 32);
        else if (at < left) update<false>(step, entry, at, left, maps + 32);
    }
}
