/* Up to 64 rows with NF4 and FP4 weights (formats.blockwise4), see few_rows.cuh. Blocks are consecutive in memory, so they
cross rows of W if they are longer than a unit.

Constants: BLOCK (weights per scale, 32 to 4096), NESTED, ORIGIN (start of a block's shared memory), and those of
few_rows.cuh. */

#include "few_rows.cuh"

struct Weight : ByRows {
    const u8 *packed, *absmax; /* [N, K/2]; per block a byte (NESTED) or fp32 */
    const float *second, *code, *offset, *codebook;
    u32 rows, columns; /* N, K */
    float shift[2];    /* set by build: the offset of nested scales */

    /* With words from shared memory, the lanes of a row have 16 columns of each 64, and thus one scale. */
    static constexpr bool TOGETHER = LAYERS && !ONE && BLOCK >= 64;
    static constexpr int OWN = 1, RUNS = TOGETHER ? 2 : 0;
    static constexpr u32 X = TOGETHER ? 16 : 32;
    static constexpr u32 BLOCKS = BLOCK < UNIT ? UNIT / BLOCK : 1; /* blocks of a unit */
    static constexpr u32 PER_LANE = TOGETHER ? BLOCKS : BLOCKS > 1 ? 2 : 1;            /* of them, blocks with a lane's columns */
    static constexpr bool BEHIND = SPLIT && NT == 8; /* x fills the gaps of the table */
    static constexpr u32 TABLE = ByRows::TABLE + (NESTED && BEHIND ? 1024 : 0);

    /* Value `i` of nested scales, in the last gaps or behind the table. */
    static __device__ __forceinline__ float &value(u32 i) {
        return *(float *)(shared + (BEHIND ? ByRows::TABLE + 4 * i : gap(8192 - 256 + i)));
    }

    struct Scales {         /* of rows g and g + 8 */
        u32 words[2][TOGETHER ? 4 : 2]; /* a unit's bytes (NESTED), or the lane's numbers in fp32 */
        float second[2];
    };

    template <int COUNT> struct Source {
        Words<COUNT> words;
        const u8 *absmax[2 * COUNT]; /* of the unit (NESTED), or of the lane's first block */
        u32 unit[2 * COUNT];         /* among all units of W */

        __device__ __forceinline__ void find_scales(const Weight &w, int i, u32 lane) {
            u32 block = BLOCK < UNIT ? unit[i] * BLOCKS : unit[i] / (BLOCK < UNIT ? 1 : BLOCK / UNIT);
            absmax[i] = NESTED ? w.absmax + block : w.absmax + (u64)(block + (TOGETHER ? 0 : lane % 4 * 32 / BLOCK)) * 4;
        }
        __device__ __forceinline__ void seek(const Weight &w, u32 top, u32 first, u32 lane) {
            words.seek(w.packed, w.columns, top, first, lane);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                unit[i] = (top + lane / 4 + 8 * i) * (w.columns / UNIT) + first;
                find_scales(w, i, lane);
            }
        }
        __device__ __forceinline__ void load(Codes *codes, const Weight &, int chunk) const {
            words.load(codes, chunk);
        }
        __device__ __forceinline__ void copy(u8 *to, const Weight &, int chunk, u32 lane) const {
            words.copy(to, chunk, lane);
        }
        static __device__ __forceinline__ void take(Codes &codes, const u8 *from, u32 lane) {
            TOGETHER ? Words<COUNT>::take_halves(codes, from, lane) : Words<COUNT>::take(codes, from, lane);
        }
        __device__ __forceinline__ void load_scales(Scales *to, const Weight &w) const {
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                auto &two = to[i / 2].words[i % 2];
                if constexpr (!NESTED)
#pragma unroll
                    for (u32 k = 0; k < PER_LANE; k++)
                        two[k] = read_again<u32>(absmax[i] + k * (TOGETHER ? 1 : CHUNK / BLOCK) * 4);
                else if constexpr (BLOCKS == 8) {
                    uint2 bytes = read_again<uint2>(absmax[i]);
                    two[0] = bytes.x, two[1] = bytes.y;
                } else if constexpr (BLOCKS == 4)
                    two[0] = read_again<u32>(absmax[i]);
                else if constexpr (BLOCKS == 2)
                    two[0] = read_again<u16>(absmax[i]);
                else
                    two[0] = read_again<u8>(absmax[i]);
                if constexpr (NESTED) /* of 256 blocks, which are BLOCK units */
                    to[i / 2].second[i % 2] = read_again<float>(w.second + unit[i] / BLOCK);
            }
        }
        __device__ __forceinline__ void next(const Weight &w, u32 units) {
            words.next(units);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                unit[i] += units;
                if (BLOCK <= UNIT)
                    absmax[i] += units * (NESTED ? BLOCKS : BLOCKS * 4);
                else
                    find_scales(w, i, 0);
            }
        }
    };

    __device__ __forceinline__ void build() {
        for (u32 i = threadIdx.x; i < 256 * 8; i += THREADS)
            put(i / 8, i % 8, pair<BF16>(codebook[i / 8 >> 4], codebook[i / 8 & 15]));
        if (NESTED)
            for (u32 i = threadIdx.x; i < 256; i += THREADS)
                value(i) = code[i];
        shift[0] = NESTED ? *offset : 0.0f;
    }
    __device__ __forceinline__ float factor() const { return 1; }

    static constexpr __device__ __forceinline__ u32 x_offset(int j) {
        return TOGETHER ? j / 2 * 64 + j % 2 * 8 : ByRows::x_offset(j);
    }

    /* Of word j of the lane in row g + 8 * half. */
    __device__ __forceinline__ float scale_of(const Scales &scales, int half, int chunk, int j, u32 lane) const {
        const auto &two = scales.words[half];
        constexpr u32 CHUNKS = CHUNK / BLOCK; /* blocks of a chunk; 0: blocks are longer */
        u32 block = chunk * CHUNKS + (TOGETHER ? j / 2 * 64 : lane % 4 * 32) / BLOCK; /* of the unit */
        if constexpr (NESTED) {
            u32 byte = __byte_perm(two[CHUNKS == 4 ? chunk : 0], 0, 0x4440 | block % 4);
            return value(byte) * scales.second[half] + shift[0];
        } else
            return __uint_as_float(two[TOGETHER ? block : chunk % PER_LANE]);
    }
    __device__ __forceinline__ void scale(float (&to)[2], const Scales &scales, int chunk, int j, u32 lane) const {
        to[0] = scale_of(scales, 0, chunk, j, lane), to[1] = scale_of(scales, 1, chunk, j, lane);
    }
    __device__ __forceinline__ void
    operands(u32 (&a)[2][4], const Codes &codes, const Scales &scales, int chunk, int j, u32 lane) const {
        u32 pairs[2] = {};
        if (!ONE && !TOGETHER)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float number = scale_of(scales, half, chunk, j, lane);
                pairs[half] = pair<BF16>(number, number);
            }
        look_up<!ONE && !TOGETHER>(a, codes, pairs, j, lane);
    }
};

static_assert(SPLIT || WARPS * ROWS * RT * 8 * NT <= 8192 - 256, "sums and nested scales share the gaps");
PRODUCT(few_rows4, Weight)
