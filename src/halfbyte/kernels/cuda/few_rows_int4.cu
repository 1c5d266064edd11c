/* Up to 16 rows with affine int4 weights of consecutive groups (formats.int4), see few_rows.cuh.

A word has eight columns of one row. Codes minus zeros are exact in 16 bits, and the sums of a group are scaled in fp32.

Constants: GROUP (32, 64, 128, or a multiple of 256), SHIFT (added to a stored zero), SCALES_BF16 (else fp16), and those
of few_rows.cuh. */

#include "few_rows.cuh"

struct Weight {
    const u32 *packed; /* [K/8, N] */
    const u8 *zeros;   /* [G, N/2], the lower nibble first */
    const u16 *scales; /* [G, N] */
    u32 rows, columns; /* N, K */

    static constexpr bool NIBBLES = true;
    static constexpr u32 TABLE = 0, X = 8;
    static constexpr int RUNS = GROUP < CHUNK ? CHUNK / GROUP : 1, GROUPS = GROUP < UNIT ? UNIT / GROUP : 1;

    struct Codes {
        uint2 words[4]; /* of rows 2g and 2g + 1 of the tile */
    };
    struct Scales {
        u32 zeros[GROUPS], scales[GROUPS]; /* two nibbles, and a pair */
    };

    struct Source {
        const u32 *codes;
        const u8 *zeros;
        const u16 *scales;
        u32 unit;

        __device__ __forceinline__ void seek(const Weight &w, u32 top, u32 first, u32 lane) {
            u32 n = top + lane / 4 * 2;
            unit = first;
            codes = w.packed + (u64)(unit * (UNIT / 8) + lane % 4) * w.rows + n;
            zeros = w.zeros + n / 2, scales = w.scales + n;
        }
        __device__ __forceinline__ void load(Codes (&to)[RT], const Weight &w, int chunk) const {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 *from = codes + (u32)(chunk * (CHUNK / 8) + 4 * j) * w.rows;
#pragma unroll
                for (int r = 0; r < RT; r++)
                    to[r].words[j] = read_once<uint2>(from + ROWS * r);
            }
        }
        __device__ __forceinline__ void load_scales(Scales (&to)[RT], const Weight &w) const {
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                u32 at = (GROUP < UNIT ? unit * GROUPS + i : unit / (GROUP / UNIT)) * w.rows;
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    to[r].zeros[i] = read_again<u8>(zeros + at / 2 + ROWS / 2 * r);
                    to[r].scales[i] = read_again<u32>(scales + at + ROWS * r);
                }
            }
        }
        __device__ __forceinline__ void next(const Weight &w) { codes += UNIT / 8 * w.rows, unit++; }
    };

    __device__ __forceinline__ void build() const {}
    __device__ __forceinline__ float factor() const { return 1; }
    static constexpr __device__ __forceinline__ u32 x_offset(int j) { return 32 * j; }
    static __device__ __forceinline__ u32 row(u32 r) { return r < 8 ? 2 * r : 2 * r - 15; }

    /* The group of word j, among those of a unit. */
    static constexpr __device__ __forceinline__ int group_of(int chunk, int j) {
        return (CHUNK * chunk + 32 * j) * GROUPS / UNIT;
    }
    __device__ __forceinline__ void scale(float (&scale)[2], const Scales &scales, int chunk, int j) const {
        u32 both = scales.scales[group_of(chunk, j)];
        scale[0] = number<SCALES_BF16>((u16)both), scale[1] = number<SCALES_BF16>((u16)(both >> 16));
    }
    __device__ __forceinline__ void
    operands(u32 (&a)[2][4], const Codes &codes, const Scales &scales, int chunk, int j, u32) const {
        /* 128 or 1024 in bf16 or fp16: a code in the lowest bits adds itself */
        constexpr u32 BASE = BF16 ? 0x43004300 : 0x64006400, ONE = BF16 ? 0x3f803f80 : 0x3c003c00, MINUS = 0x80008000;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 word = half ? codes.words[j].y : codes.words[j].x;
            u32 zero = (scales.zeros[group_of(chunk, j)] >> 4 * half) + SHIFT & 15;
            u32 less = BASE | MINUS | zero * 0x10001;
#pragma unroll
            for (int p = 0; p < 4; p++)
                a[p / 2][half + p % 2 * 2] = fused<BF16>(word >> 4 * p & 0x000f000f | BASE, ONE, less);
        }
    }
};

LAYOUT(0, WARPS *ROWS *RT * 4, sizeof(Weight));

extern "C" __global__ void FEW_ROWS few_rows_int4(Weight w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    few_rows(w, x, bias, out, batch);
}
