/* The gated unit with its low-rank products, ops/lora_glu.py, for ranks of 8 and 16.

A block takes a strip of 32·WARPS columns and walks down a part of the rows, 16 at a time; a warp takes 32 of the
columns. All blocks have equally many steps, so some continue at the top of the next strip. Every number of [M, I] is
touched by one lane only: the lane copies its own 16 bytes of a row into its slot of the ring and stores the results
from registers. For this, columns are permuted within a warp: it has 16 rows by
32 columns as four tiles of 16×8, and column n of tile j (n < 8, j < 4) is column 8 (n / 2) + 2 j + n % 2 of the tensor,
so that a lane has eight adjacent numbers in each of two rows.

    g, u, dh    [rows, columns] += low-rank rows [rows, r] · factor [r, columns]
    v, u_d      [rows, r]       += dg, du or h in registers · factor [columns, r]
    dBᵀ, dA     [r, columns]    += low-rank rows [r, rows] · dg, du, h, transposed in registers (movmatrix)

dB and dA stay in registers along the part. v and u_d are added over a block's warps in shared memory, in a fixed order,
while the next step runs. `finish` adds the partial results of strips and parts, in a fixed order.

Constants: BACKWARD, WARPS, BLOCKS (per multiprocessor), STAGES (of the ring), BF16 (else fp16), SILU (else gelu_tanh),
R_GATE, R_UP, R_DOWN (8 or 16), FLOAT8 (0; 1 for E4M3, 2 for E5M2: dtype of h, or of dg and du), COLUMNS (factors of
columns before the cast), DROPOUT (mask of the down projection's adapter, `ops/dropout.py`). */

#include "warp.cuh"
#include "matrix.cuh"

constexpr u32 STRIP = 32 * WARPS;
constexpr u32 TENSORS = BACKWARD ? 3 : 2; /* inputs of shape [M, I]; there are as many low-rank ones */
constexpr u32 SUMS = BACKWARD ? 4 : 2;    /* fragments of 16×8: of v, or u_d */

/* Shared memory: matrices of 8×8, 128 bytes each, of the factors [tensor][warp][tile j][half of r] and of low-rank
   rows [slot][tensor][half of r][half of rows]; [odd][warp] sums; the ring [stage][warp][tensor][half of rows]. */
constexpr u32 LOW = 3 * WARPS * 1024, SLOT = TENSORS * 512, EXCHANGE = LOW + (STAGES + 1) * SLOT;
constexpr u32 RING = EXCHANGE + 2 * WARPS * SUMS * 512, STAGE = TENSORS * 1024, FACTORS = RING + STAGES * WARPS * STAGE;

struct Unit {
    const u16 *tensors[3];   /* g₀, u₀, dh₀ [rows, width] */
    const u16 *low, *v_down; /* [rows, R_GATE + R_UP], [rows, R_DOWN] */
    const u16 *factors[3];   /* B_g, B_u [width, r]; A_d [r, width] */
    u8 *out[2];              /* h; dg and du, which in FP8 are the halves of the rows of one tensor */
    void *partial;           /* [strip, 16 rows, SUMS, lane] of v in 16 bits, of u_d in fp32 */
    float *gradients;        /* [part of a strip's rows, R_GATE + R_UP + R_DOWN, width] */
    u16 *sum;                /* v or u_d */
    float *gradient;         /* dB_g and dB_u [width, r], dA_d [r, width] */
    const float *columns, *scale;
    float *newest;
    const u64 *seed;                /* of the mask */
    u32 rows, width, strips, share; /* `share`: steps per block */
    u32 first_column, threshold;    /* of the mask */
    float scales[2], drop_scale;
};

LAYOUT(FACTORS + 2 * STRIP * 4, 0, sizeof(Unit));

struct alignas(16) Four { float x[4]; };

__device__ __forceinline__ float half_of(u32 pair, u32 i) { return number<BF16>((u16)(i ? pair >> 16 : pair)); }

/* Cast two neighbours to FP8. */
__device__ __forceinline__ u32 cast(u32 both, const float *factors, float scale, float &amax) {
    float first = half_of(both, 0), second = half_of(both, 1);
    if (COLUMNS)
        first *= factors[0], second *= factors[1];
    amax = larger(larger(amax, first), second);
    return float8<FLOAT8 == 2>(first * scale, second * scale);
}

/* Raise the amax in global memory to the largest of a warp; NaN counts as infinite. */
__device__ __forceinline__ void record_amax(float *newest, float amax) {
#pragma unroll
    for (u32 mask = 16; mask; mask /= 2)
        amax = larger(amax, shuffle(amax, mask));
    if (threadIdx.x % 32 == 0)
        raise(newest, amax == amax ? amax : __uint_as_float(0x7f800000));
}

/* Offset of this lane's row for loading four transposed matrices; the middle two are exchanged, as the operands of a
   product require. */
__device__ __forceinline__ u32 transposed_place(u32 lane) { return (lane & 7 | (lane & 8) << 1 | (lane & 16) >> 1) * 16; }

/* sums [rows, r] += tiles 2 p and 2 p + 1 · factor; p = 0 starts from zero. */
__device__ __forceinline__ void gather(
    float (&sums)[2][4], const u32 (&tiles)[4][2], const u8 *factor, u32 p, u32 lane) {
    const u32 a[4] = {tiles[2 * p][0], tiles[2 * p][1], tiles[2 * p + 1][0], tiles[2 * p + 1][1]};
    u32 b[4];
    load_matrices_transposed(b, factor + p * 512 + transposed_place(lane));
#pragma unroll
    for (u32 half = 0; half < 2; half++)
        if (p == 0)
            multiply_from_zero<BF16>(sums[half], a, b[2 * half], b[2 * half + 1]);
        else
            multiply<BF16>(sums[half], a, b[2 * half], b[2 * half + 1]);
}

/* sums [r, columns] += low-rank rows · tiles 2 p and 2 p + 1, both transposed. */
__device__ __forceinline__ void learn(float (&sums)[4][4], const u8 *rows, const u32 (&tiles)[4][2], u32 p, u32 lane) {
    u32 a[4];
    load_matrices_transposed(a, rows + transposed_place(lane));
#pragma unroll
    for (u32 j = 2 * p; j < 2 * p + 2; j++)
        multiply<BF16>(sums[j], a, transpose(tiles[j][0]), transpose(tiles[j][1]));
}

/* The sum of `count` groups of four from `at` on with stride `apart`, in 16 bits or fp32. BATCH of them are loaded
   concurrently. */
template <bool HALF, u32 BATCH>
__device__ __forceinline__ Four sum_of(const void *from, u64 at, u64 apart, u32 count) {
    Four sum = {};
    for (u32 begin = 0; begin < count; begin += BATCH) {
        Four next[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u64 place = at + (begin + i) * apart;
            const bool there = begin + i < count;
            if (HALF) {
                const uint2 w = there ? ((const uint2 *)from)[place] : uint2{};
                next[i] = Four{half_of(w.x, 0), half_of(w.x, 1), half_of(w.y, 0), half_of(w.y, 1)};
            } else {
                const uint4 w = there ? ((const uint4 *)from)[place] : uint4{};
                next[i] = Four{__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
            }
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                sum.x[k] += next[i].x[k];
    }
    return sum;
}

/* Rank of the gate, up or down projection, and the offset of its part of the gradients. */
__device__ __forceinline__ constexpr u32 rank_of(u32 i) { return i == 0 ? R_GATE : i == 1 ? R_UP : R_DOWN; }
__device__ __forceinline__ constexpr u32 begin_of(u32 i) { return i == 0 ? 0 : i == 1 ? R_GATE : R_GATE + R_UP; }

/* a(g) and a'(g). */
__device__ __forceinline__ float activate(float g, float &derivative) {
    const float square = g * g, twice = 1.5957691216057308f; /* 2 √(2/π) */
    const float z = SILU ? g : twice * g * (1.0f + 0.044715f * square);
    const float p = rcp_approx(1.0f + exp2_approx(z * -1.4426950408889634f)), activated = g * p;
    derivative = p + activated * (1.0f - p) * (SILU ? 1.0f : twice * (1.0f + 0.134145f * square));
    return activated;
}

/* The mask: its seed's halves, mixed, and a lane's keys of its two rows. */
__device__ __forceinline__ u32 mix(u32 h) {
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    return h ^ h >> 16;
}
struct Mask {
    u32 low, high, first[2], second[2], column, threshold;
    float scale;

    __device__ __forceinline__ Mask(const Unit &unit, u32 column)
        : column(unit.first_column + column), threshold(unit.threshold), scale(unit.drop_scale) {
        if (DROPOUT)
            low = mix((u32)*unit.seed), high = mix((u32)(*unit.seed >> 32));
    }
    __device__ __forceinline__ void at_rows(u32 row) {
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            first[half] = mix(row + 8 * half + low), second[half] = first[half] * 0x9e3779b9u + high;
    }
    /* Factor of a number of row 8 · half and of the lane's column `i`. */
    __device__ __forceinline__ float factor(u32 half, u32 i) const {
        const u32 h = ((column + i) ^ first[half]) * 0x7feb352du;
        return (h ^ h >> 15 ^ second[half]) * 0x846ca68bu >= threshold ? scale : 0.0f;
    }
};

/* A warp's work on its 32 columns. */
struct Columns {
    const Unit &unit;
    u32 warp, lane, column, first, end; /* column: the first of this lane's eight; first, end: rows of the part */
    bool inside;

    __device__ __forceinline__ Columns(const Unit &unit, u32 strip, u32 step, u32 steps)
        : unit(unit), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        column = strip * STRIP + warp * 32 + lane % 4 * 8, inside = column < unit.width;
        first = 16 * step, end = min(unit.rows, first + 16 * steps);
    }

    __device__ __forceinline__ u8 *factor(u32 tensor) const { return shared + (tensor * WARPS + warp) * 1024; }

    /* Copy the factors of the warp's columns to shared memory, a column per lane, zero outside ranks and width. */
    __device__ __forceinline__ void fill() const {
        const u32 mine = column - lane % 4 * 8 + lane;
        u8 *row = shared + warp * 1024 + lane % 8 / 2 * 256 + (lane / 8 * 2 + lane % 2) * 16;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 tensor = 0; tensor < 2; tensor++) {
                const bool there = mine < unit.width && 8 * half < rank_of(tensor);
                const u16 *from = unit.factors[tensor] + (u64)mine * rank_of(tensor) + 8 * half;
                uint4 *to = (uint4 *)(row + tensor * WARPS * 1024 + half * 128);
                *to = there ? from_global(from) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (u32 r = 8 * half; r < 8 * half + 8; r++) {
                const bool there = mine < unit.width && r < R_DOWN;
                const u16 number = there ? unit.factors[2][(u64)r * unit.width + mine] : 0;
                *(u16 *)(row + 2 * WARPS * 1024 + half * 128 + r % 8 * 2) = number;
            }
        }
        if (FLOAT8 && COLUMNS) {
            float *factors = (float *)(shared + FACTORS) + warp * 32 + lane;
            factors[0] = mine < unit.width ? unit.columns[mine] : 0;
            factors[STRIP] = mine < unit.width ? unit.columns[unit.width + mine] : 0;
        }
    }

    __device__ __forceinline__ u8 *stage_of(u32 step) const {
        return shared + RING + (step % STAGES * WARPS + warp) * STAGE + lane * 16;
    }

    /* Start copying a step's numbers and low-rank rows. */
    __device__ __forceinline__ void fetch(u32 step) const {
        const u32 row = first + 16 * step;
        if (row < end) {
            u8 *to = stage_of(step);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 at = row + 8 * half + lane / 4;
                const bool there = inside && at < end;
                const u64 offset = there ? (u64)at * unit.width + column : 0;
#pragma unroll
                for (u32 tensor = 0; tensor < TENSORS; tensor++)
                    copy<16>(to + (2 * tensor + half) * 512, unit.tensors[tensor] + offset, there);
            }
            if (threadIdx.x < 32 * TENSORS) { /* a warp per tensor: half of r, half of rows, row */
                const u32 half = lane / 16, at = row + lane % 16;
                const bool there = at < end && 8 * half < rank_of(warp);
                const u16 *from = warp == 2 ? unit.v_down + (u64)at * R_DOWN
                                            : unit.low + (u64)at * (R_GATE + R_UP) + begin_of(warp);
                u8 *low = shared + LOW + step % (STAGES + 1) * SLOT;
                copy<16>(low + threadIdx.x * 16, there ? from + 8 * half : unit.low, there);
            }
        }
        commit();
    }

    /* Add the sums of all warps for a step; warps alternate. */
    __device__ __forceinline__ void put(u32 step) const {
        const u32 i = (warp + step * SUMS) % WARPS;
        if (i >= SUMS)
            return;
        const Four *from = (const Four *)(shared + EXCHANGE) + (step % 2 * WARPS * SUMS + i) * 32 + lane;
        Four sum = from[0];
#pragma unroll
        for (u32 w = 1; w < WARPS; w++)
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                sum.x[k] += from[w * SUMS * 32].x[k];
        const u64 steps = (unit.rows + 15) / 16;
        const u64 at = ((column / STRIP * steps + first / 16 + step) * SUMS + i) * 32 + lane;
        if (BACKWARD) {
            const float scale = unit.scales[i / 2];
            uint2 both;
            both.x = pair<BF16>(sum.x[0] * scale, sum.x[1] * scale);
            both.y = pair<BF16>(sum.x[2] * scale, sum.x[3] * scale);
            ((uint2 *)unit.partial)[at] = both;
        } else
            ((Four *)unit.partial)[at] = sum;
    }

    /* Store a step's results for one output tensor. */
    __device__ __forceinline__ void write(
        const u32 (&packed)[4][2], u32 row, u32 tensor, float scale, float &amax) const {
        alignas(16) float factors[8];
        if (FLOAT8 && COLUMNS) {
            const Four *from = (const Four *)(shared + FACTORS) + (tensor * STRIP + warp * 32 + lane % 4 * 8) / 4;
            ((Four *)factors)[0] = from[0], ((Four *)factors)[1] = from[1];
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 at = row + 8 * half + lane / 4;
            const bool there = inside && at < end;
            if (FLOAT8) {
                u32 codes[4];
#pragma unroll
                for (u32 j = 0; j < 4; j++)
                    codes[j] = cast(packed[j][half], factors + 2 * j, scale, amax);
                if (there)
                    store(unit.out[tensor] + (u64)at * unit.width * (BACKWARD ? 2 : 1) + column,
                          uint2{codes[0] | codes[1] << 16, codes[2] | codes[3] << 16});
            } else if (there)
                store(unit.out[tensor] + ((u64)at * unit.width + column) * 2,
                      make_uint4(packed[0][half], packed[1][half], packed[2][half], packed[3][half]));
        }
    }

    /* Store this part's contribution to dBᵀ and dA. */
    __device__ __forceinline__ void store_gradients(const float (&gradients)[3][4][4], u32 part) const {
        float *out = unit.gradients + (u64)part * (R_GATE + R_UP + R_DOWN) * unit.width + column;
#pragma unroll
        for (u32 tensor = 0; tensor < 3; tensor++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 half = i / 2, r = 8 * half + lane / 4;
                const float(&a)[4] = gradients[tensor][i % 2 * 2], (&b)[4] = gradients[tensor][i % 2 * 2 + 1];
                if (r < rank_of(tensor))
                    ((Four *)(out + (u64)(begin_of(tensor) + r) * unit.width))[i % 2] =
                        Four{a[2 * half], a[2 * half + 1], b[2 * half], b[2 * half + 1]};
            }
    }
};

/* sums = x · factor, for tiles 2 p and 2 p + 1. */
__device__ __forceinline__ void complete(float (&sums)[2][4], const u32 (&x)[4], const u8 *factor, u32 p, u32 lane) {
    u32 b[4];
    load_matrices(b, factor + p * 512 + lane * 16);
    multiply_from_zero<BF16>(sums[0], x, b[0], b[1]);
    multiply_from_zero<BF16>(sums[1], x, b[2], b[3]);
}

/* A step's results: [tile][half of rows], each a pair: columns 2 j and 2 j + 1 of this lane's eight. */
struct Packed { u32 hidden[4][2], dropped[4][2], gate[4][2], up[4][2]; /* h, and with the mask; dg and du */ };

/* Compute tiles 2 p and 2 p + 1 of the gated unit from the inputs and the low-rank terms. */
__device__ __forceinline__ void compute(
    Packed &packed, const uint4 (&raw)[TENSORS][2], const float (&g)[2][4], const float (&u)[2][4],
    const float (&dh)[2][4], const Mask &mask, u32 p, float gate_scale, float up_scale) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 tile = i / 2, half = i % 2, j = 2 * p + tile;
        float hidden[2], dropped[2], gate[2], up[2];
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            const u32 at = 2 * half + k;
            float base[TENSORS], derivative;
#pragma unroll
            for (u32 tensor = 0; tensor < TENSORS; tensor++) {
                const uint4 &w = raw[tensor][half];
                base[tensor] = half_of(j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w, k);
            }
            const float full = base[1] + up_scale * u[tile][at];
            const float activated = activate(base[0] + gate_scale * g[tile][at], derivative);
            const float factor = DROPOUT ? mask.factor(half, 2 * j + k) : 1.0f;
            hidden[k] = activated * full, dropped[k] = hidden[k] * factor;
            if (BACKWARD) {
                const float d = base[TENSORS - 1] + dh[tile][at] * factor;
                gate[k] = d * full * derivative, up[k] = d * activated;
            }
        }
        packed.hidden[j][half] = pair<BF16>(hidden[0], hidden[1]);
        packed.dropped[j][half] = DROPOUT ? pair<BF16>(dropped[0], dropped[1]) : packed.hidden[j][half];
        if (BACKWARD)
            packed.gate[j][half] = pair<BF16>(gate[0], gate[1]), packed.up[j][half] = pair<BF16>(up[0], up[1]);
    }
}

/* The steps of a strip from `begin` on; `part`: number of blocks with earlier steps of the strip. */
__device__ __forceinline__ void walk(const Unit &unit, u32 strip, u32 part, u32 begin, u32 steps, float &amax) {
    const Columns columns(unit, strip, begin, steps);
    const u32 lane = columns.lane;
    for (u32 step = 0; step < STAGES; step++)
        columns.fetch(step);
    columns.fill();

    const float gate_scale = unit.scales[0], up_scale = unit.scales[1], scale = FLOAT8 ? *unit.scale : 1;
    float gradients[3][4][4] = {};
    Mask mask(unit, columns.column);
    for (u32 step = 0; step < steps; step++) {
        wait<STAGES - 1>();
        __syncthreads(); /* all copies have arrived, and all warps have finished the previous step */
        uint4 raw[TENSORS][2];
#pragma unroll
        for (u32 i = 0; i < 2 * TENSORS; i++)
            raw[i / 2][i % 2] = *(const uint4 *)(columns.stage_of(step) + i * 512);
        columns.fetch(step + STAGES);
        if (step)
            columns.put(step - 1);

        const u8 *low = shared + LOW + step % (STAGES + 1) * SLOT;
        if (DROPOUT)
            mask.at_rows(columns.first + 16 * step + lane / 4);
        u32 rows[TENSORS][4];
        Packed packed;
        float sums[SUMS / 2][2][4];
#pragma unroll
        for (u32 i = 0; i < TENSORS; i++)
            load_matrices(rows[i], low + i * 512 + lane * 16);
#pragma unroll
        for (u32 p = 0; p < 2; p++) {
            float g[2][4], u[2][4], dh[2][4];
            complete(g, rows[0], columns.factor(0), p, lane);
            complete(u, rows[1], columns.factor(1), p, lane);
            if (BACKWARD)
                complete(dh, rows[TENSORS - 1], columns.factor(2), p, lane);
            compute(packed, raw, g, u, dh, mask, p, gate_scale, up_scale);
            if (BACKWARD) {
                gather(sums[0], packed.gate, columns.factor(0), p, lane);
                gather(sums[SUMS / 2 - 1], packed.up, columns.factor(1), p, lane);
                learn(gradients[0], low, packed.gate, p, lane);
                learn(gradients[1], low + 512, packed.up, p, lane);
                learn(gradients[2], low + 1024, packed.dropped, p, lane);
            } else
                gather(sums[0], packed.dropped, columns.factor(2), p, lane);
        }
        const u32 row = columns.first + 16 * step;
        if (BACKWARD) {
            columns.write(packed.gate, row, 0, scale, amax);
            columns.write(packed.up, row, 1, scale, amax);
        } else
            columns.write(packed.hidden, row, 0, scale, amax);
        Four *to = (Four *)(shared + EXCHANGE) + (step % 2 * WARPS + columns.warp) * SUMS * 32 + lane;
#pragma unroll
        for (u32 i = 0; i < SUMS; i++)
            to[i * 32] = *(const Four *)sums[i / 2][i % 2];
    }
    __syncthreads();
    columns.put(steps - 1);
    if (BACKWARD && columns.inside)
        columns.store_gradients(gradients, part);
}

extern "C" __global__ void __launch_bounds__(STRIP, BLOCKS) lora_glu(Unit unit) {
    griddepcontrol_wait();
    const u32 steps = (unit.rows + 15) / 16, end = min(steps * unit.strips, (blockIdx.x + 1) * unit.share);
    float amax = 0;
    for (u32 at = blockIdx.x * unit.share; at < end;) {
        const u32 strip = at / steps, begin = at % steps, count = min(steps - begin, end - at);
        walk(unit, strip, blockIdx.x - strip * steps / unit.share, begin, count, amax);
        at += count;
    }
    if (FLOAT8)
        record_amax(unit.newest, amax);
}

/* Add the strips' partial sums of v or u_d, four numbers per thread; then the parts' sums of dB and dA, four per
   thread. */
extern "C" __global__ void __launch_bounds__(256) finish(Unit unit) {
    griddepcontrol_wait();
    const u32 steps = (unit.rows + 15) / 16;
    const u64 count = (u64)steps * SUMS * 32, thread = (u64)blockIdx.x * 256 + threadIdx.x;
    if (thread < count) {
        const Four sum = sum_of<BACKWARD, BACKWARD ? 16 : 8>(unit.partial, thread, count, unit.strips);
        const u32 lane = thread % 32, i = thread / 32 % SUMS, tensor = BACKWARD ? i / 2 : 2;
        const u32 r = i % 2 * 8 + lane % 4 * 2;
        const u32 row = thread / (32 * SUMS) * 16 + lane / 4, stride = BACKWARD ? R_GATE + R_UP : R_DOWN;
        u16 *to = unit.sum + (u64)row * stride + (BACKWARD ? begin_of(tensor) : 0) + r;
        if (r < rank_of(tensor) && row < unit.rows)
            *(u32 *)to = pair<BF16>(sum.x[0], sum.x[1]);
        if (r < rank_of(tensor) && row + 8 < unit.rows)
            *(u32 *)(to + 8 * stride) = pair<BF16>(sum.x[2], sum.x[3]);
    } else if (BACKWARD) {
        const u64 fours = (u64)(R_GATE + R_UP + R_DOWN) * unit.width / 4, at = thread - count;
        if (at >= fours)
            return;
        const u32 strip = at % (unit.width / 4) * 4 / STRIP, first = strip * steps / unit.share;
        const u32 parts = ((strip + 1) * steps - 1) / unit.share - first + 1;
        Four sum = sum_of<false, 8>(unit.gradients, at, fours, parts);
        const u32 r = at / (unit.width / 4), column = at % (unit.width / 4) * 4;
        const u32 tensor = (r >= R_GATE) + (r >= R_GATE + R_UP), rank = rank_of(tensor), begin = begin_of(tensor);
        const float scale = tensor < 2 ? unit.scales[tensor] : 1.0f;
        float *to = unit.gradient + (u64)begin * unit.width;
        to += tensor < 2 ? (u64)column * rank + r - begin : (u64)(r - begin) * unit.width + column;
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            to[tensor < 2 ? k * rank : k] = sum.x[k] * scale;
    }
}
