/* GEMM of up to 64 rows with 4-bit weights in bit planes (formats.bitplane, formats.hqq), see gemm.cuh; the table is as in
planes.cu. Of 128 columns of a row, a lane has the block of 32 number lane % 4: 16 bytes of codes.

Constants: BITS (4), GROUP (weights per scale and zero of HQQ; 0: E4M4 scales of blocks), and those of gemm.cuh. */

#include "planes.cuh"
#include "gemm.cuh"

struct Weight : Planes {
    static constexpr u32 SHARED_BY = GROUP ? GROUP : 32;
    /* In a stage: words of scales per row, followed by as many of zeros. */
    static constexpr u32 WORDS = GROUP == 32 ? 2 : 1, SCALES = GROUP ? 8 * WORDS : 4;
    static constexpr u32 TABLE = 65536, CODES = 64 * ROWS, BYTES = CODES + ROWS * SCALES;
    static constexpr bool SCALED = true;

    struct Kept { /* for rows g and g + 8: words whose bytes are indices; pairs of the scale, and of - zero · scale */
        u32 words[2][4], scale[2], zero[2];
    };

    static constexpr __device__ __forceinline__ u32 position(u32 pair) {
        return pair % 16 / 8 * 32 + pair % 8 * 4 + pair / 16;
    }

    struct Lane { /* row of W, offsets of its block of codes and of its scales, lane · 4 */
        u32 row, codes, scales, lane4;

        __device__ __forceinline__ Lane(u32 warp, u32 lane) {
            row = warp * 16 + lane / 4, codes = row * 64 + lane % 4 * 16, lane4 = lane * 4;
            scales = CODES + row * SCALES + (GROUP == 0 ? lane % 4 : GROUP < 128 ? lane % 4 * 32 / SHARED_BY * 2 : 0);
            opaque(row), opaque(codes), opaque(scales), opaque(lane4);
        }
    };

    /* Rows beyond the last repeat the last one. */
    __device__ __forceinline__ void fetch(u32 stage, u32 tile, u32 k_tile, u32 producer, u32 lane) const {
        u32 last = rows - 1, to = stage + (producer * 32 + lane) * 16;
        const u8 *codes = packed + k_tile * 64 + lane % 4 * 16;
        opaque(codes), opaque(to);
#pragma unroll
        for (u32 k = 0; k < ROWS / 8 / PRODUCERS; k++) {
            u32 row = min(tile + lane / 4 + (k * PRODUCERS + producer) * 8, last);
            copy_to<16>(to + k * PRODUCERS * 512, codes + (u64)row * (columns / 2));
        }
        to = stage + CODES + (producer * 16 + lane % 16) * SCALES + (GROUP == 0 || lane < 16 ? 0 : 4 * WORDS);
        opaque(to);
#pragma unroll
        for (u32 k = 0; k < ROWS / 16 / PRODUCERS; k++) {
            u32 row = min(tile + lane % 16 + (k * PRODUCERS + producer) * 16, last);
            u32 next = to + k * PRODUCERS * 16 * SCALES;
            if constexpr (GROUP == 0) {
                if (lane < 16)
                    copy_to<4>(next, scales + (u64)row * (columns / 32) + k_tile * 4);
            } else { /* half the lanes copy scales, half zeros */
                u64 first = (u64)row * (columns / SHARED_BY) + k_tile * 128 / SHARED_BY;
                const u8 *source = (lane < 16 ? scales : zeros) + (first & ~1ull) * 2;
#pragma unroll
                for (u32 word = 0; word < WORDS; word++)
                    copy_to<4>(next + 4 * word, source + 4 * word);
            }
        }
    }

    __device__ __forceinline__ void build() const {
        for (u32 i = threadIdx.x; i < 256 * 8; i += THREADS) {
            u32 entry = i / 8, first = code_of<2>(entry, 0), second = code_of<2>(entry, 1);
            u32 word = GROUP ? pair<BF16>((float)first, (float)second) : pair<BF16>(codebook[first], codebook[second]);
            *(uint4 *)(shared + entry * 256 + i % 8 * 16) = make_uint4(word, word, word, word);
        }
    }

    __device__ __forceinline__ void
    make(Quarter &quarter, Kept &kept, u32 stage, u32 k_tile, u32 i, const Lane &at) const {
#pragma unroll
        for (int high = 0; high < 2; high++) { /* rows g, then g + 8 */
            if (i == 0) {
                uint4 words = *(const uint4 *)(shared + stage + at.codes + high * 512);
                kept.words[high][0] = words.x, kept.words[high][1] = words.y;
                kept.words[high][2] = words.z, kept.words[high][3] = words.w;
                exchange_pairs(kept.words[high]);
                const u8 *scales = shared + stage + at.scales + high * 8 * SCALES;
                if constexpr (GROUP == 0) {
                    float scale = e4m4(*scales);
                    kept.scale[high] = pair<BF16>(scale, scale);
                } else {
                    u32 odd = GROUP == 128   ? k_tile % 2
                              : GROUP == 256 ? (at.row * (columns / 256) + k_tile / 2) % 2
                                             : 0;
                    float scale = number<true>(*(const u16 *)(scales + odd * 2));
                    float shift = -scale * number<false>(*(const u16 *)(scales + 4 * WORDS + odd * 2));
                    kept.scale[high] = pair<BF16>(scale, scale), kept.zero[high] = pair<BF16>(shift, shift);
                }
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 word = look<u32, 0>(__byte_perm(kept.words[high][k], at.lane4, 0x5504 | i << 4));
                quarter.a[k / 2][high + k % 2 * 2] =
                    GROUP ? fused<BF16>(word, kept.scale[high], kept.zero[high]) : times<BF16>(word, kept.scale[high]);
            }
        }
    }
};

LAYOUT(SHARED<Weight>, 0, sizeof(Parts<Weight>), sizeof(Sums));

extern "C" __global__ void __launch_bounds__(BOUND, 1) gemm_planes(const Parts<Weight> all, const u16 *x, u32 batch) {
    const Part<Weight> &part = all.parts[part_of_block(all.parts)];
    product(part.w, x, part.partials, batch, blockIdx.x - part.begin, part.blocks);
}
