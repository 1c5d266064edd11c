// Conversion of 4-bit weights to E4M3 in either orientation. Bytes moved: 1.5 a weight; instructions: about 4.
//
// The sixteen values of a scale are cast once, into a table of sixteen bytes in four registers. A word of eight codes
// then needs no arithmetic: PRMT selects four of eight bytes by four selectors of three bits, and the codes' nibbles
// are the selectors. Two PRMTs, for the halves of the table, and a mask from the fourth bits give four values.
//
// Constants: NESTED, SHIFT (log2 of the block size, at least 5). K is a multiple of 32, N a multiple of 4
// if the result is transposed.

#include "warp.cuh"

struct Weight {
    const u8* packed;  // [N·K/2], the high nibble of a byte first
    const void* absmax;  // u8 where nested, else float
    const float* second;  // a block of 256 each
    const float* code;  // [256]
    const float* offset;
    const float* codebook;  // [16]
    const float* factor;
    u32 rows, columns;
};

LAYOUT(0, 0, sizeof(Weight));

__device__ __forceinline__ u32 prmt(u32 low, u32 high, u32 selectors) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

__device__ __forceinline__ u32 e4m3x2(float low, float high) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

__device__ __forceinline__ float scale_of(const Weight& weight, u64 block) {
#if NESTED
    const float code = weight.code[((const u8*)weight.absmax)[block]];
    return __fadd_rn(__fmul_rn(code, weight.second[block >> 8]), *weight.offset);
#else
    return ((const float*)weight.absmax)[block];
#endif
}

struct Table {
    u32 words[4];

    __device__ __forceinline__ Table(const float (&codebook)[16], float scale, float factor) {
        for (int i = 0; i < 4; i++) {
            float value[4];
            for (int j = 0; j < 4; j++) value[j] = __fmul_rn(__fmul_rn(codebook[4 * i + j], scale), factor);
            words[i] = e4m3x2(value[0], value[1]) | e4m3x2(value[2], value[3]) << 16;
        }
    }

    // Values 1, 0, 3, 2 of the four codes in the lower half of `selectors` (three low bits) and `tops` (fourth bits).
    __device__ __forceinline__ u32 four(u32 selectors, u32 tops) const {
        const u32 upper = prmt(0xff00, 0, tops);
        return (prmt(words[0], words[1], selectors) & ~upper) | (prmt(words[2], words[3], selectors) & upper);
    }

    __device__ __forceinline__ void eight(u32 codes, u32& first, u32& second) const {
        const u32 selectors = codes & 0x77777777, tops = codes >> 3 & 0x11111111;
        first = four(selectors, tops);
        second = four(selectors >> 16, tops >> 16);
    }
};

__device__ __forceinline__ void load16(const float* source, float (&values)[16]) {
    for (int i = 0; i < 4; i++) {
        const float4 part = ((const float4*)source)[i];
        values[4 * i] = part.x, values[4 * i + 1] = part.y, values[4 * i + 2] = part.z, values[4 * i + 3] = part.w;
    }
}

// A thread converts sixteen weights: eight bytes of codes are sixteen of E4M3.
extern "C" __global__ void __launch_bounds__(256) to_e4m3(Weight weight, u8* out, u32 stride) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    const u32 across = weight.columns / 16;
    const u64 row = at / across;
    if (row >= weight.rows) return;
    float codebook[16];
    load16(weight.codebook, codebook);
    const Table table(codebook, scale_of(weight, at * 16 >> SHIFT), *weight.factor);
    const uint2 codes = ((const uint2*)weight.packed)[at];
    uint4 values;
    table.eight(codes.x, values.x, values.y);
    table.eight(codes.y, values.z, values.w);
    const u32 in_order = 0x2301;
    values.x = prmt(values.x, 0, in_order), values.y = prmt(values.y, 0, in_order);
    values.z = prmt(values.z, 0, in_order), values.w = prmt(values.w, 0, in_order);
    *(uint4*)(out + row * stride + (at - row * across) * 16) = values;
}

// Transpose the bytes of four words.
__device__ __forceinline__ void transpose_bytes(const u32 (&rows)[4], u32 (&columns)[4]) {
    const u32 a = prmt(rows[0], rows[1], 0x5140), b = prmt(rows[0], rows[1], 0x7362);
    const u32 c = prmt(rows[2], rows[3], 0x5140), d = prmt(rows[2], rows[3], 0x7362);
    columns[0] = prmt(a, c, 0x5410), columns[1] = prmt(a, c, 0x7632);
    columns[2] = prmt(b, d, 0x5410), columns[3] = prmt(b, d, 0x7632);
}

// A thread converts four rows of 32 weights, a warp 128 rows: a column of the warp is a line of 128 bytes.
extern "C" __global__ void __launch_bounds__(128) to_e4m3_transposed(Weight weight, u8* out, u32 stride) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const u32 across = (weight.columns / 32 + 3) / 4;
    const u32 first = (blockIdx.x % across * 4 + threadIdx.x / 32) * 32;
    const u64 row = (u64)(blockIdx.x / across) * 128 + threadIdx.x % 32 * 4;
    if (row >= weight.rows || first >= weight.columns) return;
    float codebook[16];
    load16(weight.codebook, codebook);
    const float factor = *weight.factor;
    u32 codes[4][4];
    float scales[4];
    for (int i = 0; i < 4; i++) {
        const u64 place = (row + i) * weight.columns + first;
        const uint4 part = *(const uint4*)(weight.packed + place / 2);
        codes[i][0] = part.x, codes[i][1] = part.y, codes[i][2] = part.z, codes[i][3] = part.w;
        scales[i] = scale_of(weight, place >> SHIFT);
    }
    const Table tables[4] = {
        Table(codebook, scales[0], factor), Table(codebook, scales[1], factor),
        Table(codebook, scales[2], factor), Table(codebook, scales[3], factor),
    };
    u8* column = out + (u64)first * stride + row;
#pragma unroll
    for (int word = 0; word < 4; word++) {
        u32 half[2][4], columns[4];
        for (int i = 0; i < 4; i++) tables[i].eight(codes[i][word], half[0][i], half[1][i]);
        for (int h = 0; h < 2; h++) {
            transpose_bytes(half[h], columns);
            for (int j = 0; j < 4; j++) *(u32*)(column + (j ^ 1) * (u64)stride) = columns[j];  // 1, 0, 3, 2 in order
            column += 4 * (u64)stride;
        }
    }
}
