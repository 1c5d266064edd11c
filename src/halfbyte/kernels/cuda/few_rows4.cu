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

    static constexpr u32 COUNT = BLOCK < UNIT ? UNIT / BLOCK : 1; /* blocks of a unit */
    static constexpr u32 PER_LANE = COUNT > 1 ? 2 : 1;            /* of them, blocks with a lane's columns */
    static constexpr bool BEHIND = SPLIT && NT == 8; /* x fills the gaps of the table */
    static constexpr u32 TABLE = ByRows::TABLE + (NESTED && BEHIND ? 1024 : 0);

    /* Value `i` of nested scales, in the last gaps or behind the table. */
    static __device__ __forceinline__ float &value(u32 i) {
        return *(float *)(shared + (BEHIND ? ByRows::TABLE + 4 * i : gap(8192 - 256 + i)));
    }

    struct Scales {         /* of rows g and g + 8 */
        u32 words[2][2];    /* a unit's bytes (NESTED), or the lane's numbers in fp32 */
        float second[2];
    };

    struct Source {
        Words words;
        const u8 *absmax[2 * RT]; /* of the unit (NESTED), or of the lane's first block */
        u32 unit[2 * RT];         /* among all units of W */

        __device__ __forceinline__ void find_scales(const Weight &w, int i, u32 lane) {
            u32 block = BLOCK < UNIT ? unit[i] * COUNT : unit[i] / (BLOCK < UNIT ? 1 : BLOCK / UNIT);
            absmax[i] = NESTED ? w.absmax + block : w.absmax + (u64)(block + lane % 4 * 32 / BLOCK) * 4;
        }
        __device__ __forceinline__ void seek(const Weight &w, u32 top, u32 first, u32 lane) {
            words.seek(w.packed, w.columns, top, first, lane);
#pragma unroll
            for (int i = 0; i < 2 * RT; i++) {
                unit[i] = (top + lane / 4 + 8 * i) * (w.columns / UNIT) + first;
                find_scales(w, i, lane);
            }
        }
        __device__ __forceinline__ void load(Codes (&codes)[RT], const Weight &, int chunk) const {
            words.load(codes, chunk);
        }
        __device__ __forceinline__ void load_scales(Scales (&to)[RT], const Weight &w) const {
#pragma unroll
            for (int i = 0; i < 2 * RT; i++) {
                u32(&two)[2] = to[i / 2].words[i % 2];
                if constexpr (!NESTED)
#pragma unroll
                    for (u32 k = 0; k < PER_LANE; k++)
                        two[k] = read_again<u32>(absmax[i] + k * (CHUNK / BLOCK) * 4);
                else if constexpr (COUNT == 8) {
                    uint2 bytes = read_again<uint2>(absmax[i]);
                    two[0] = bytes.x, two[1] = bytes.y;
                } else if constexpr (COUNT == 4)
                    two[0] = read_again<u32>(absmax[i]);
                else if constexpr (COUNT == 2)
                    two[0] = read_again<u16>(absmax[i]);
                else
                    two[0] = read_again<u8>(absmax[i]);
                if constexpr (NESTED) /* of 256 blocks, which are BLOCK units */
                    to[i / 2].second[i % 2] = read_again<float>(w.second + unit[i] / BLOCK);
            }
        }
        __device__ __forceinline__ void next(const Weight &w) {
            words.next();
#pragma unroll
            for (int i = 0; i < 2 * RT; i++) {
                unit[i]++;
                if (BLOCK <= UNIT)
                    absmax[i] += NESTED ? COUNT : COUNT * 4;
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

    __device__ __forceinline__ void scale(float (&)[2], const Scales &, int, int) const {}
    __device__ __forceinline__ void
    operands(u32 (&a)[2][4], const Codes &codes, const Scales &scales, int chunk, int j, u32 lane) const {
        u32 scale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32(&two)[2] = scales.words[half];
            float number;
            if constexpr (NESTED) {
                constexpr u32 CHUNKS = CHUNK / BLOCK; /* blocks of a chunk; 0: blocks are longer */
                u32 place = CHUNKS == 4 ? lane % 4 : chunk * CHUNKS + lane % 4 * 32 / BLOCK;
                u32 byte = __byte_perm(two[CHUNKS == 4 ? chunk : 0], 0, 0x4440 | place);
                number = value(byte) * scales.second[half] + shift[0];
            } else
                number = __uint_as_float(two[chunk % PER_LANE]);
            scale[half] = pair<BF16>(number, number);
        }
        look_up(a, codes, scale, j, lane);
    }
};

static_assert(SPLIT || WARPS * ROWS * RT * 8 * NT <= 8192 - 256, "sums and nested scales share the gaps");
PRODUCT(few_rows4, Weight)
