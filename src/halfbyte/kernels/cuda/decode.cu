/* One token of each sequence through all decoder layers, in one launch: a persistent cooperative kernel (specification:
ops.decode_layers).

There is one persistent block per multiprocessor. Between separate launches the memory would idle; here each warp's ring
of copies runs ahead over the ends of tiles and of products, since weights do not depend on results.

The decoder of the weights' format is that of few_rows.cuh: the constant FORMAT_<source> chooses it.

Five times per layer one product needs another's result, and blocks synchronise at a grid-wide barrier. With FLAG_SYNC
they wait for the values themselves, which saves most of a barrier's time: each layer has its own exchange slab, in
which all bits are ones until a value is written. There are two sets of slabs; a launch uses one and resets the other
for the next launch.

A layer is four products: q, k and v; out; gate and up; down. Attention (attend.cuh) follows the first. Norms have no
pass of their own: out and down write their tile of the residual stream h, of h times the next norm's weight, and of the
sum of h's squares; the next product multiplies its sums by 1 / rms. A tile is 32 rows of a weight, or 16 of gate
and 16 of up, of which silu(gate) · up is written.

The WK MMA warps compute products and attention. The epilogue warps add up the partial sums that the MMA warps write to
shared memory, alternating between two buffers, and publish the result to other blocks, while the MMA warps compute the
next tile. MMA warps do not wait for each other within a product.

Adapters: the blocks with the fewest tiles of W compute u = A x first, in units of 16 rows of A and a share of K, and
publish it with epochs; the epilogue warps wait for it and add B u to a tile. */

#define LAYERS 1
#define SPLIT 0
#define PRODUCT(...)
#if FORMAT_few_rows4
#include "few_rows4.cu"
#elif FORMAT_few_rows_e2m1
#include "few_rows_e2m1.cu"
#elif FORMAT_few_rows_int4
#include "few_rows_int4.cu"
#else
#include "few_rows_planes.cu"
#endif

constexpr u32 TILE_ROWS = ROWS * RT, STAGE = 2 * RT * 32 * Weight::LANE; /* of W in a tile; bytes of a K tile's words */
static_assert(RT == 2 && WR == 1, "a tile is 32 rows, one of each lane of an epilogue warp");

#include "attend.cuh"

#include "copies.cuh"

#include "epilogue.cuh"

/* Three tables, two buffers, inputs, the count of buffers read; for each sequence 1 / rms, its first slot and u, whose
size the launch adds. */
LAYOUT(Weight::TABLE + WARPS * STAGES * STAGE + 3 * sizeof(Layer) + 2 * HELD + 4 * (2 * BUFFER + 1), 8,
       sizeof(Linear), sizeof(Product), sizeof(Layer), sizeof(Step));
static_assert(sizeof(Layer) % 16 == 0, "tables of layers are copied, and what follows them is aligned, by 16 bytes");
static_assert(HELD % 8 == 0 && BUFFER % 4 == 0, "inputs and buffers are taken 16 bytes at a time");

struct MmaWarp : WarpState {
    Copies copies;
    Scales scales[STAGES - 1]; /* of the next K tiles */
    u8 *ring;
    u32 stage = 0;

    __device__ __forceinline__ MmaWarp(const Step &s)
        : WarpState(s), copies(s, threadIdx.x / 32, blockIdx.x, gridDim.x, threadIdx.x % 32) {
        ring = shared + Weight::TABLE + warp * STAGES * STAGE;
    }

    /* Wait until the epilogue warps have read this buffer's previous contents. */
    __device__ __forceinline__ void acquire_buffer() const {
        if (turn >= 2)
            spin_until_cta(served, (turn - 1) * EPILOGUE_WARPS);
    }

    __device__ __forceinline__ void release_buffer() {
        named_barrier_arrive<ALL>(FULL + turn % 2);
        turn++;
    }

    /* Write the MMA warps' partial sums to a buffer and hand it to the epilogue warps. `row`: of W, by row of an
       operand. */
    template <u32 TILES, typename Row>
    __device__ __forceinline__ void put_sums(const float (&sum)[TILES][NT][4], const float (&scale)[TILES], Row row) {
        acquire_buffer();
        float *to = buffer() + warp * s.batch * TILE_ROWS;
#pragma unroll
        for (u32 r = 0; r < TILES; r++)
#pragma unroll
            for (u32 n = 0; n < NT; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u32 m = 8 * n + lane % 4 * 2 + i % 2;
                    if (m < s.batch)
                        to[m * TILE_ROWS + ROWS * r + row(lane / 4 + i / 2 * 8)] = sum[r][n][i] * scale[r];
                }
        release_buffer();
    }

    /* Compute this block's shares of u = A x. */
    __device__ __forceinline__ void low_rank(const Product &product, const u16 *x) {
        u32 k_tiles = product.columns / 256, g = lane / 4, t = lane % 4;
        LowRankShares turns(product);
        for (u32 unit = turns.unit; unit < turns.count; unit += turns.apart) {
            u32 rows = unit / turns.shares * 16, k_tile = unit % turns.shares * WK + warp;
            float sum[1][NT][4] = {};
            const u16 *a = product.down + (u64)(rows + g) * product.columns + k_tile * 256 + t * 16;
            const u16 *from = x + (u64)g * product.columns + k_tile * 256 + t * 16;
            if (k_tile < k_tiles)
#pragma unroll(NT > 1 ? 1 : 4)
            for (u32 b = 0; b < 4; b++, a += 64, from += 64) {
                const uint4 *upper = (const uint4 *)a, *lower = (const uint4 *)(a + 8 * (u64)product.columns);
                uint4 a0 = upper[0], a1 = upper[1], b0 = lower[0], b1 = lower[1];
                u32 left[4][4] = {{a0.x, b0.x, a0.y, b0.y}, {a0.z, b0.z, a0.w, b0.w},
                                  {a1.x, b1.x, a1.y, b1.y}, {a1.z, b1.z, a1.w, b1.w}};
#pragma unroll
                for (u32 n = 0; n < NT; n++) {
                    const uint4 *right = (const uint4 *)(from + (u64)(8 * n) * product.columns), none = {0, 0, 0, 0};
                    bool inside = 8 * n + g < s.batch;
                    uint4 x0 = inside ? right[0] : none, x1 = inside ? right[1] : none;
                    multiply<BF16>(sum[0][n], left[0], x0.x, x0.y);
                    multiply<BF16>(sum[0][n], left[1], x0.z, x0.w);
                    multiply<BF16>(sum[0][n], left[2], x1.x, x1.y);
                    multiply<BF16>(sum[0][n], left[3], x1.z, x1.w);
                }
            }
            const float one[] = {1};
            put_sums(sum, one, [](u32 r) { return r; });
        }
    }

    /* Prefetch the rows of A that this warp needs next to L2. */
    __device__ __forceinline__ void prefetch_a(const Product &product) const {
        LowRankShares turns(product);
        for (u32 unit = turns.unit; unit < turns.count; unit += turns.apart) {
            u32 k_tile = unit % turns.shares * WK + warp;
            const u16 *a = product.down + (u64)(unit / turns.shares * 16) * product.columns + k_tile * 256;
            for (u32 i = lane; i < 64 && k_tile < product.columns / 256; i += 32) /* 16 rows of four lines */
                prefetch(a + (u64)(i / 4) * product.columns + i % 4 * 64);
        }
    }

    /* Store eight numbers at these places. */
    __device__ __forceinline__ static void scatter(u16 *to, uint4 eight, uint4 low, uint4 high) {
        to[low.x] = (u16)eight.x, to[low.y] = (u16)(eight.x >> 16), to[low.z] = (u16)eight.y;
        to[low.w] = (u16)(eight.y >> 16), to[high.x] = (u16)eight.z, to[high.y] = (u16)(eight.z >> 16);
        to[high.z] = (u16)eight.w, to[high.w] = (u16)(eight.w >> 16);
    }

    /* Copy a product's input to shared memory, in the order of the weights' columns, as soon as it is written. The previous contents, of two products ago, are
       not read any more. */
    __device__ __forceinline__ void bring(u16 *to, const u16 *from, const int *order, u32 k_tiles) const {
        constexpr u32 MANY = (64 + WK - 1) / WK;
        for (u32 k_tile = warp; k_tile < k_tiles; k_tile += MANY * WK) {
            uint4 pieces[MANY];
#pragma unroll
            for (u32 j = 0; j < MANY; j++)
                if (k_tile + j * WK < k_tiles)
                    pieces[j] = peek((const uint4 *)(from + (k_tile + j * WK) * 256) + lane);
#pragma unroll
            for (u32 j = 0; j < MANY; j++)
                if (k_tile + j * WK < k_tiles) {
                    u32 at = (k_tile + j * WK) * 256 + lane * 8;
                    uint4 eight = take_written((const uint4 *)(from + at), pieces[j]);
                    if (order)
                        scatter(to, eight, ((const uint4 *)(order + at))[0], ((const uint4 *)(order + at))[1]);
                    else
                        *(uint4 *)(to + at) = eight;
                }
        }
        mma_warps_sync<THREADS>();
    }

    /* Compute one of the four products. The MMA warps alternate over all K tiles of all tiles. */
    __device__ __forceinline__ void run(const Layer &layer, u32 kind) {
        const Product &product = layer.products[kind];
        const u16 *from = kind == OUT ? s.attended : kind == DOWN ? s.gated : s.normed[kind == GATED];
        from += slab(copies.now);
        u32 k_tiles = product.columns / UNIT, k_tile = warp;
        u16 *held = x + (kind == OUT || kind == DOWN ? s.columns : 0);
        if (FLAG_SYNC)
            bring(held, from, product.order, k_tiles);
        const u16 *input = FLAG_SYNC ? held : from;
        if (product.ranks)
            low_rank(product, product.order ? from : input);
        input += (ONE ? 0 : (u64)(lane / 4) * product.columns) + lane % 4 * Weight::X;
        uint4 values[2][NT][4] = {};
        for (u32 tile = blockIdx.x; tile < product.tiles; tile += gridDim.x) {
            Weight weights[RT];
            float factors[RT], sum[RT][NT][4] = {};
#pragma unroll
            for (int r = 0; r < RT; r++) {
                weights[r] = locate(product, kind, tile, ROWS * r).linear->w;
                factors[r] = weights[r].factor();
            }
            for (; k_tile < k_tiles; k_tile += WK) {
#pragma unroll
                for (int chunk = 0; chunk < 2; chunk++)
#pragma unroll
                    for (int n = 0; n < NT; n++)
                        if (has_x<Weight>(lane, n, s.batch))
#pragma unroll
                            for (int j = 0; j < 4; j++)
                                values[chunk][n][j] = *(const uint4 *)(input + (u64)(8 * n) * product.columns +
                                                                       k_tile * UNIT + chunk * CHUNK + Weight::x_offset(j));
                wait<STAGES - 2>();
                __syncwarp(); /* copies have arrived; all lanes have read the stage filled next */
                Scales now;
#pragma unroll
                for (int r = 0; r < RT; r++) {
                    now[r] = scales[0][r];
#pragma unroll
                    for (int i = 1; i < STAGES - 1; i++)
                        scales[i - 1][r] = scales[i][r];
                }
                copies.next(ring, scales[STAGES - 2]);
#pragma unroll
                for (int chunk = 0; chunk < 2; chunk++) {
                    Weight::Codes codes[RT];
#pragma unroll
                    for (int r = 0; r < RT; r++)
                        Weight::Source<1>::take(codes[r], words_of(ring + stage * STAGE, chunk, r), lane);
                    multiply_chunk<Weight>(
                        sum, [&](int r) -> const Weight & { return weights[r]; }, codes, now, chunk, lane,
                        [&](int n, int j) { return values[chunk][n][j]; });
                }
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            k_tile -= k_tiles;
            add_lanes<Weight>(sum);
            put_sums(sum, factors, [](u32 r) { return Weight::row(r); });
        }
        if (kind != DOWN)
            prefetch_a(layer.products[kind + 1]);
        else if (copies.now + 1 < s.count)
            prefetch_a(copies.at(copies.now + 1)->products[QKV]);
    }

    /* Compute the units of attention; loads of the cache's first part are issued before the barrier. */
    __device__ __forceinline__ void attend(const Layer &layer) {
        const Attention a = attention(layer);
        u32 units = s.batch * s.heads / QUERIES * SPLITS, each = gridDim.x - 1 - blockIdx.x;
        Unit unit = a.unit(each < units ? each : 0);
        Chunk chunk;
        if (each < units)
            a.fetch(chunk, unit);
        if (!FLAG_SYNC)
            __syncthreads();
        for (; each < units; each += gridDim.x) {
            if (each >= gridDim.x)
                unit = a.unit(each), a.fetch(chunk, unit);
            acquire_buffer();
            a.attend(s.qkv + slab(copies.now), unit, chunk, buffer());
            release_buffer();
        }
    }

    __device__ __forceinline__ void work() {
        copies.enter();
        for (int i = 0; i < STAGES - 1; i++)
            copies.next(ring, scales[i]);
        Weight(s.layers->products[0].parts[0].w).build();
        __syncthreads();
        for (u32 l = 0; l < s.count; l++) {
            const Layer &layer = tables()[l % 3];
            copies.now = l;
            attention(layer).prefetch_cache(s.batch * s.heads / QUERIES * SPLITS);
#pragma unroll 1
            for (u32 kind = QKV; kind <= DOWN; kind++) {
                if (!FLAG_SYNC || kind == QKV)
                    __syncthreads();
                run(layer, kind);
                if (kind == QKV)
                    attend(layer);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(ALL, 1) decode(Step s) {
    for (u32 i = threadIdx.x; i < min(s.count, 2) * (sizeof(Layer) / 8); i += ALL)
        ((u64 *)tables())[i] = ((const u64 *)s.layers)[i];
    if (FLAG_SYNC) { /* reset the next launch's exchange slabs */
        uint4 *next = (uint4 *)(s.normed[0] + (u64)((s.counters[1] + 1) % 2 * s.count) * s.slab);
        for (u32 i = blockIdx.x * ALL + threadIdx.x; i < s.count * (s.slab / 8); i += gridDim.x * ALL)
            next[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    __syncthreads();
    if (threadIdx.x < THREADS)
        MmaWarp(s).work();
    else
        EpilogueWarp(s).work();
}
