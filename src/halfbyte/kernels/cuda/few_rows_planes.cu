/* Up to 64 rows with weights in bit planes (formats.bitplane, formats.hqq), see few_rows.cuh.

Of a chunk a lane has the block of 32 columns number lane % 4 of rows g and g + 8: BITS words each. Bits are exchanged
between these words until a byte has the bits of neighbouring columns (4 columns at 2 bits, otherwise 2). The byte is the
index of a table, whose entry holds these columns' numbers. Each lane has its own copy of an entry; two lanes share one
at 2 bits, where an entry is 8 bytes, and at 5, with 1024 entries of 4; four lanes if SMALL.

Constants: BITS (2, 3, 4, 5 with E4M4 scales per block; 2, 3, 4, 8 with GROUP), GROUP (weights per scale and zero of
HQQ; 0: E4M4), SCALES_BF16 (else fp16, of HQQ), SMALL (64 KiB of shared memory), ORIGIN (start of a block's shared
memory), and those of few_rows.cuh. */

#include "few_rows.cuh"
#include "planes.cuh"

struct Weight : Planes {
    const float *of_all; /* the factor of all E4M4 scales */
    float read_factor;   /* set by build */

    static constexpr bool GAPS = BITS == 5 ? SMALL : BITS != 3;
    static constexpr int RUNS = 0, OWN = GROUP ? 0 : 1;
    static constexpr u32 COPIES = BITS == 5 ? (SMALL ? 8 : 16) : 32; /* of an entry, at 5 bits of four in 256 bytes */
    static constexpr u32 TABLE = BITS == 3 ? 16384 : 65536, X = 32, LANE = 8 * BITS;
    static constexpr u32 NUMBERS = GROUP ? UNIT / GROUP : 8; /* scales of a unit for a row */
    static constexpr u32 OF_UNIT = GROUP ? NUMBERS * 2 : NUMBERS;
    static constexpr u32 WORDS = GROUP == UNIT ? 1 : 2;    /* a lane's numbers of two chunks, or a unit's bytes */

    struct Codes {
        alignas(BITS % 4 ? 8 : 16) u32 words[2][BITS]; /* of rows g and g + 8 */
    };
    struct Scales { /* of rows g and g + 8; a lane's columns of a chunk have one scale */
        u32 scales[2][WORDS], zeros[2][WORDS];
    };

    template <int COUNT> struct Source {
        const u8 *codes[2 * COUNT], *scales[2 * COUNT], *zeros[2 * COUNT], *tile;

        __device__ __forceinline__ void seek(const Weight &w, u32 top, u32 unit, u32 lane) {
            tile = w.packed + (u64)top * (w.columns / 8 * BITS) + unit * (UNIT / 8 * BITS);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                u32 row = top + lane / 4 + 8 * i;
                codes[i] = w.packed + (u64)row * (w.columns / 8 * BITS) + (unit * (UNIT / 32) + lane % 4) * (4 * BITS);
                u64 at = ((u64)row * (w.columns / UNIT) + unit) * NUMBERS;
                if constexpr (GROUP > 0)
                    at = (at + lane % 4 * 32 / GROUP) * 2;
                scales[i] = w.scales + at, zeros[i] = w.zeros + at;
            }
        }
        __device__ __forceinline__ void load(Codes *to, const Weight &, int chunk) const {
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                const u8 *from = codes[i] + chunk * (CHUNK / 8 * BITS);
                u32(&words)[BITS] = to[i / 2].words[i % 2];
                if constexpr (BITS % 4 == 0) {
#pragma unroll
                    for (int k = 0; k < BITS; k += 4) {
                        uint4 four = read_once<uint4>(from + 4 * k);
                        words[k] = four.x, words[k + 1] = four.y, words[k + 2] = four.z, words[k + 3] = four.w;
                    }
                } else if constexpr (BITS == 2) {
                    uint2 both = read_once<uint2>(from);
                    words[0] = both.x, words[1] = both.y;
                } else
#pragma unroll
                    for (int k = 0; k < BITS; k++)
                        words[k] = read_again<u32>(from + 4 * k);
            }
        }
        /* Copy [16 rows][4 blocks][BITS] words, which are in a lane's order. */
        __device__ __forceinline__ void copy(u8 *to, const Weight &w, int chunk, u32 lane) const {
#pragma unroll
            for (u32 i = 0; i < (BITS + 1) / 2; i++) {
                u32 piece = lane + 32 * i;
                const u8 *from = tile + piece / BITS * (w.columns / 8 * BITS) + (chunk * BITS + piece % BITS) * 16;
                if (piece < 16 * BITS)
                    ::copy<16>(to + piece * 16, from, true);
            }
        }
        static __device__ __forceinline__ void take(Codes &codes, const u8 *from, u32 lane) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u8 *words = from + (half * 32 + lane) * (4 * BITS);
#pragma unroll
                for (int k = 0; k < BITS; k += BITS % 4 == 0 ? 4 : BITS == 2 ? 2 : 1)
                    if (BITS % 4 == 0)
                        *(uint4 *)(codes.words[half] + k) = *(const uint4 *)(words + 4 * k);
                    else if (BITS == 2)
                        *(uint2 *)codes.words[half] = *(const uint2 *)words;
                    else
                        codes.words[half][k] = *(const u32 *)(words + 4 * k);
            }
        }
        __device__ __forceinline__ void load_scales(Scales *to, const Weight &) const {
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++)
#pragma unroll
                for (u32 k = 0; k < WORDS; k++)
                    if constexpr (GROUP > 0) {
                        to[i / 2].scales[i % 2][k] = read_again<u16>(scales[i] + k * (CHUNK / GROUP) * 2);
                        to[i / 2].zeros[i % 2][k] = read_again<u16>(zeros[i] + k * (CHUNK / GROUP) * 2);
                    } else
                        to[i / 2].scales[i % 2][k] = read_again<u32>(scales[i] + 4 * k);
        }
        __device__ __forceinline__ void next(const Weight &, u32 units) {
            tile += units * (UNIT / 8 * BITS);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                codes[i] += units * (UNIT / 8 * BITS);
                scales[i] += units * OF_UNIT, zeros[i] += units * OF_UNIT;
            }
        }
    };

    __device__ __forceinline__ void build() {
        constexpr u32 ENTRIES = BITS == 3 ? 64 : BITS == 5 ? 1024 : 256, PIECES = COPIES / 4; /* of 16 bytes */
        for (u32 i = threadIdx.x; i < ENTRIES * PIECES; i += THREADS) {
            u32 index = i / PIECES, at = BITS == 5 ? (index & 255) << 8 | (index >> 8) * (4 * COPIES) : index << 8;
            u32 first = entry<BITS == 2 ? 4 : 2>(index, 0), second = BITS == 2 ? entry<4>(index, 1) : first;
            *(uint4 *)(shared + at + i % PIECES * 16) = make_uint4(first, second, first, second);
        }
        read_factor = GROUP ? 1 / ENLARGED : *of_all;
    }
    /* Numbers of an entry's columns 2i and 2i + 1. */
    template <int COLUMNS> __device__ __forceinline__ u32 entry(u32 index, int i) const {
        u32 first = code_of<COLUMNS>(index, 2 * i), second = code_of<COLUMNS>(index, 2 * i + 1);
        return GROUP ? pair<BF16>((float)first, (float)second) : pair<BF16>(codebook[first], codebook[second]);
    }
    __device__ __forceinline__ float factor() const { return read_factor; }
    static constexpr __device__ __forceinline__ u32 x_offset(int j) { return 8 * j; }
    static __device__ __forceinline__ u32 row(u32 r) { return r; }
    __device__ __forceinline__ void scale(float (&to)[2], const Scales &scales, int chunk, int, u32 lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            to[half] = e4m4(__byte_perm(scales.scales[half][chunk % WORDS], 0, 0x4440 | lane & 3));
    }

    __device__ __forceinline__ void
    operands(u32 (&a)[2][4], const Codes &codes, const Scales &scales, int chunk, int j, u32 lane) const {
        float both[2] = {};
        if (!GROUP && !ONE)
            scale(both, scales, chunk, j, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 low[4], high[4], scale = 0, shift = 0; /* planes 0 to 3, and 4 to 7; pairs of one number */
#pragma unroll
            for (int k = 0; k < 4; k++)
                low[k] = k < BITS ? codes.words[half][k] : 0, high[k] = 4 + k < BITS ? codes.words[half][4 + k] : 0;
            if (BITS == 2)
                exchange(low[0], low[1], 4, 0x0f0f0f0f);
            else
                exchange_pairs(low);
            if (BITS == 8)
                exchange_pairs(high);
            if constexpr (GROUP == 0) {
                scale = pair<BF16>(both[half], both[half]);
            } else {
                u32 code = scales.scales[half][chunk % WORDS], zero = scales.zeros[half][chunk % WORDS];
                float s = number<SCALES_BF16>((u16)code) * ENLARGED, z = number<false>((u16)zero);
                scale = pair<BF16>(s, s), shift = pair<BF16>(-s * z, -s * z);
            }
#pragma unroll
            for (int p = 0; p < 4; p++) { /* columns 8j + 2p and the next */
                u32 numbers;
                if (BITS == 2) {
                    uint2 four = look_at_two<0>(__byte_perm(low[p / 2], lane % 16 * 8, 0x5504 | j << 4));
                    numbers = p % 2 ? four.y : four.x;
                } else if (BITS == 5) {
                    u32 bits = SMALL ? (p < 3 ? high[0] << (5 - 2 * p) : high[0] >> 1) & 0x60606060
                                     : high[0] << (6 - 2 * p) & 0xc0c0c0c0;
                    u32 fifth = bits | lane % COPIES * 0x04040404;
                    numbers = look<u32, 0>(__byte_perm(fifth, low[p], 0x40 + j * 0x11) & 0xffff);
                } else
                    numbers = look<u32, 0>(__byte_perm(low[p], lane * 4, 0x5504 | j << 4));
                if (BITS == 8) {
                    u32 upper = look<u32, 0>(__byte_perm(high[p], lane * 4, 0x5504 | j << 4));
                    numbers = fused<BF16>(upper, pair<BF16>(16, 16), numbers);
                }
                a[p / 2][half + p % 2 * 2] = GROUP ? fused<BF16>(numbers, scale, shift) : ONE ? numbers : scaled(numbers, scale);
            }
        }
    }
};

PRODUCT(few_rows_planes, Weight)
