/* What all warps of decode.cu have, and those of them that finish tiles. */

#pragma once

/* Constants, besides those of the parts: CLERKS; VALUES of a tile that a clerk's lane has; floats of a ROOM; FLOW, for one
row of x; HELD numbers of products' inputs in shared memory, 0 if not FLOW. */
constexpr u32 ALL = THREADS + 32 * CLERKS;
enum { FULL = 1, CLERKS_MEET = 3 }; /* barriers of a block by number; the first of each room */

/* Which shares of u = A x are this block's: those with the fewest tiles take turns. */
struct Turns {
    u32 shares, unit, apart, count;

    __device__ __forceinline__ Turns(const Product &product) {
        u32 light = gridDim.x - product.tiles % gridDim.x;
        shares = (product.columns / 256 + WK - 1) / WK, apart = light, count = product.ranks / 16 * shares;
        unit = gridDim.x - 1 - blockIdx.x;
        unit = unit < light ? unit : count;
    }
};

/* What all warps of a block have. */
struct Member {
    const Step &s;
    u16 *x;                        /* shared, if FLOW: inputs of products, QKV's and GATED's, then OUT's and DOWN's */
    float *rooms, *factors, *u;    /* shared: two rooms; 1 / rms of each row; u [batch, ranks] */
    u32 *starts, *served;          /* shared: the first slot of each row; how often clerks were done with a room */
    u32 warp, lane, last, launch, turn = 0; /* `turn`: of the rooms */

    __device__ __forceinline__ Member(const Step &s) : s(s), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        x = (u16 *)(tables() + 3);
        rooms = (float *)(x + HELD);
        factors = rooms + 2 * ROOM;
        starts = (u32 *)(factors + s.batch);
        served = starts + s.batch;
        u = (float *)(served + 1);
        last = *s.slot, launch = s.counters[1];
    }

    /* Where layer l's part of what blocks exchange begins. */
    __device__ __forceinline__ u64 record(u32 l) const { return (u64)(launch % 2 * s.count + l) * s.record; }

    __device__ __forceinline__ float *room() const { return rooms + turn % 2 * ROOM; }

    __device__ __forceinline__ Attention attention(const Layer &layer) const {
        return {layer.keys, layer.values, layer.q_norm, layer.k_norm, s.cos, s.sin, starts, s.heads, s.key_heads, s.slots,
                layer.window, last, s.eps, s.scale};
    }
};

struct Clerk : Member {
    static constexpr u32 PER = 32 / ROWS;                            /* rows of x that a clerk has at a time */
    u32 clerk, tag, count = 0; /* `count`: of blocks at all barriers so far */

    __device__ __forceinline__ Clerk(const Step &s) : Member(s), clerk(warp - WARPS) {
        tag = launch * (4 * s.count + 1) + 1; /* before anything is put, tags are 0 */
    }

    /* All blocks' clerks are here, and all warps see what they put; if FLOW, only the block's warps are, at a new layer. */
    __device__ __forceinline__ void barrier(bool new_layer) {
        if (FLOW) {
            if (new_layer)
                __syncthreads();
            return;
        }
        if (CLERKS > 1)
            clerks_meet();
        else
            __syncwarp();
        count += gridDim.x;
        if (clerk == 0 && lane == 0) {
            tell(s.counters);
            wait_for(s.counters, count);
        }
        __syncwarp();
        __syncthreads();
    }

    __device__ __forceinline__ void clerks_meet() const { block_waits<32 * CLERKS>(CLERKS_MEET); }

    /* Until all workers have left a room, and when this clerk is done with it. */
    __device__ __forceinline__ void wait_for_room() const { block_waits<ALL>(FULL + turn % 2); }
    __device__ __forceinline__ void done() {
        __syncwarp();
        if (lane == 0)
            tell_block(served);
        turn++;
    }

    /* Put h, this lane's new value of the residual stream, in row i of a tile. `normed`: what the next product takes. */
    __device__ __forceinline__ void join(u16 *normed, float norm, u32 m, u32 tile, u32 i, float h, bool inside) const {
        u16 bits = (u16)pair<BF16>(h, 0.0f);
        h = inside ? number<BF16>(bits) : 0.0f;
        u64 at = (u64)m * s.width + tile * ROWS + i;
        if (inside)
            s.hidden[at] = bits;
        if (normed)
            put_four<BF16>(normed + at, h * norm, inside);
        float square = h * h;
#pragma unroll
        for (u32 mask = ROWS / 2; mask; mask /= 2)
            square += shuffle(square, mask);
        if (inside && i == 0)
            put_tagged(s.squares + m * (s.width / ROWS) + tile, square, tag);
    }

    /* The residual stream as it comes in: nothing is added. */
    __device__ __forceinline__ void begin() const {
        for (u32 tile = blockIdx.x; tile < s.width / ROWS; tile += gridDim.x)
            for (u32 chunk = clerk; chunk * PER < s.batch; chunk += CLERKS) {
                u32 m = chunk * PER + lane / ROWS, i = lane % ROWS;
                bool inside = m < s.batch;
                float h = inside ? number<BF16>(s.hidden[(u64)m * s.width + tile * ROWS + i]) : 0.0f;
                join(s.normed[0] + record(0), number<BF16>(s.norm[tile * ROWS + i]), m, tile, i, h, inside);
            }
    }

    /* The sum of up to four tagged numbers, `count` of those there are, which are on their way together. */
    __device__ __forceinline__ static float take_four(const u64 *from, u32 apart, u32 count, u32 tag) {
        u64 four[4] = {};
        float sum = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (j < count)
                four[j] = peek(from + (u64)j * apart);
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (j < count)
                sum += take_tagged(from + (u64)j * apart, tag, four[j]);
        return sum;
    }

    /* 1 / rms of this clerk's rows. */
    __device__ __forceinline__ void measure() const {
        u32 tiles = s.width / ROWS;
        for (u32 chunk = clerk; chunk * PER < s.batch; chunk += CLERKS)
            for (u32 m = chunk * PER; m < min(s.batch, chunk * PER + PER); m++) {
                float square = 0;
                for (u32 i = lane; i < tiles; i += 128)
                    square += take_four(s.squares + m * tiles + i, 32, (tiles - i + 31) / 32, tag - 1);
#pragma unroll
                for (u32 mask = 16; mask; mask /= 2)
                    square += shuffle(square, mask);
                if (lane == 0)
                    factors[m] = rsqrtf(square / s.width + s.eps);
            }
        __syncwarp();
    }

    __device__ __forceinline__ float total(u32 m, u32 i) const {
        float total = 0;
#pragma unroll
        for (u32 k = 0; k < WK; k++)
            total += room()[(k * s.batch + m) * ROWS + i];
        return total;
    }

    /* The workers' shares of u. */
    __device__ __forceinline__ void put_low_rank(const Product &product) {
        Turns turns(product);
        for (u32 unit = turns.unit; unit < turns.count; unit += turns.apart) {
            u64 *to = s.low + (u64)(unit % turns.shares * s.batch) * product.ranks + unit / turns.shares * 16;
            wait_for_room();
            for (u32 i = clerk * 32 + lane; i < s.batch * 16; i += 32 * CLERKS)
                put_tagged(to + i / 16 * product.ranks + i % 16, total(i / 16, i % 16), tag);
            done();
        }
    }

    /* u of this clerk's rows comes to shared memory, zero where a row has another adapter. */
    __device__ __forceinline__ void take_low_rank(const Product &product) const {
        u32 shares = Turns(product).shares, size = s.batch * product.ranks;
        for (u32 chunk = clerk; chunk * PER < s.batch; chunk += CLERKS) {
            u32 end = min(s.batch, chunk * PER + PER) * product.ranks;
            for (u32 i = chunk * PER * product.ranks + lane; i < end; i += 32) {
                float sum = 0;
                for (u32 share = 0; share < shares; share += 4)
                    sum += take_four(s.low + (u64)share * size + i, size, shares - share, tag);
                u[i] = product.mask ? sum * number<BF16>(product.mask[i]) : sum;
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ static float times_eight(uint4 eight, const float *by) {
        u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
        float sum = 0;
#pragma unroll
        for (u32 j = 0; j < 8; j++)
            sum += number<BF16>((u16)(words[j / 2] >> j % 2 * 16)) * by[j];
        return sum;
    }

    /* Begin to bring the rows of B that this clerk is going to need near. */
    __device__ __forceinline__ void foresee(const Product &product, u32 kind) const {
        for (u32 tile = blockIdx.x; tile < product.tiles && lane < ROWS; tile += gridDim.x) {
            Place p = place(product, kind, tile, lane);
            if (p.linear->rank)
                prefetch(p.linear->up + (u64)p.row * p.linear->rank);
        }
    }

    struct Early { /* what a value of a tile needs besides the workers' sums, while they are waited for */
        float low, bias;   /* B u */
        float h, norm;     /* of OUT and DOWN: what it is added to, and the next norm's weight there */
    };

    __device__ __forceinline__ Early early(const Layer &layer, const Product &product, u32 kind, u32 tile, u32 chunk) const {
        Early e = {};
        u32 m = chunk * PER + lane / ROWS, i = lane % ROWS, n = tile * ROWS + i;
        if (m >= s.batch)
            return e;
        Place p = place(product, kind, tile, i);
        const uint4 *up = (const uint4 *)(p.linear->up + (u64)p.row * p.linear->rank);
        const float *down = u + m * product.ranks + p.linear->begin;
        if (kind == OUT || kind == DOWN) {
            e.h = number<BF16>(s.hidden[(u64)m * s.width + n]);
            e.norm = number<BF16>(layer.norms[kind == DOWN][n]);
        }
        e.bias = p.linear->bias ? number<BF16>(p.linear->bias[p.row]) : 0.0f;
        for (u32 r = 0; r < p.linear->rank; r += 16) { /* two loads at a time are on their way */
            bool more = r + 8 < p.linear->rank;
            uint4 first = up[r / 8], second = more ? up[r / 8 + 1] : make_uint4(0, 0, 0, 0);
            e.low += times_eight(first, down + r);
            if (more)
                e.low += times_eight(second, down + r + 8);
        }
        return e;
    }

    /* Put this lane's value of a tile. */
    __device__ __forceinline__ void finish(
        const Product &product, u32 l, u32 kind, u32 tile, u32 chunk, const Early &e) const {
        u32 m = chunk * PER + lane / ROWS, i = lane % ROWS;
        bool inside = m < s.batch;
        float y = 0;
        if (inside) {
            y = total(m, i) + e.low;
            y = (kind == QKV || kind == GATED ? y * factors[m] : y) + e.bias;
            y = number<BF16>((u16)pair<BF16>(y, 0.0f)); /* as every product's result is */
        }
        if (kind == QKV) {
            put_four<BF16>(s.qkv + record(l) + (u64)m * (product.tiles * ROWS) + tile * ROWS + i, y, inside);
        } else if (kind == GATED) {
            float up = shuffle(y, 8);
            u64 at = (u64)m * (product.tiles * (ROWS / 2)) + tile * (ROWS / 2) + i / 16 * 8 + i % 8;
            put_four<BF16>(s.gated + record(l) + at, y / (1 + expf(-y)) * up, inside && i / 8 % 2 == 0);
        } else {
            u16 *normed = kind == OUT ? s.normed[1] + record(l) : l + 1 < s.count ? s.normed[0] + record(l + 1) : nullptr;
            join(normed, e.norm, m, tile, i, y + e.h, inside);
        }
    }

    /* One of layer l's four products. */
    __device__ __forceinline__ void run(const Layer &layer, u32 l, u32 kind) {
        const Product &product = layer.products[kind];
        tag++;
        if (product.ranks) {
            if (clerk == 0)
                foresee(product, kind);
            put_low_rank(product);
        }
        if (blockIdx.x >= product.tiles) /* who needs a number does not wait for it: its place may have a new one */
            return;
        if (kind == QKV || kind == GATED)
            measure();
        if (product.ranks)
            take_low_rank(product);
        for (u32 tile = blockIdx.x; tile < product.tiles; tile += gridDim.x) {
            Early e[VALUES];
#pragma unroll
            for (u32 v = 0; v < VALUES; v++)
                e[v] = early(layer, product, kind, tile, clerk + v * CLERKS);
            wait_for_room();
#pragma unroll
            for (u32 v = 0; v < VALUES; v++)
                if ((clerk + v * CLERKS) * PER < s.batch)
                    finish(product, l, kind, tile, clerk + v * CLERKS, e[v]);
            done();
        }
    }

    __device__ __forceinline__ void attend(const Layer &layer, u32 l) {
        const Attention a = attention(layer);
        for (u32 each = gridDim.x - 1 - blockIdx.x; each < s.batch * s.heads / QUERIES * SPLITS; each += gridDim.x) {
            Unit u = a.unit(each);
            u16 *out = s.attended + record(l) + (u64)u.number * QUERIES * HEAD;
            wait_for_room();
            Attention::finish(out, room(), u, clerk, lane, s.shares, tag);
            done();
        }
    }

    __device__ __forceinline__ void work() {
        for (u32 m = clerk * 32 + lane; m < s.batch; m += 32 * CLERKS)
            starts[m] = s.padding[m];
        if (clerk == 0 && lane == 0)
            *served = 0;
        begin();
        __syncthreads();
        for (u32 l = 0; l < s.count; l++) {
            const Layer &layer = tables()[l % 3];
#pragma unroll 1
            for (u32 kind = QKV; kind <= DOWN; kind++) {
                barrier(kind == QKV);
                if (kind == QKV && clerk == 0 && l + 2 < s.count) /* nobody is in the layer before this one any more */
                    for (u32 word = lane; word < sizeof(Layer) / 8; word += 32)
                        ((u64 *)(tables() + (l + 2) % 3))[word] = ((const u64 *)(s.layers + l + 2))[word];
                if (FLOW && kind == QKV && l + 1 < s.count)
                    for (u32 line = lane * gridDim.x + blockIdx.x; line < s.record / 64; line += 32 * gridDim.x)
                        prefetch(s.normed[0] + record(l + 1) + line * 64);
                run(layer, l, kind);
                if (kind == QKV) {
                    barrier(false);
                    attend(layer, l);
                }
            }
        }
        if (clerk == 0 && lane == 0 && count_up(s.counters) == count + gridDim.x - 1)
            s.counters[0] = 0, s.counters[1]++; /* the last block: for the next launch */
    }
};
