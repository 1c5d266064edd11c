/* One token of each row through all decoder layers, in one launch (ops.decode_layers is the specification).

The blocks stay, one on each multiprocessor, and meet at a barrier of the whole grid where one product needs what another
wrote: five times a layer. Between launches the memory would idle; here each warp's ring of copies (product.cuh) runs
ahead over the ends of tiles and of products, since weights wait for nothing. A barrier costs what the ring does not hold.

A layer is four products: q, k and v; out; gate and up; down. Attention (attend.cuh) is between the first two. Norms have no
pass of their own: out and down put their tile of the residual stream h, of h times the next norm's weight, and of the sum
of h's squares; the product that follows multiplies its sums by 1 / rms. Gate and up take turns within a tile, in eights of
rows, so that a group has both and puts silu(gate) · up.

Adapters: u = A x is taken by the groups that have fewest tiles of W, 16 rows of A and a share of K each, before
anything else, and put it with tags, for which those wait who add B u to a tile. */

#include "weight4.cuh"

#include "attend.cuh"

#include "copies.cuh"

/* All blocks of the grid are here, and see what the others wrote. */
__device__ __forceinline__ void barrier() {
    __syncthreads();
    __syncthreads();
}

/* What a warp is and has; all functions are called by all warps. */
struct Worker {
    const Step &s;
    Weight w;
    Copies copies;
    u8 *ring;
    float *room, *factors, *u;     /* shared: sums; 1 / rms of each row; u [batch, ranks] */
    u32 *starts;                   /* shared: the first slot of each row */
    u32 warp, lane, group, part, tag, last, odd = 0, stage = 0;

    __device__ __forceinline__ Worker(const Step &s, Weight w)
        : s(s), w(w), copies(s, threadIdx.x / 32 % WK, threadIdx.x / 32 / WK * gridDim.x + blockIdx.x, gridDim.x * WR,
                             threadIdx.x % 32),
          warp(threadIdx.x / 32), lane(threadIdx.x % 32), group(warp / WK), part(warp % WK) {
        ring = shared + Weight::TABLE + warp * STAGES * Weight::SLOT;
        room = (float *)(tables() + 3);
        factors = room + ROOM;
        starts = (u32 *)(factors + s.batch);
        u = (float *)(starts + s.batch);
        last = *s.slot;
        for (u32 m = threadIdx.x; m < s.batch; m += THREADS)
            starts[m] = s.padding[m];
        tag = s.counters[1] * (4 * s.count);
    }

    __device__ __forceinline__ float *sums() const {
        return room + (group * 2 + odd) * WK * s.batch * ROWS;
    }

    /* Put h, this thread's new value of the residual stream, in row i of a tile (rows of 8 or 16 lanes: i is its lane's). */
    __device__ __forceinline__ void join(float norm, u32 m, u32 tile, u32 i, float h, bool inside) const {
        u16 bits = (u16)pair<BF16>(h, 0.0f);
        h = inside ? number<BF16>(bits) : 0.0f;
        u32 n = tile * ROWS + i;
        if (inside) {
            s.hidden[(u64)m * s.width + n] = bits;
            s.normed[(u64)m * s.width + n] = (u16)pair<BF16>(h * norm, 0.0f);
        }
        float square = h * h;
#pragma unroll
        for (u32 mask = ROWS / 2; mask; mask /= 2)
            square += shuffle(square, mask);
        if (inside && i == 0)
            s.squares[m * (s.width / ROWS) + tile] = square;
    }

    /* The residual stream as it comes in: nothing is added. */
    __device__ __forceinline__ void begin() const {
        for (u32 tile = group * gridDim.x + blockIdx.x; tile < s.width / ROWS; tile += gridDim.x * WR)
            for (u32 i = part * 32 + lane; i < (s.batch * ROWS + 31) / 32 * 32; i += 32 * WK) {
                u32 m = i / ROWS;
                bool inside = m < s.batch;
                float h = inside ? number<BF16>(s.hidden[(u64)m * s.width + tile * ROWS + i % ROWS]) : 0.0f;
                join(number<BF16>(s.norm[tile * ROWS + i % ROWS]), m, tile, i % ROWS, h, inside);
            }
    }

    /* 1 / rms of each row; every group does it for itself. */
    __device__ __forceinline__ void measure() const {
        u32 tiles = s.width / ROWS;
        for (u32 m = part; m < s.batch; m += WK) {
            float square = 0;
            for (u32 i = lane; i < tiles; i += 32)
                square += s.squares[m * tiles + i];
#pragma unroll
            for (u32 mask = 16; mask; mask /= 2)
                square += shuffle(square, mask);
            if (lane == 0)
                factors[m] = rsqrtf(square / s.width + s.eps);
        }
    }

    /* The group's sums come to shared memory. */
    template <u32 TILES> __device__ __forceinline__ void gather(const float (&sum)[TILES][NT][4]) {
        float *to = sums() + part * s.batch * ROWS;
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
        group_arrives<32 * WK>(group);
    }

    __device__ __forceinline__ float total(u32 m, u32 i) const {
        float total = 0;
#pragma unroll
        for (u32 k = 0; k < WK; k++)
            total += sums()[(k * s.batch + m) * ROWS + i];
        return total;
    }

    /* This group's shares of u = A x: the last groups have them, which have the fewest tiles. */
    __device__ __forceinline__ void low_rank(const Product &product, const u16 *x) {
        u32 steps = product.columns / 256, shares = (steps + WK - 1) / WK, units = product.ranks / 16 * shares;
        u32 groups = gridDim.x * WR, g = lane / 4, t = lane % 4;
        for (u32 unit = groups - 1 - (group * gridDim.x + blockIdx.x); unit < units; unit += groups) {
            u32 rows = unit / shares * 16, step = unit % shares * WK + part;
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
            gather(sum);
            for (u32 i = part * 32 + lane; i < s.batch * 16; i += 32 * WK)
                put_tagged(s.low + (u64)(unit % shares * s.batch + i / 16) * product.ranks + rows + i % 16,
                           total(i / 16, i % 16), tag);
            odd ^= 1;
        }
    }

    /* Begin to bring the rows of A that this warp is going to need near. */
    __device__ __forceinline__ void foresee(const Product &product) const {
        u32 steps = product.columns / 256, shares = (steps + WK - 1) / WK, groups = gridDim.x * WR;
        for (u32 unit = groups - 1 - (group * gridDim.x + blockIdx.x); unit < product.ranks / 16 * shares; unit += groups) {
            u32 step = unit % shares * WK + part;
            const u16 *a = product.down + (u64)(unit / shares * 16) * product.columns + step * 256;
            for (u32 i = lane; i < 64 && step < steps; i += 32) /* 16 rows of four lines */
                prefetch(a + (u64)(i / 4) * product.columns + i % 4 * 64);
        }
    }

    /* All of u comes to shared memory, zero where a row has another adapter. Groups of a block write the same. */
    __device__ __forceinline__ void take_low_rank(const Product &product) const {
        u32 shares = (product.columns / 256 + WK - 1) / WK, size = s.batch * product.ranks;
        for (u32 i = part * 32 + lane; i < size; i += 32 * WK) {
            float sum = 0;
            for (u32 share = 0; share < shares; share += 4) {
                u64 four[4] = {};
#pragma unroll
                for (u32 j = 0; j < 4; j++)
                    if (share + j < shares)
                        four[j] = peek(s.low + (u64)(share + j) * size + i);
#pragma unroll
                for (u32 j = 0; j < 4; j++)
                    if (share + j < shares)
                        sum += take_tagged(s.low + (u64)(share + j) * size + i, tag, four[j]);
            }
            u[i] = product.mask ? sum * number<BF16>(product.mask[i]) : sum;
        }
    }

    struct Early {         /* what a value needs from afar: it comes while the group is waited for */
        float h, norm;     /* of OUT and DOWN: what it is added to, and the next norm's weight there */
        uint4 up[2];       /* of products with one part a tile: its row of B, the first 16 ranks */
    };

    /* Of value i of a tile. */
    __device__ __forceinline__ Early early(
        const Layer &layer, const Product &product, u32 kind, u32 tile, u32 i) const {
        Early e = {};
        u32 m = i / ROWS, n = tile * ROWS + i % ROWS;
        if (kind == GATED || m >= s.batch)
            return e;
        if (product.ranks) {
            Place p = place(product, kind, tile, i % ROWS);
            const uint4 *up = (const uint4 *)(p.linear->up + (u64)p.row * p.linear->rank);
            if (p.linear->rank > 0)
                e.up[0] = up[0];
            if (p.linear->rank > 8)
                e.up[1] = up[1];
        }
        if (kind == OUT || kind == DOWN) {
            e.h = number<BF16>(s.hidden[(u64)m * s.width + n]);
            e.norm = number<BF16>(layer.norms[kind == DOWN][n]);
        }
        return e;
    }

    /* Row i of a tile for row m of x, complete; `e` where there is one. */
    __device__ __forceinline__ float value(
        const Product &product, u32 kind, u32 tile, u32 m, u32 i, const Early *e) const {
        Place p = place(product, kind, tile, i);
        float y = total(m, i);
        const uint4 *up = (const uint4 *)(p.linear->up + (u64)p.row * p.linear->rank);
        const float *down = u + m * product.ranks + p.linear->begin;
        for (u32 r = 0; r < p.linear->rank; r += 8, down += 8) {
            uint4 eight = !e || r > 8 ? up[r / 8] : r ? e->up[1] : e->up[0];
            u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (u32 j = 0; j < 8; j++)
                y += number<BF16>((u16)(words[j / 2] >> j % 2 * 16)) * down[j];
        }
        if (kind == QKV || kind == GATED)
            y *= factors[m];
        y += p.linear->bias ? number<BF16>(p.linear->bias[p.row]) : 0.0f;
        return number<BF16>((u16)pair<BF16>(y, 0.0f)); /* as every product's result is */
    }

    /* Put a tile. `e`: for this thread's first value. */
    __device__ __forceinline__ void finish(
        const Layer &layer, const Product &product, u32 kind, u32 tile, Early e) const {
        constexpr u32 HALF = ROWS / 2;
        u32 count = s.batch * (kind == GATED ? HALF : ROWS);
        for (u32 i = part * 32 + lane; i < (count + 31) / 32 * 32; i += 32 * WK) {
            if (kind == GATED) {
                u32 m = i / HALF, row = i % HALF / 8 * 16 + i % 8;
                if (i < count) {
                    float gate = value(product, kind, tile, m, row, nullptr);
                    float up = value(product, kind, tile, m, row + 8, nullptr);
                    u64 at = (u64)m * (product.tiles * HALF) + tile * HALF + i % HALF;
                    s.gated[at] = (u16)pair<BF16>(gate / (1 + expf(-gate)) * up, 0.0f);
                }
                continue;
            }
            u32 m = i / ROWS, row = i % ROWS;
            if (i >= 32 * WK)
                e = early(layer, product, kind, tile, i);
            float y = i < count ? value(product, kind, tile, m, row, &e) : 0.0f;
            if (kind == QKV) {
                if (i < count)
                    s.qkv[(u64)m * (product.tiles * ROWS) + tile * ROWS + row] = (u16)pair<BF16>(y, 0.0f);
                continue;
            }
            join(e.norm, m, tile, row, y + e.h, i < count);
        }
    }

    __device__ __forceinline__ void load(Sixteen (&to)[4], const u16 *x) const {
#pragma unroll
        for (int b = 0; b < 4; b++)
            to[b] = sixteen_of(x, w.columns, b, 0, s.batch, lane);
    }

    /* One of the four products. */
    __device__ __forceinline__ void run(const Layer &layer, u32 kind) {
        const Product &product = layer.products[kind];
        const u16 *x = kind == OUT ? s.attended : kind == DOWN ? s.gated : s.normed;
        tag++;
        u32 steps = product.columns / 256, first_tile = group * gridDim.x + blockIdx.x;
        const u16 *x_lane = x + (u64)(lane / 4) * product.columns + lane % 4 * 16;
        w.columns = product.columns;
        Sixteen now[4]; /* x of a step comes from afar: with few rows (PIPE) it is there a step early */
        if (PIPE && part < steps)
            load(now, x_lane + part * 256);
        if (kind == QKV || kind == GATED)
            measure();
        if (product.ranks)
            low_rank(product, x);
        for (u32 tile = first_tile; tile < product.tiles; tile += gridDim.x * WR) {
            if (NESTED)
#pragma unroll
                for (u32 half = 0; half < 2; half++)
                    w.shift[half] = place(product, kind, tile, 8 * half).linear->offset;
            if (product.ranks && part == 0 && lane < ROWS) {
                Place p = place(product, kind, tile, lane);
                prefetch(p.linear->up + (u64)p.row * p.linear->rank);
            }
            Sums sum = {};
            for (u32 step = part; step < steps; step += WK) {
                wait<STAGES - 2>();
                __syncwarp(); /* every lane's copies are there, and every lane has read the slot that is filled next */
                copies.next(ring);
                const u8 *slot = ring + stage * Weight::SLOT;
                if (PIPE) {
                    Sixteen next[4];
                    load(next, x_lane + (step + WK < steps ? step + WK : part) * 256);
                    w.multiply_by([&](int b, int) { return now[b]; }, sum, slot, lane);
#pragma unroll
                    for (int b = 0; b < 4; b++)
                        now[b] = next[b];
                } else {
                    w.compute(sum, slot, x_lane + step * 256, s.batch, lane);
                }
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            Early e = early(layer, product, kind, tile, part * 32 + lane);
            if (product.ranks && tile == first_tile)
                take_low_rank(product);
            gather(sum);
            finish(layer, product, kind, tile, e);
            odd ^= 1;
        }
        if (kind != DOWN)
            foresee(layer.products[kind + 1]);
        else if (copies.now + 1 < s.count)
            foresee(copies.at(copies.now + 1)->products[QKV]);
    }

    __device__ __forceinline__ Attention attention(const Layer &layer) const {
        return {layer.keys, layer.values, layer.q_norm, layer.k_norm, s.cos, s.sin, starts, s.heads, s.key_heads, s.slots,
                layer.window, last, s.eps, s.scale};
    }

    /* q, k and v, then attention, whose cache is brought near first. */
    __device__ __forceinline__ void attend(const Layer &layer) {
        const Attention a = attention(layer);
        u32 units = s.batch * s.heads / QUERIES, unit = blockIdx.x;
        for (u32 each = unit; each < units; each += gridDim.x)
            a.foresee(each);
        barrier();
        run(layer, QKV);
        Chunk chunk;
        if (unit < units)
            a.fetch(chunk, unit, a.first_slot(unit));
        barrier();
        for (; unit < units; unit += gridDim.x) {
            if (unit != blockIdx.x)
                a.fetch(chunk, unit, a.first_slot(unit));
            a.attend(s.qkv, s.attended + (u64)unit * QUERIES * HEAD, unit, chunk, room);
        }
    }
};

/* The other side of barriers is a warp that copies nothing: a fence waits for the copies of its own thread. It brings the
   tables of layers, too. */
__device__ __forceinline__ void keep_time(const Step &s) {
    u32 lane = threadIdx.x % 32, count = 0;
    for (u32 l = 0; l < s.count; l++)
        for (u32 i = 0; i < 5; i++) {
            __syncthreads();
            if (lane == 0) {
                tell(s.counters);
                wait_for(s.counters, count += gridDim.x);
            }
            __syncwarp();
            __syncthreads();
            if (i == 0 && l + 2 < s.count) /* nobody is in the layer before this one any more */
                for (u32 word = lane; word < sizeof(Layer) / 8; word += 32)
                    ((u64 *)(tables() + (l + 2) % 3))[word] = ((const u64 *)(s.layers + l + 2))[word];
        }
    __syncthreads();
    if (lane == 0 && count_up(s.counters) == count + gridDim.x - 1)
        s.counters[0] = 0, s.counters[1]++; /* the last block: for the next launch */
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode(Step s, Weight w) {
    for (u32 i = threadIdx.x; i < min(s.count, 2) * (sizeof(Layer) / 8); i += THREADS + 32)
        ((u64 *)tables())[i] = ((const u64 *)s.layers)[i];
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        __syncthreads();
        keep_time(s);
        return;
    }
    Worker worker(s, w);
    worker.copies.enter();
    for (int i = 0; i < STAGES - 1; i++)
        worker.copies.next(worker.ring);
    w.build();
    __syncthreads();
    worker.begin();
    for (u32 l = 0; l < s.count; l++) {
        const Layer &layer = tables()[l % 3];
        worker.copies.now = l;
        worker.attend(layer);
        for (u32 kind = OUT; kind <= DOWN; kind++) {
            barrier();
            worker.run(layer, kind);
        }
    }
    __syncthreads();
}
