/* State of all warps of decode.cu, and its epilogue warps, which finish tiles. */

#pragma once

/* Additional constants: EPILOGUE_WARPS; VALUES of a tile per lane of an epilogue warp; floats of a BUFFER; FLAG_SYNC,
for one row of x; HELD numbers of products' inputs in shared memory, 0 without FLAG_SYNC. */
constexpr u32 ALL = THREADS + 32 * EPILOGUE_WARPS;
enum { FULL = 1, EPILOGUE_BARRIER = 3 }; /* named barriers of a block; FULL and FULL + 1 for the two buffers */

/* This block's shares of u = A x: the blocks with the fewest tiles alternate. */
struct LowRankShares {
    u32 shares, unit, apart, count;

    __device__ __forceinline__ LowRankShares(const Product &product) {
        u32 light = gridDim.x - product.tiles % gridDim.x;
        shares = (product.columns / 256 + WK - 1) / WK, apart = light, count = product.ranks / 16 * shares;
        unit = gridDim.x - 1 - blockIdx.x;
        unit = unit < light ? unit : count;
    }
};

/* State of every warp of a block. */
struct WarpState {
    const Step &s;
    u16 *x;                        /* shared, with FLAG_SYNC: inputs of QKV and GATED, then of OUT and DOWN */
    float *buffers, *factors, *u;    /* shared: two buffers; 1 / rms of each sequence; u [batch, ranks] */
    u32 *starts, *served;          /* shared: the first slot of each sequence; number of times a buffer was read */
    u32 warp, lane, last, launch, turn = 0; /* `turn`: of the buffers */

    __device__ __forceinline__ WarpState(const Step &s) : s(s), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        x = (u16 *)(tables() + 3);
        buffers = (float *)(x + HELD);
        factors = buffers + 2 * BUFFER;
        starts = (u32 *)(factors + s.batch);
        served = starts + s.batch;
        u = (float *)(served + 1);
        last = *s.slot, launch = s.counters[1];
    }

    /* Offset of layer l's exchange slab. */
    __device__ __forceinline__ u64 slab(u32 l) const { return (u64)(launch % 2 * s.count + l) * s.slab; }

    __device__ __forceinline__ float *buffer() const { return buffers + turn % 2 * BUFFER; }

    __device__ __forceinline__ Attention attention(const Layer &layer) const {
        return {layer.keys, layer.values, layer.q_norm, layer.k_norm, s.cos, s.sin, starts, s.heads, s.key_heads,
                s.slots, layer.window, last, s.eps, s.scale};
    }
};

struct EpilogueWarp : WarpState {
    u32 index, epoch, count = 0; /* `count`: of blocks at all barriers so far */

    __device__ __forceinline__ EpilogueWarp(const Step &s) : WarpState(s), index(warp - WARPS) {
        epoch = launch * (4 * s.count + 1) + 1; /* epochs of unwritten values are 0 */
    }

    /* Grid-wide barrier: all warps then see what all blocks' epilogue warps have written. With FLAG_SYNC only a
       block-wide barrier at a new layer. */
    __device__ __forceinline__ void barrier(bool new_layer) {
        if (FLAG_SYNC) {
            if (new_layer)
                __syncthreads();
            return;
        }
        if (EPILOGUE_WARPS > 1)
            epilogue_sync();
        else
            __syncwarp();
        count += gridDim.x;
        if (index == 0 && lane == 0) {
            red_add_release(s.counters);
            spin_until(s.counters, count);
        }
        __syncwarp();
        __syncthreads();
    }

    __device__ __forceinline__ void epilogue_sync() const { named_barrier_sync<32 * EPILOGUE_WARPS>(EPILOGUE_BARRIER); }

    /* Wait until all MMA warps have written a buffer; signal that this epilogue warp has read it. */
    __device__ __forceinline__ void wait_for_sums() const { named_barrier_sync<ALL>(FULL + turn % 2); }
    __device__ __forceinline__ void done() {
        __syncwarp();
        if (lane == 0)
            red_add_release_cta(served);
        turn++;
    }

    /* Write this lane's value h of the residual stream, of a tile. `normed`: input of the next product. */
    __device__ __forceinline__ void put_residual(u16 *normed, float norm, u32 m, u32 tile, float h) const {
        u16 bits = (u16)pair<BF16>(h, 0.0f);
        h = number<BF16>(bits);
        u64 at = (u64)m * s.width + tile * TILE_ROWS + lane;
        s.hidden[at] = bits;
        if (normed)
            put_four<BF16>(normed + at, h * norm, true);
        float square = h * h;
#pragma unroll
        for (u32 mask = TILE_ROWS / 2; mask; mask /= 2)
            square += shuffle(square, mask);
        if (lane == 0)
            put_with_epoch(s.squares + m * (s.width / TILE_ROWS) + tile, square, epoch);
    }

    /* Publish the incoming residual stream. */
    __device__ __forceinline__ void begin() const {
        for (u32 tile = blockIdx.x; tile < s.width / TILE_ROWS; tile += gridDim.x)
            for (u32 m = index; m < s.batch; m += EPILOGUE_WARPS) {
                float h = number<BF16>(s.hidden[(u64)m * s.width + tile * TILE_ROWS + lane]);
                put_residual(s.normed[0] + slab(0), number<BF16>(s.norm[tile * TILE_ROWS + lane]), m, tile, h);
            }
    }

    /* The sum of the first `count` of four numbers with epochs, loaded concurrently. */
    __device__ __forceinline__ static float take_four(const u64 *from, u32 apart, u32 count, u32 epoch) {
        u64 four[4] = {};
        float sum = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (j < count)
                four[j] = peek(from + (u64)j * apart);
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            if (j < count)
                sum += take_at_epoch(from + (u64)j * apart, epoch, four[j]);
        return sum;
    }

    /* Compute 1 / rms of this warp's sequences. */
    __device__ __forceinline__ void measure() const {
        u32 tiles = s.width / TILE_ROWS;
        for (u32 m = index; m < s.batch; m += EPILOGUE_WARPS) {
            float square = 0;
            for (u32 i = lane; i < tiles; i += 128)
                square += take_four(s.squares + m * tiles + i, 32, (tiles - i + 31) / 32, epoch - 1);
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
            total += buffer()[(k * s.batch + m) * TILE_ROWS + i];
        return total;
    }

    /* Publish the MMA warps' shares of u. */
    __device__ __forceinline__ void put_low_rank(const Product &product) {
        LowRankShares turns(product);
        for (u32 unit = turns.unit; unit < turns.count; unit += turns.apart) {
            u64 *to = s.low + (u64)(unit % turns.shares * s.batch) * product.ranks + unit / turns.shares * 16;
            wait_for_sums();
            for (u32 i = index * 32 + lane; i < s.batch * 16; i += 32 * EPILOGUE_WARPS)
                put_with_epoch(to + i / 16 * product.ranks + i % 16, total(i / 16, i % 16), epoch);
            done();
        }
    }

    /* Copy u of this warp's sequences to shared memory, zero where a sequence uses another adapter. */
    __device__ __forceinline__ void take_low_rank(const Product &product) const {
        u32 shares = LowRankShares(product).shares, size = s.batch * product.ranks;
        for (u32 m = index; m < s.batch; m += EPILOGUE_WARPS)
            for (u32 i = m * product.ranks + lane; i < (m + 1) * product.ranks; i += 32) {
                float sum = 0;
                for (u32 share = 0; share < shares; share += 4)
                    sum += take_four(s.low + (u64)share * size + i, size, shares - share, epoch);
                u[i] = product.mask ? sum * number<BF16>(product.mask[i]) : sum;
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

    /* Prefetch the rows of B that this warp needs next to L2. */
    __device__ __forceinline__ void prefetch_b(const Product &product, u32 kind) const {
        for (u32 tile = blockIdx.x; tile < product.tiles; tile += gridDim.x) {
            Located p = locate(product, kind, tile, lane);
            if (p.linear->rank)
                prefetch(p.linear->up + (u64)p.row * p.linear->rank);
        }
    }

    struct Early { /* inputs of a tile's value that can be loaded before the MMA warps' sums are complete */
        float low, bias;   /* low: B u */
        float h, norm;     /* for OUT and DOWN: the residual stream, and the next norm's weight */
    };

    __device__ __forceinline__ Early
    early(const Layer &layer, const Product &product, u32 kind, u32 tile, u32 m) const {
        Early e = {};
        u32 n = tile * TILE_ROWS + lane;
        if (m >= s.batch)
            return e;
        Located p = locate(product, kind, tile, lane);
        const uint4 *up = (const uint4 *)(p.linear->up + (u64)p.row * p.linear->rank);
        const float *down = u + m * product.ranks + p.linear->begin;
        if (kind == OUT || kind == DOWN) {
            e.h = number<BF16>(s.hidden[(u64)m * s.width + n]);
            e.norm = number<BF16>(layer.norms[kind == DOWN][n]);
        }
        e.bias = p.linear->bias ? number<BF16>(p.linear->bias[p.row]) : 0.0f;
        for (u32 r = 0; r < p.linear->rank; r += 16) { /* two loads in flight */
            bool more = r + 8 < p.linear->rank;
            uint4 first = up[r / 8], second = more ? up[r / 8 + 1] : make_uint4(0, 0, 0, 0);
            e.low += times_eight(first, down + r);
            if (more)
                e.low += times_eight(second, down + r + 8);
        }
        return e;
    }

    /* Write this lane's value of a tile. */
    __device__ __forceinline__ void
    finish(const Product &product, u32 l, u32 kind, u32 tile, u32 m, const Early &e) const {
        float y = total(m, lane) + e.low;
        y = (kind == QKV || kind == GATED ? y * factors[m] : y) + e.bias;
        y = number<BF16>((u16)pair<BF16>(y, 0.0f)); /* round like every product's result */
        if (kind == QKV) {
            put_four<BF16>(s.qkv + slab(l) + (u64)m * (product.tiles * TILE_ROWS) + tile * TILE_ROWS + lane, y, true);
        } else if (kind == GATED) {
            float up = shuffle(y, ROWS);
            u64 at = (u64)m * (product.tiles * ROWS) + tile * ROWS + lane;
            put_four<BF16>(s.gated + slab(l) + at, y / (1 + expf(-y)) * up, lane < ROWS);
        } else {
            u16 *normed = kind == OUT ? s.normed[1] + slab(l) : l + 1 < s.count ? s.normed[0] + slab(l + 1) : nullptr;
            put_residual(normed, e.norm, m, tile, y + e.h);
        }
    }

    /* Finish one of layer l's four products. */
    __device__ __forceinline__ void run(const Layer &layer, u32 l, u32 kind) {
        const Product &product = layer.products[kind];
        epoch++;
        if (product.ranks) {
            if (index == 0)
                prefetch_b(product, kind);
            put_low_rank(product);
        }
        if (blockIdx.x >= product.tiles) /* do not wait for values that are not used: they may be overwritten */
            return;
        if (kind == QKV || kind == GATED)
            measure();
        if (product.ranks)
            take_low_rank(product);
        for (u32 tile = blockIdx.x; tile < product.tiles; tile += gridDim.x) {
            Early e[VALUES];
#pragma unroll
            for (u32 v = 0; v < VALUES; v++)
                e[v] = early(layer, product, kind, tile, index + v * EPILOGUE_WARPS);
            wait_for_sums();
#pragma unroll
            for (u32 v = 0; v < VALUES; v++)
                if (index + v * EPILOGUE_WARPS < s.batch)
                    finish(product, l, kind, tile, index + v * EPILOGUE_WARPS, e[v]);
            done();
        }
    }

    __device__ __forceinline__ void attend(const Layer &layer, u32 l) {
        const Attention a = attention(layer);
        for (u32 each = gridDim.x - 1 - blockIdx.x; each < s.batch * s.heads / QUERIES * SPLITS; each += gridDim.x) {
            Unit u = a.unit(each);
            u16 *out = s.attended + slab(l) + (u64)u.number * QUERIES * HEAD;
            wait_for_sums();
            Attention::finish(out, buffer(), u, index, lane, s.shares, epoch);
            done();
        }
    }

    __device__ __forceinline__ void work() {
        for (u32 m = index * 32 + lane; m < s.batch; m += 32 * EPILOGUE_WARPS)
            starts[m] = s.padding[m];
        if (index == 0 && lane == 0)
            *served = 0;
        begin();
        __syncthreads();
        for (u32 l = 0; l < s.count; l++) {
            const Layer &layer = tables()[l % 3];
#pragma unroll 1
            for (u32 kind = QKV; kind <= DOWN; kind++) {
                barrier(kind == QKV);
                if (kind == QKV && index == 0 && l + 2 < s.count) /* the previous layer's table is free */
                    for (u32 word = lane; word < sizeof(Layer) / 8; word += 32)
                        ((u64 *)(tables() + (l + 2) % 3))[word] = ((const u64 *)(s.layers + l + 2))[word];
                if (FLAG_SYNC && kind == QKV && l + 1 < s.count)
                    for (u32 line = lane * gridDim.x + blockIdx.x; line < s.slab / 64; line += 32 * gridDim.x)
                        prefetch(s.normed[0] + slab(l + 1) + line * 64);
                run(layer, l, kind);
                if (kind == QKV) {
                    barrier(false);
                    attend(layer, l);
                }
            }
        }
        if (index == 0 && lane == 0 && atomic_add_release(s.counters) == count + gridDim.x - 1)
            s.counters[0] = 0, s.counters[1]++; /* the last block prepares the next launch */
    }
};
