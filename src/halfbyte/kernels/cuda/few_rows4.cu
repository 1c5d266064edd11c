/* Up to 16 rows with NF4 and FP4 weights in blocks of 64 (formats.blockwise4), see few_rows.cuh.

Constants: NESTED, ORIGIN (start of a block's shared memory), and those of few_rows.cuh. */

#include "few_rows.cuh"

struct Weight : ByRows {
    const u8 *packed, *absmax; /* [N, K/2]; per block a byte (NESTED) or fp32 */
    const float *second, *code, *offset, *codebook;
    u32 rows, columns; /* N, K */
    float shift[2];    /* set by build: the offset of nested scales */

    static constexpr u32 CODE = BYTES, TABLE = CODE + (NESTED ? 1024 : 0), WORDS = NESTED ? 1 : 4;
    struct Scales { /* of rows g and g + 8: absmax of a unit's four blocks, and the scale of nested ones */
        u32 words[2][WORDS];
        float second[2];
    };

    struct Source {
        Words words;
        const u8 *absmax[2 * RT];
        u32 block[2 * RT];

        __device__ __forceinline__ void seek(const Weight &w, u32 top, u32 unit, u32 lane) {
            words.seek(w.packed, w.columns, top, unit, lane);
#pragma unroll
            for (int i = 0; i < 2 * RT; i++) {
                block[i] = (top + lane / 4 + 8 * i) * (w.columns / 64) + unit * 4;
                absmax[i] = w.absmax + (u64)block[i] * (NESTED ? 1 : 4);
            }
        }
        __device__ __forceinline__ void load(Codes (&codes)[RT], const Weight &, int chunk) const {
            words.load(codes, chunk);
        }
        __device__ __forceinline__ void load_scales(Scales (&to)[RT], const Weight &w) const {
#pragma unroll
            for (int i = 0; i < 2 * RT; i++) {
                u32(&four)[WORDS] = to[i / 2].words[i % 2];
                if constexpr (NESTED) {
                    four[0] = read_again<u32>(absmax[i]);
                    to[i / 2].second[i % 2] = read_again<float>(w.second + block[i] / 256);
                } else
#pragma unroll
                    for (int k = 0; k < WORDS; k++)
                        four[k] = read_again<u32>(absmax[i] + 4 * k);
            }
        }
        __device__ __forceinline__ void next(const Weight &) {
            words.next();
#pragma unroll
            for (int i = 0; i < 2 * RT; i++)
                block[i] += 4, absmax[i] += NESTED ? 4 : 16;
        }
    };

    __device__ __forceinline__ void build() {
        for (u32 i = threadIdx.x; i < 256 * 8; i += THREADS)
            put(i / 8, i % 8, pair<BF16>(codebook[i / 8 >> 4], codebook[i / 8 & 15]));
        if (NESTED)
            for (u32 i = threadIdx.x; i < 256; i += THREADS)
                ((float *)(shared + CODE))[i] = code[i];
        shift[0] = NESTED ? *offset : 0.0f;
    }
    __device__ __forceinline__ float factor() const { return 1; }

    __device__ __forceinline__ void scale(float (&)[2], const Scales &, int, int) const {}
    __device__ __forceinline__ void
    operands(u32 (&a)[2][4], const Codes &codes, const Scales &scales, int chunk, int j, u32 lane) const {
        u32 scale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float value;
            if constexpr (NESTED) {
                u32 byte = __byte_perm(scales.words[half][0], 0, 0x4440 | (2 * chunk + lane % 4 / 2));
                value = ((const float *)(shared + CODE))[byte] * scales.second[half] + shift[0];
            } else
                value = __uint_as_float(
                    lane & 2 ? scales.words[half][(2 * chunk + 1) % WORDS] : scales.words[half][2 * chunk % WORDS]);
            scale[half] = pair<BF16>(value, value);
        }
        look_up(a, codes, scale, j, lane);
    }
};

LAYOUT(Weight::TABLE, WARPS *ROWS *RT * 4, sizeof(Weight));

extern "C" __global__ void FEW_ROWS few_rows4(Weight w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    few_rows(w, x, bias, out, batch);
}
