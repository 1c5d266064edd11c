/* Up to 64 rows with affine int4 weights of consecutive groups (formats.int4), see few_rows.cuh.

A word has eight columns of one row. Codes minus zeros are exact in 16 bits, and the sums of a group are scaled in fp32.
Where a group can end within a product or span parts of units, each word has its scale, and operands are scaled.

Constants: GROUP (a multiple of 8), SHIFT (added to a stored zero), SCALES_BF16 (else fp16), ORIGIN (start of a block's
shared memory), and those of few_rows.cuh. */

#include "few_rows.cuh"

struct Weight : ByPairs {
    const u32 *packed; /* [K/8, N] */
    const u8 *zeros;   /* [G, N/2], the lower nibble first */
    const u16 *scales; /* [G, N] */
    u32 rows, columns; /* N, K */

    static constexpr bool BY_WORD = GROUP % UNIT && GROUP != 128 && GROUP != 64 && GROUP != 32;
    static constexpr int OWN = 0;
    static constexpr u32 X = 8, LANE = 32;
    static constexpr int RUNS = BY_WORD ? 0 : GROUP < CHUNK ? CHUNK / GROUP : 1;
    static constexpr int GROUPS = BY_WORD ? 0 : GROUP < UNIT ? UNIT / GROUP : 1; /* of a unit */

    struct Scaled { /* two nibbles, and a pair */
        u32 zeros, scales;
    };
    struct Codes {
        uint2 words[4]; /* of rows 2g and 2g + 1 of the tile */
        Scaled scales[BY_WORD ? 4 : 1];
    };
    struct Scales {
        Scaled groups[BY_WORD ? 1 : GROUPS];
    };

    template <int COUNT> struct Source {
        const u32 *codes, *tile; /* the lane's, and the first of the tile's columns */
        const u8 *zeros;
        const u16 *scales;
        u32 unit, column; /* column: of the lane's first word within a unit */

        __device__ __forceinline__ void seek(const Weight &w, u32 top, u32 first, u32 lane) {
            u32 n = top + lane / 4 * 2;
            unit = first, column = lane % 4 * 8;
            tile = w.packed + (u64)unit * (UNIT / 8) * w.rows + top;
            codes = tile + lane % 4 * w.rows + lane / 4 * 2;
            zeros = w.zeros + n / 2, scales = w.scales + n;
        }
        __device__ __forceinline__ void load(Codes *to, const Weight &w, int chunk) const {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 *from = codes + (u32)(chunk * (CHUNK / 8) + 4 * j) * w.rows;
#pragma unroll
                for (int r = 0; r < COUNT; r++) {
                    to[r].words[j] = read_once<uint2>(from + ROWS * r);
                    if constexpr (BY_WORD)
                        load_group(to[r].scales[j], w, (unit * UNIT + chunk * CHUNK + 32 * j + column) / GROUP, r);
                }
            }
        }
        /* Copy [16 words of columns][16 rows] 4 bytes. Of a word's four pieces, those of words 2 and 3 of four are exchanged,
           so that neighbouring lanes read from all banks. */
        __device__ __forceinline__ void copy(u8 *to, const Weight &w, int chunk, u32 lane) const {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 word = lane / 4 + 8 * i;
                const u32 *from = tile + (chunk * (CHUNK / 8) + word) * w.rows + lane % 4 * 4;
                ::copy<16>(to + word * 64 + (lane % 4 ^ word & 2) * 16, from, true);
            }
        }
        static __device__ __forceinline__ void take(Codes &codes, const u8 *from, u32 lane) {
            from += lane % 4 * 64 + (lane / 8 ^ lane & 2) * 16 + lane / 4 % 2 * 8;
#pragma unroll
            for (int j = 0; j < 4; j++)
                codes.words[j] = *(const uint2 *)(from + j * 256);
        }
        __device__ __forceinline__ void load_group(Scaled &to, const Weight &w, u32 group, int r) const {
            u32 at = group * w.rows + ROWS * r;
            to.zeros = read_again<u8>(zeros + at / 2), to.scales = read_again<u32>(scales + at);
        }
        __device__ __forceinline__ void load_scales(Scales *to, const Weight &w) const {
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
#pragma unroll
                for (int r = 0; r < COUNT; r++)
                    load_group(
                        to[r].groups[i], w, GROUP < UNIT ? unit * GROUPS + i : unit / (GROUP < UNIT ? 1 : GROUP / UNIT), r);
        }
        __device__ __forceinline__ void next(const Weight &w, u32 units) {
            codes += units * (UNIT / 8) * w.rows, tile += units * (UNIT / 8) * w.rows, unit += units;
        }
    };

    __device__ __forceinline__ void build() const {
        for (u32 i = threadIdx.x; i < 256 * 8; i += THREADS)
            put(i / 8, i % 8, pair<BF16>((float)(i / 8 & 15), (float)(i / 8 >> 4)));
    }
    __device__ __forceinline__ float factor() const { return BY_WORD ? 1 / ENLARGED : 1; }
    static constexpr __device__ __forceinline__ u32 x_offset(int j) { return 32 * j; }
    static __device__ __forceinline__ u32 row(u32 r) { return r < 8 ? 2 * r : 2 * r - 15; }

    /* The group of word j, among those of a unit. */
    static constexpr __device__ __forceinline__ int group_of(int chunk, int j) {
        return BY_WORD ? 0 : (CHUNK * chunk + 32 * j) * GROUPS / UNIT;
    }
    static __device__ __forceinline__ float scale_of(const Scaled &group, int half) {
        return number<SCALES_BF16>((u16)(group.scales >> 16 * half));
    }
    __device__ __forceinline__ void scale(float (&scale)[2], const Scales &scales, int chunk, int j, u32) const {
        const Scaled &group = scales.groups[group_of(chunk, j)];
        scale[0] = scale_of(group, 0), scale[1] = scale_of(group, 1);
    }
    __device__ __forceinline__ void
    operands(u32 (&a)[2][4], const Codes &codes, const Scales &scales, int chunk, int j, u32 lane) const {
        const Scaled &group = BY_WORD ? codes.scales[j] : scales.groups[group_of(chunk, j)];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 word = half ? codes.words[j].y : codes.words[j].x;
            u32 zero = (group.zeros >> 4 * half) + SHIFT & 15;
            u32 zeros = look<u32, 0>(zero * 0x1100 + lane * 4);
#pragma unroll
            for (int p = 0; p < 4; p++)
                a[p / 2][half + p % 2 * 2] = fused<BF16>(zeros, BF16 ? 0xbf80bf80 : 0xbc00bc00, pair_of(word, p, lane));
            if constexpr (BY_WORD) {
                float value = scale_of(group, half) * ENLARGED;
                u32 both = pair<BF16>(value, value);
#pragma unroll
                for (int p = 0; p < 4; p++)
                    a[p / 2][half + p % 2 * 2] = scaled(a[p / 2][half + p % 2 * 2], both);
            }
        }
    }
};

PRODUCT(few_rows_int4, Weight)
