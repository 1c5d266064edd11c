/* Low-rank products of a tensor in a warp's registers, shared by lora_glu.cu and lora_read.cu. A warp has 16 rows by 32
columns as four tiles of 16×8. Column n of tile j (n < 8, j < 4) is column 8 (n / 2) + 2 j + n % 2 of the tensor, so
that a lane has eight adjacent numbers in each of two rows.

   Constants: BF16 (else fp16), FLOAT8 (0; 1 for E4M3, 2 for E5M2), COLUMNS (factors of columns before the FP8 cast). */

#pragma once

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
