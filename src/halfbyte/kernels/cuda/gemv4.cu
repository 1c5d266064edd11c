/* GEMM of up to 16 rows with NF4 and FP4 weights; see split_k.cuh and weight4.cuh. */

#include "weight4.cuh"

struct Decoder : Weight {
    typedef Sums Total;
    static constexpr u32 SUMS = TABLE + WARPS * STAGES * STAGE;

    static __device__ __forceinline__ u32 ring(u32 warp) { return TABLE + warp * STAGES * STAGE; }
    static __device__ __forceinline__ u32 first_row(u32 tile) { return tile * ROWS; }
    __device__ __forceinline__ float factor() const { return 1.0f; }
    __device__ __forceinline__ void build() {
        Weight::build();
        shift[0] = shift[1] = NESTED ? *offset : 0.0f;
    }

    struct Source {
        const Weight &w;
        u32 tile, k_tile, lane;

        __device__ __forceinline__ Source(const Weight &w, u32 tile, u32 k_tile, u32 lane)
            : w(w), tile(tile), k_tile(k_tile), lane(lane) {}

        /* Start copying the K tile to a stage; zeros for rows that do not exist. */
        __device__ __forceinline__ void fetch(u8 *stage) const {
            u32 at = lane / 8, piece = lane % 8, row = tile * ROWS, columns = w.columns;
#pragma unroll
            for (u32 i = 0; i < ROWS; i += 4) {
                u32 r = row + i + at;
                const u8 *from = w.packed + (u64)r * (columns / 2) + k_tile * 128 + piece * 16;
                copy<16>(stage + (i + at) * 128 + swizzle(at, piece) * 16, r < w.rows ? from : w.packed, r < w.rows);
            }
#pragma unroll
            for (u32 i = lane; i < ROWS; i += 32) {
                u64 block = (u64)(row + i) * (columns / 64) + k_tile * 4;
                bool inside = row + i < w.rows;
                block = inside ? block : 0;
                copy<SCALE>(stage + CODES + i * SCALE, w.absmax + block * (SCALE / 4), inside);
                if (NESTED)
                    copy<4>(stage + CODES + ROWS * 4 + i * 4, w.second + block / 256, inside);
            }
        }

        __device__ __forceinline__ void next(u32 first, u32 k_tiles, u32 stride) {
            k_tile += WK;
            if (k_tile >= k_tiles)
                k_tile = first, tile += stride;
        }
    };

    struct Operands { /* x is read from the L1 cache when it is needed */
        const Weight &w;
        const u16 *x;
        u32 batch, lane;

        __device__ __forceinline__ Operands(const Weight &w, const u16 *x, u32 batch, u32 lane, u32)
            : w(w), x(x + (u64)(lane / 4) * w.columns + lane % 4 * 16), batch(batch), lane(lane) {}

        __device__ __forceinline__ void accumulate(Sums &sum, const u8 *stage, u32, u32 k_tile, u32) const {
            w.compute(sum, stage, x + k_tile * 256, batch, lane);
        }
    };
};

LAYOUT(Decoder::SUMS, SUMS_OF_ROW, sizeof(Weight));

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemv4(Weight w, const u16 *x, const u16 *bias, u16 *out, u32 batch) {
    split_k(Decoder{w}, x, bias, out, batch);
}
