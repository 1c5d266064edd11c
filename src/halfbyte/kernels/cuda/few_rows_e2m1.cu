/* Up to 64 rows with E2M1 weights (formats.e2m1), see few_rows.cuh. A number times its block's scale is exact in bf16.

Constants: BLOCK (16: E4M3 scales and a factor; 32: E8M0 scales), TALL (rows of W that share a scale), ORIGIN (start of a
block's shared memory), and those of few_rows.cuh. */

#include "few_rows.cuh"

struct Weight : ByRows {
    const u8 *packed, *scales; /* [N, K/2]; [N / TALL, K / BLOCK] */
    const float *of_all;       /* the factor of all scales */
    u32 rows, columns;         /* N, K */
    float read_factor;         /* set by build */

    static constexpr int OWN = BLOCK == 16 ? 2 : 1;
    static constexpr u32 WORDS = UNIT / BLOCK / 4;
    struct Scales {
        u32 words[2][WORDS]; /* of rows g and g + 8: the bytes of a unit's blocks */
    };

    template <int COUNT> struct Source {
        Words<COUNT> words;
        const u8 *scales[2 * COUNT];

        __device__ __forceinline__ void seek(const Weight &w, u32 top, u32 unit, u32 lane) {
            words.seek(w.packed, w.columns, top, unit, lane);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                u32 row = (top + lane / 4 + 8 * i) / TALL;
                scales[i] = w.scales + (u64)row * (w.columns / BLOCK) + unit * (UNIT / BLOCK);
            }
        }
        __device__ __forceinline__ void load(Codes *codes, const Weight &, int chunk) const {
            words.load(codes, chunk);
        }
        __device__ __forceinline__ void copy(u8 *to, const Weight &, int chunk, u32 lane) const {
            words.copy(to, chunk, lane);
        }
        static __device__ __forceinline__ void take(Codes &codes, const u8 *from, u32 lane) {
            Words<COUNT>::take(codes, from, lane);
        }
        __device__ __forceinline__ void load_scales(Scales *to, const Weight &) const {
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                uint2 first = read_again<uint2>(scales[i]);
                u32(&bytes)[WORDS] = to[i / 2].words[i % 2];
                bytes[0] = first.x, bytes[1] = first.y;
                if constexpr (BLOCK == 16) {
                    uint2 second = read_again<uint2>(scales[i] + 8);
                    bytes[WORDS - 2] = second.x, bytes[WORDS - 1] = second.y;
                }
            }
        }
        __device__ __forceinline__ void next(const Weight &, u32 units) {
            words.next(units);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++)
                scales[i] += units * (UNIT / BLOCK);
        }
    };

    __device__ __forceinline__ void build() {
        for (u32 i = threadIdx.x; i < 256 * 8; i += THREADS)
            put(i / 8, i % 8, pair<BF16>(number_of(i / 8 & 15), number_of(i / 8 >> 4)));
        read_factor = BLOCK == 16 ? *of_all : 1 / ENLARGED;
    }
    /* A sign, then 0, ½, 1, 1½, 2, 3, 4, 6. */
    static __device__ __forceinline__ float number_of(u32 code) {
        u32 bits = code & 7;
        float magnitude = bits < 2 ? 0.5f * bits : __uint_as_float((bits << 22) + (126u << 23));
        return code & 8 ? -magnitude : magnitude;
    }
    __device__ __forceinline__ float factor() const { return read_factor; }

    /* Of word j of the lane in row g + 8 * half: its 32 columns of a chunk are two blocks, or one. */
    static __device__ __forceinline__ float scale_of(const Scales &scales, int half, int chunk, int j, u32 lane) {
        const u32(&bytes)[WORDS] = scales.words[half];
        if (BLOCK == 16) {
            u32 word = lane & 2 ? bytes[(2 * chunk + 1) % WORDS] : bytes[2 * chunk % WORDS];
            return from_e4m3(word >> (lane % 2 * 16 + j / 2 * 8) & 255);
        }
        return from_e8m0(__byte_perm(bytes[chunk], 0, 0x4440 | lane & 3)) * ENLARGED;
    }
    __device__ __forceinline__ void scale(float (&to)[2], const Scales &scales, int chunk, int j, u32 lane) const {
        to[0] = scale_of(scales, 0, chunk, j, lane), to[1] = scale_of(scales, 1, chunk, j, lane);
    }
    __device__ __forceinline__ void
    operands(u32 (&a)[2][4], const Codes &codes, const Scales &scales, int chunk, int j, u32 lane) const {
        u32 pairs[2] = {};
        if (!ONE)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float value = scale_of(scales, half, chunk, j, lane);
                pairs[half] = pair<BF16>(value, value);
            }
        look_up<!ONE>(a, codes, pairs, j, lane);
    }
    /* A power of two; byte 0 is 2^-127. */
    static __device__ __forceinline__ float from_e8m0(u32 code) { return __uint_as_float(code ? code << 23 : 1 << 22); }
};

PRODUCT(few_rows_e2m1, Weight)
