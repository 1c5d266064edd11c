/* One token of each row through all decoder layers, in one launch (ops.decode_layers is the specification).

The blocks stay, one on each multiprocessor. Between launches the memory would idle; here each warp's ring of copies
(split_k.cuh) runs ahead over the ends of tiles and of products, since weights wait for nothing.

Where one product needs what another wrote, five times a layer, blocks meet at a barrier of the whole grid. If FLOW they
wait for the numbers instead, which saves most of a barrier's time: a layer's numbers have a place of their own, where all
bits are ones until they are written. There are two such sets; a launch uses one and makes the other ready for the next.

A layer is four products: q, k and v; out; gate and up; down. Attention (attend.cuh) is between the first two. Norms have no
pass of their own: out and down put their tile of the residual stream h, of h times the next norm's weight, and of the sum
of h's squares; the product that follows multiplies its sums by 1 / rms. Gate and up take turns within a tile, in eights of
rows, and silu(gate) · up is put.

Workers, WK warps, multiply and attend. Clerks, the CLERKS warps after them, finish: they add up what the workers leave in
shared memory, in one of two rooms by turns, and put the result where other blocks find it, while the workers are at the
next tile. No worker waits for another within a product.

Adapters: u = A x is taken by the blocks that have fewest tiles of W, 16 rows of A and a share of K each, before anything
else, and put with tags, for which the clerks wait, who add B u to a tile. */

#include "one_row.cuh"

#include "attend.cuh"

#include "copies.cuh"

#include "clerk.cuh"

/* Three tables, two rooms, inputs, the count of rooms served; for each row 1 / rms, its first slot and, by the launch, u. */
LAYOUT(Weight::TABLE + WARPS * STAGES * Weight::SLOT + 3 * sizeof(Layer) + 2 * HELD + 4 * (2 * ROOM + 1), 8, sizeof(Linear),
       sizeof(Product), sizeof(Layer), sizeof(Step), sizeof(Weight));

struct Worker : Member {
    Weight w;
    Copies copies;
    u8 *ring;
    u32 stage = 0;

    __device__ __forceinline__ Worker(const Step &s, Weight w)
        : Member(s), w(w), copies(s, threadIdx.x / 32, blockIdx.x, gridDim.x, threadIdx.x % 32) {
        ring = shared + Weight::TABLE + warp * STAGES * Weight::SLOT;
    }

    /* Until the clerks are done with what was in this room before: workers do not wait for each other. */
    __device__ __forceinline__ void enter_room() const {
        if (turn >= 2)
            wait_in_block(served, (turn - 1) * CLERKS);
    }

    __device__ __forceinline__ void leave_room() {
        block_goes_on<ALL>(FULL + turn % 2);
        turn++;
    }

    /* The workers' sums come to a room, and are the clerks' from there. */
    template <u32 TILES> __device__ __forceinline__ void hand_over(const float (&sum)[TILES][NT][4]) {
        enter_room();
        float *to = room() + warp * s.batch * ROWS;
#pragma unroll
        for (u32 r = 0; r < TILES; r++)
#pragma unroll
            for (u32 n = 0; n < NT; n++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    u32 m = 8 * n + lane % 4 * 2 + i % 2;
                    if (m < s.batch)
                        to[m * ROWS + 16 * r + i / 2 * 8 + lane / 4] = sum[r][n][i];
                }
        leave_room();
    }

    /* This block's shares of u = A x. */
    __device__ __forceinline__ void low_rank(const Product &product, const u16 *x) {
        u32 steps = product.columns / 256, g = lane / 4, t = lane % 4;
        Turns turns(product);
        for (u32 unit = turns.unit; unit < turns.count; unit += turns.apart) {
            u32 rows = unit / turns.shares * 16, step = unit % turns.shares * WK + warp;
            float sum[1][NT][4] = {};
            const u16 *a = product.down + (u64)(rows + g) * product.columns + step * 256 + t * 16;
            const u16 *from = x + (u64)g * product.columns + step * 256 + t * 16;
            if (step < steps)
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
            hand_over(sum);
        }
    }

    /* Begin to bring the rows of A that this warp is going to need near. */
    __device__ __forceinline__ void foresee(const Product &product) const {
        Turns turns(product);
        for (u32 unit = turns.unit; unit < turns.count; unit += turns.apart) {
            u32 step = unit % turns.shares * WK + warp;
            const u16 *a = product.down + (u64)(unit / turns.shares * 16) * product.columns + step * 256;
            for (u32 i = lane; i < 64 && step < product.columns / 256; i += 32) /* 16 rows of four lines */
                prefetch(a + (u64)(i / 4) * product.columns + i % 4 * 64);
        }
    }

    /* A product's input comes to shared memory as soon as it is there. Nobody reads what was there two products ago. */
    __device__ __forceinline__ void bring(u16 *to, const u16 *from, u32 steps) const {
        constexpr u32 MANY = (64 + WK - 1) / WK;
        for (u32 step = warp; step < steps; step += MANY * WK) {
            uint4 pieces[MANY];
#pragma unroll
            for (u32 j = 0; j < MANY; j++)
                if (step + j * WK < steps)
                    pieces[j] = peek((const uint4 *)(from + (step + j * WK) * 256) + lane);
#pragma unroll
            for (u32 j = 0; j < MANY; j++)
                if (step + j * WK < steps) {
                    u32 at = (step + j * WK) * 256;
                    ((uint4 *)(to + at))[lane] = take_written((const uint4 *)(from + at) + lane, pieces[j]);
                }
        }
        workers_arrive<THREADS>();
    }

    /* One of the four products. The workers take turns over all steps of all tiles. */
    __device__ __forceinline__ void run(const Layer &layer, u32 kind) {
        const Product &product = layer.products[kind];
        const u16 *from = (kind == OUT ? s.attended : kind == DOWN ? s.gated : s.normed[kind == GATED]) + record(copies.now);
        u32 steps = product.columns / 256, step = warp;
        u16 *held = x + (kind == OUT || kind == DOWN ? s.columns : 0);
        if (FLOW)
            bring(held, from, steps);
        const u16 *input = FLOW ? held : from, *of_lane = input + (u64)(lane / 4) * product.columns + lane % 4 * 16;
        RowOfX row;
        w.columns = product.columns;
        if (product.ranks)
            low_rank(product, input);
        for (u32 tile = blockIdx.x; tile < product.tiles; tile += gridDim.x) {
            if (NESTED && (kind == QKV || tile == blockIdx.x))
#pragma unroll
                for (u32 half = 0; half < 2; half++)
                    w.shift[half] = place(product, kind, tile, 8 * half).linear->offset;
            Sums sum = {};
            for (; step < steps; step += WK) {
                if (FLOW)
                    row.load(input + step * 256, lane);
                wait<STAGES - 2>();
                __syncwarp(); /* every lane's copies are there, and every lane has read the slot that is filled next */
                copies.next(ring);
                const u8 *slot = ring + stage * Weight::SLOT;
                if (FLOW)
                    add_row(w, sum, slot, row, lane);
                else
                    w.compute(sum, slot, of_lane + step * 256, s.batch, lane);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            step -= steps;
            if (FLOW)
                add_blocks(sum);
            hand_over(sum);
        }
        if (kind != DOWN)
            foresee(layer.products[kind + 1]);
        else if (copies.now + 1 < s.count)
            foresee(copies.at(copies.now + 1)->products[QKV]);
    }

    /* The units of attention, whose first part of the cache is on its way before the barrier. */
    __device__ __forceinline__ void attend(const Layer &layer) {
        const Attention a = attention(layer);
        u32 units = s.batch * s.heads / QUERIES * SPLITS, each = gridDim.x - 1 - blockIdx.x;
        Unit unit = a.unit(each < units ? each : 0);
        Chunk chunk;
        if (each < units)
            a.fetch(chunk, unit);
        if (!FLOW)
            __syncthreads();
        for (; each < units; each += gridDim.x) {
            if (each >= gridDim.x)
                unit = a.unit(each), a.fetch(chunk, unit);
            enter_room();
            a.attend(s.qkv + record(copies.now), unit, chunk, room());
            leave_room();
        }
    }

    __device__ __forceinline__ void work() {
        copies.enter();
        for (int i = 0; i < STAGES - 1; i++)
            copies.next(ring);
        w.build();
        __syncthreads();
        for (u32 l = 0; l < s.count; l++) {
            const Layer &layer = tables()[l % 3];
            copies.now = l;
            attention(layer).foresee(s.batch * s.heads / QUERIES * SPLITS);
#pragma unroll 1
            for (u32 kind = QKV; kind <= DOWN; kind++) {
                if (!FLOW || kind == QKV)
                    __syncthreads();
                run(layer, kind);
                if (kind == QKV)
                    attend(layer);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(ALL, 1) decode(Step s, Weight w) {
    for (u32 i = threadIdx.x; i < min(s.count, 2) * (sizeof(Layer) / 8); i += ALL)
        ((u64 *)tables())[i] = ((const u64 *)s.layers)[i];
    if (FLOW) { /* what the next launch's blocks exchange is not there yet */
        uint4 *next = (uint4 *)(s.normed[0] + (u64)((s.counters[1] + 1) % 2 * s.count) * s.record);
        for (u32 i = blockIdx.x * ALL + threadIdx.x; i < s.count * (s.record / 8); i += gridDim.x * ALL)
            next[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    __syncthreads();
    if (threadIdx.x < THREADS)
        Worker(s, w).work();
    else
        Clerk(s).work();
}
