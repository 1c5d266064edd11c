/* NF4 and FP4 weights in blocks of 64, with nested scales or fp32 ones, and the table that converts codes to operands.

A packed byte is two weights, adjacent along K. For each of the 256 bytes the table has both values in x's dtype, as one
4-byte word, in 32 copies, one per lane, to avoid bank conflicts. An entry takes 256 bytes: 32 words of weights, then 32
words of the nested scale's value for the same byte. So an address is entry · 256 + lane · 4, which one PRMT assembles:
two weights cost one PRMT and one LDS, and the result of LDS is an operand.

Constants: NESTED, BF16, and the block's THREADS. */

#pragma once

struct Table4 {
    const u8 *packed, *absmax; /* [N, K/2]; [N, K/64], bytes if nested, else fp32 */
    const float *second, *code, *offset; /* [N·K/16384], [256], [], of nested scales */
    const float *codebook; /* [16] */
    u32 rows, columns;     /* N, K */

    static constexpr u32 TABLE = 65536;

    /* The table's value for byte i of a word; `lane4` is lane · 4. */
    template <typename T, u32 AT> static __device__ __forceinline__ T look_up(u32 word, int i, u32 lane4) {
        return look<T, AT>(__byte_perm(word, lane4, 0x5504 | i << 4));
    }

    __device__ __forceinline__ void build() const {
        for (u32 i = threadIdx.x; i < TABLE / 16; i += THREADS) { /* per entry 8 pieces of weights and 8 of scales */
            u32 entry = i / 16, word = 0;
            if (i % 16 < 8)
                word = pair<BF16>(codebook[entry >> 4], codebook[entry & 15]);
            else if (NESTED)
                word = __float_as_uint(code[entry]);
            ((uint4 *)shared)[i] = make_uint4(word, word, word, word);
        }
    }
};
