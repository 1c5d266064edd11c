/* Grouped GEMMs of experts with many rows, x Wᵀ of each, or x W if TRANSPOSED, with NF4 and FP4 weights.

A tile is 64·MT·GROUPS channels of an expert's result by 8·NT of its rows. Each group of four warps has 64·MT of the
channels as wgmma's left operand, which it decodes into its registers; right operands are rows of x, gathered as they
are copied. While the products of 32 values of the sum run, a group decodes the next 32. It waits only for the products
before those, so that some are always in flight. PRODUCERS more warps copy x, codes and scales of 64 values of the sum
to a ring of STAGES stages, tile after tile.

A warp's channels are adjacent; 2·MT of them are a lane's. If TRANSPOSED, a byte of codes holds two of these. The table has
both values of each byte in fp32. They are multiplied by their scales and rounded as in dequantization, so the GEMM is
that of the dequantized weights.

Blocks alternate over tiles. A tile uses the fewest of its SECTIONS that hold its rows. With more variants of the products
registers would be too few, and the compiler would not keep any in flight.

Constants: MT (1 or 2), NT (8 or 16), GROUPS (2), SECTIONS (2 or 4), STAGES, TRANSPOSED, BF16 (else fp16), ORIGIN. */

#include "ring.cuh"

constexpr u32 THREADS = 32 * WARPS, ALL = THREADS + 32 * PRODUCERS;
constexpr u32 TILE = 64 * MT * GROUPS, SLAB = 16 * MT, OWN = 2 * MT; /* channels of a block, a warp, a lane */
constexpr u32 ROWS = 8 * NT, SECTION_ROWS = ROWS / SECTIONS; /* rows of x, which are used in multiples of SECTION_ROWS */
constexpr u32 TABLE = 65536, X = 128 * ROWS, CODES = 32 * TILE; /* bytes; the latter two in a stage */
constexpr u32 STAGE = (X + CODES + 4 * TILE + 1023) / 1024 * 1024;
constexpr u32 BEGINS = TABLE + STAGES * (STAGE + 16), MOST = 1024; /* experts */
constexpr u32 SOURCES = BEGINS + 8 * (MOST + 1);
constexpr u32 PIECES = TILE / 32; /* 16-byte pieces of a row of W in a stage, if TRANSPOSED */

struct Products {
    const u8 *packed;           /* [E, rows, columns / 2] */
    const float *scales;        /* [E, rows, columns / 64] */
    const float *codebook;      /* [16] */
    const u16 *x;               /* [S, depth], or one row per token if top_k is not 0 */
    const int *order, *offsets; /* [S], [E + 1] */
    const u16 *bias;            /* [E, width] or null */
    const u16 *low, *factor;    /* [S, rank]; [E, width, rank], or [E, rank, width] where TRANSPOSED */
    u16 *out;                   /* [S, width] */
    float scale;                /* of the low-rank term */
    u32 top_k, experts, rows, columns, rank;

    __device__ __forceinline__ u32 depth() const { return TRANSPOSED ? rows : columns; }
    __device__ __forceinline__ u32 width() const { return TRANSPOSED ? columns : rows; }
};

struct Place {
    u32 expert, first, count, channel;

    __device__ __forceinline__ u32 parts() const { return (count + SECTION_ROWS - 1) / SECTION_ROWS; }
};

/* All tiles, in order of experts, then rows, then channels. */
struct Tiles {
    const u32 *begins, *offsets; /* [E + 1], in shared memory: first tile of rows and first row of each expert */
    u32 cuts, expert = 0;

    __device__ __forceinline__ Tiles(const Products &p)
        : begins((const u32 *)(shared + BEGINS)), offsets(begins + MOST + 1), cuts((p.width() + TILE - 1) / TILE) {}

    __device__ __forceinline__ u32 count(const Products &p) const { return begins[p.experts] * cuts; }

    __device__ __forceinline__ Place find(u32 tile) { /* `tile` must not decrease between calls */
        u32 entry = tile / cuts;
        while (begins[expert + 1] <= entry)
            expert++;
        u32 first = offsets[expert] + (entry - begins[expert]) * ROWS;
        return {expert, first, min(offsets[expert + 1] - first, ROWS), tile % cuts * TILE};
    }
};

/* Compute the tables of Tiles, with all threads of a block. */
__device__ __forceinline__ void lay_out(const Products &p) {
    constexpr u32 EACH = MOST / ALL + 1;
    u32 *begins = (u32 *)(shared + BEGINS), *offsets = begins + MOST + 1, before[EACH];
    for (u32 e = threadIdx.x; e <= p.experts; e += ALL) {
        u32 first = e ? p.offsets[e - 1] : 0, end = p.offsets[e];
        offsets[e] = end, begins[e] = e ? (end - first + ROWS - 1) / ROWS : 0;
    }
    __syncthreads();
    for (u32 apart = 1; apart <= p.experts; apart *= 2) {
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            u32 e = threadIdx.x + i * ALL;
            before[i] = e >= apart && e <= p.experts ? begins[e - apart] : 0;
        }
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            if (before[i])
                begins[threadIdx.x + i * ALL] += before[i];
        __syncthreads();
    }
}

constexpr u32 COPIERS = 32 * PRODUCERS, LINES = COPIERS / 8; /* threads, and rows of x that they copy at a time */
constexpr u32 OF_X = ROWS / LINES, OF_CODES = 2 * TILE / COPIERS, OF_SCALES = TILE / COPIERS;

/* Addresses that one thread of the producers copies from, for a tile. */
struct Source {
    const u8 *codes[OF_CODES], *scales[OF_SCALES], *x;
    u32 lines;               /* rows of x */
    u32 to;                  /* offset in a stage's first LINES rows of x */
    u32 thread;

    __device__ __forceinline__ Source(u32 thread) : thread(thread) {
        u32 row = thread / 8;
        to = row * 128 + ((thread ^ row) % 8) * 16;
    }

    /* Source rows, of every LINES one, that this thread and its neighbours copy. */
    __device__ __forceinline__ u32 *rows() const { return (u32 *)(shared + SOURCES) + thread / 8; }

    __device__ __forceinline__ void find(const Products &p, const Place &place) {
        u64 matrix = (u64)place.expert * p.rows;
        __syncwarp();
        x = (const u8 *)p.x + thread % 8 * 16;
        lines = (place.parts() * SECTION_ROWS + LINES - 1) / LINES;
#pragma unroll
        for (u32 i = 0; i < OF_X; i++) {
            u32 row = place.first + min(i * LINES + thread / 8, place.count - 1);
            if (i % 8 == thread % 8)
                rows()[i * LINES] = p.top_k ? p.order[row] / p.top_k : row;
        }
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < OF_CODES; i++) {
            u32 item = i * COPIERS + thread;
            if (TRANSPOSED) {
                u32 byte = min(place.channel / 2 + item % PIECES * 16, p.columns / 2 - 16);
                codes[i] = p.packed + (matrix + item / PIECES) * (p.columns / 2) + byte;
            } else
                codes[i] = p.packed + (matrix + min(place.channel + item / 2, p.rows - 1)) * (p.columns / 2) +
                           item % 2 * 16;
        }
#pragma unroll
        for (u32 i = 0; i < OF_SCALES; i++) {
            u32 item = i * COPIERS + thread;
            if (TRANSPOSED) {
                u32 block = min(place.channel / 64 + item % (TILE / 64), p.columns / 64 - 1);
                scales[i] = (const u8 *)(p.scales + (matrix + item / (TILE / 64)) * (p.columns / 64) + block);
            } else
                scales[i] = (const u8 *)(p.scales + (matrix + min(place.channel + item, p.rows - 1)) * (p.columns / 64));
        }
    }

    /* Start copying to a stage, and advance by 64 values of the sum. */
    __device__ __forceinline__ void fetch(u32 stage, const Products &p) {
        u32 wide = 2 * p.depth();
#pragma unroll
        for (u32 i = 0; i < OF_X; i++)
            if (i < lines)
                copy_to<16>(stage + to + i * (LINES * 128), x + (u64)rows()[i * LINES] * wide);
        x += 128;
#pragma unroll
        for (u32 i = 0; i < OF_CODES; i++) {
            u32 item = i * COPIERS + thread, row = item / PIECES, piece = (item ^ row / 2) % PIECES;
            copy_to<16>(stage + X + (TRANSPOSED ? row * (TILE / 2) + piece * 16 : item * 16), codes[i]);
            codes[i] += TRANSPOSED ? (u64)32 * p.columns : 32;
        }
#pragma unroll
        for (u32 i = 0; i < OF_SCALES; i++) {
            u32 item = i * COPIERS + thread, at = TRANSPOSED ? item % (TILE / 64) * 64 + item / (TILE / 64) : item;
            copy_to<4>(stage + X + CODES + at * 4, scales[i]);
            scales[i] += TRANSPOSED ? (u64)4 * p.columns : 4;
        }
    }
};

__device__ __forceinline__ void produce(const Products &p, Ring ring, u32 thread) {
    Tiles tiles(p);
    u32 count = tiles.count(p), steps = p.depth() / 64, filled = 0;
    Source source(thread);
    for (u32 tile = blockIdx.x; tile < count; tile += gridDim.x) {
        source.find(p, tiles.find(tile));
        for (u32 step = 0; step < steps; step++, filled++) {
            if (filled >= STAGES)
                mbarrier_wait(ring.empty + ring.at, ring.turn ^ 1);
            source.fetch(address(shared) + ring.stage(), p);
            cp_async_mbarrier_arrive(ring.full + ring.at);
            ring.next();
        }
    }
}

/* A lane's left operands for 32 values of the sum, for each 64 channels of a group. */
struct Operands {
    u32 a[MT][2][4];
};

/* Offsets of a lane's codes and scales in a stage, and operands of its table look-ups. */
struct Decoder {
    u32 codes, later, scales, lane8, select;

    __device__ __forceinline__ Decoder(u32 warp, u32 lane) {
        u32 g = lane / 4, t = lane % 4, channel = warp * SLAB + g * OWN;
        lane8 = lane * 8, select = 0x5504 | t << 4;
        if (TRANSPOSED) {
            u32 piece = channel / 32, within = channel / 2 % 16;
            codes = X + 2 * t * (TILE / 2) + (piece ^ t % PIECES) * 16 + within;
            later = X + (2 * t + 8) * (TILE / 2) + (piece ^ (t + 4) % PIECES) * 16 + within;
            scales = X + CODES + channel / 64 * 256 + t * 8;
        } else
            codes = X + channel * 32, later = 0, scales = X + CODES + channel * 4;
        opaque(codes), opaque(later), opaque(scales), opaque(lane8), opaque(select);
    }

    /* Both values of the byte of `word` that `which` selects. */
    __device__ __forceinline__ uint2 values(u32 word, u32 which) const {
        return look_at_two<0>(__byte_perm(word, lane8, which));
    }

    /* Decode half `half` of a stage. */
    __device__ __forceinline__ void make(Operands &to, u32 stage, u32 half) const {
        const u8 *from = shared + stage;
        if (TRANSPOSED) {
#pragma unroll
            for (u32 c = 0; c < 2; c++)
#pragma unroll
                for (u32 far = 0; far < 2; far++) { /* values 2t and 2t + 1, or 8 later, of each 16 values of the sum */
                    u32 at = (half * 2 + c) * 16;
                    const u8 *bytes = from + (far ? later : codes) + at * (TILE / 2);
                    const float *scale = (const float *)(from + scales + at * 4 + far * 32);
                    float first = scale[0], second = scale[1];
                    u32 one = MT == 2 ? *(const u16 *)bytes : *bytes;
                    u32 two = MT == 2 ? *(const u16 *)(bytes + TILE / 2) : bytes[TILE / 2];
#pragma unroll
                    for (u32 s = 0; s < MT; s++) {
                        uint2 v = values(one, 0x5504 | s << 4), w = values(two, 0x5504 | s << 4);
                        to.a[s][c][2 * far] = pair<BF16>(__uint_as_float(v.x) * first, __uint_as_float(w.x) * second);
                        to.a[s][c][2 * far + 1] =
                            pair<BF16>(__uint_as_float(v.y) * first, __uint_as_float(w.y) * second);
                    }
                }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < OWN; i++) {
            uint4 all = *(const uint4 *)(from + codes + i * 32 + half * 16);
            const u32 words[4] = {all.x, all.y, all.z, all.w};
            float scale = *(const float *)(from + scales + i * 4);
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                uint2 v = values(words[k], select);
                to.a[i / 2][k / 2][i % 2 + k % 2 * 2] =
                    pair<BF16>(__uint_as_float(v.x) * scale, __uint_as_float(v.y) * scale);
            }
        }
    }
};

/* State of a multiplying warp across tiles. */
struct Consumer {
    const Products &p;
    Ring ring;
    u32 warp, lane, described, steps;
    Operands first, second;
    const Decoder decoder;

    __device__ __forceinline__ Consumer(const Products &p, Ring ring, u32 warp, u32 lane)
        : p(p), ring(ring), warp(warp), lane(lane), described(descriptor_of(address(shared) + ring.begin)),
          steps(p.depth() / 64), decoder(warp, lane) {}

    template <u32 N>
    __device__ __forceinline__ void begin(float (&sum)[MT][N][4], Operands &operands, u32 half) {
        u32 rows = described + ring.offset / 16 + half * 4;
        wgmma_fence();
#pragma unroll
        for (u32 c = 0; c < 2; c++)
#pragma unroll
            for (u32 s = 0; s < MT; s++)
                wgmma(sum[s], operands.a[s][c], rows + 2 * c, true);
        wgmma_commit();
    }

    __device__ __forceinline__ void release(u32 stage) {
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(ring.empty + stage);
    }

    /* Multiply a tile; `more`: the block has another one. */
    template <u32 N> __device__ __forceinline__ void multiply(const Place &place, bool more) {
        float sum[MT][N][4] = {};
        u32 done = 0;
#pragma unroll 1
        for (u32 step = 0; step < steps; step++) {
            begin(sum, first, 0);
            wgmma_wait_before(second.a);
            if (step)
                release(done);
            decoder.make(second, ring.stage(), 1);
            begin(sum, second, 1);
            wgmma_wait_before(first.a);
            done = ring.at;
            ring.next();
            if (more || step + 1 < steps) {
                mbarrier_wait(ring.full + ring.at, ring.turn);
                decoder.make(first, ring.stage(), 0);
            }
        }
#pragma unroll
        for (u32 s = 0; s < MT; s++)
            wgmma_wait(sum[s]);
        release(done);
        finish(sum, place);
    }

    /* Left operands of ranks from r on: of each 16, a lane has four adjacent ones. */
    __device__ __forceinline__ void factors(u32 (&a)[MT][4], const Place &place, u32 channel, u32 r) const {
        u32 mine = r + lane % 4 * 4;
#pragma unroll
        for (u32 s = 0; s < MT; s++) {
            a[s][0] = a[s][1] = a[s][2] = a[s][3] = 0;
            if (mine >= p.rank)
                continue;
            u32 at = min(channel + 2 * s, p.width() - 2);
            if (TRANSPOSED) {
                const u16 *from = p.factor + ((u64)place.expert * p.rank + mine) * p.columns + at;
                u32 w[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    w[i] = *(const u32 *)(from + (u64)i * p.columns);
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    a[s][i] = __byte_perm(w[i / 2 * 2], w[i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
            } else {
                const u16 *from = p.factor + ((u64)place.expert * p.rows + at) * p.rank + mine;
                uint2 one = *(const uint2 *)from, two = *(const uint2 *)(from + p.rank);
                a[s][0] = one.x, a[s][1] = two.x, a[s][2] = one.y, a[s][3] = two.y;
            }
        }
    }

    template <u32 N> __device__ __forceinline__ void finish(float (&sum)[MT][N][4], const Place &place) {
        u32 channel = place.channel + warp * SLAB + lane / 4 * OWN, mine = lane % 4;
        for (u32 r = 0; r < p.rank; r += 16) {
            u32 a[MT][4];
            factors(a, place, channel, r);
            bool known = r + mine * 4 < p.rank;
#pragma unroll
            for (u32 n = 0; n < N; n++) {
                u32 row = place.first + min(8 * n + lane / 4, place.count - 1);
                uint2 u = known ? *(const uint2 *)(p.low + (u64)row * p.rank + r + mine * 4) : uint2{0, 0};
#pragma unroll
                for (u32 s = 0; s < MT; s++) {
                    float term[4] = {};
                    ::multiply<BF16>(term, a[s], u.x, u.y);
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        sum[s][n][i] += p.scale * term[i];
                }
            }
        }
        if (channel >= p.width())
            return;
        float bias[OWN] = {};
        if (!TRANSPOSED && p.bias)
#pragma unroll
            for (u32 i = 0; i < OWN; i++)
                bias[i] = number<BF16>(p.bias[(u64)place.expert * p.rows + channel + i]);
#pragma unroll
        for (u32 n = 0; n < N; n++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                u32 m = 8 * n + mine * 2 + j;
                u16 *to = p.out + (u64)(place.first + m) * p.width() + channel;
                if (m >= place.count)
                    continue;
                u32 both = pair<BF16>(sum[0][n][j] + bias[0], sum[0][n][2 + j] + bias[1]);
                if (MT == 1)
                    *(u32 *)to = both;
                else
                    *(uint2 *)to = {both, pair<BF16>(sum[MT - 1][n][j] + bias[OWN - 2], sum[MT - 1][n][2 + j] + bias[OWN - 1])};
            }
    }

    __device__ __forceinline__ void run() {
        Tiles tiles(p);
        u32 count = tiles.count(p), tile = blockIdx.x;
        if (tile >= count)
            return;
        mbarrier_wait(ring.full, 0);
        decoder.make(first, ring.stage(), 0);
        for (; tile < count; tile += gridDim.x) {
            Place place = tiles.find(tile);
            bool more = tile + gridDim.x < count;
            u32 rows = place.parts() * SECTION_ROWS;
            if (SECTIONS == 4 && rows == 2 * NT)
                multiply<SECTIONS == 4 ? NT / 4 : NT>(place, more);
            else if (rows == 4 * NT)
                multiply<NT / 2>(place, more);
            else if (SECTIONS == 4 && rows == 6 * NT)
                multiply<SECTIONS == 4 ? NT / 4 * 3 : NT>(place, more);
            else
                multiply<NT>(place, more);
        }
    }
};

LAYOUT(SOURCES + 4 * ROWS, 0, sizeof(Products));

extern "C" __global__ void __launch_bounds__(ALL, 1) grouped_gemm4(const Products p) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring ring(TABLE, STAGE);
    if (threadIdx.x == 0)
        ring.set_up();
    for (u32 i = threadIdx.x; i < TABLE / 16; i += ALL) {
        u32 first = __float_as_uint(p.codebook[i / 256]), second = __float_as_uint(p.codebook[i / 16 % 16]);
        ((uint4 *)shared)[i] = make_uint4(first, second, first, second);
    }
    griddepcontrol_wait();
    lay_out(p);
    if (warp >= WARPS) {
        setmaxnreg_dec<56>();
        produce(p, ring, threadIdx.x - THREADS);
    } else {
        setmaxnreg_inc<224>();
        Consumer(p, ring, warp, lane).run();
    }
}

/* Decode nested scales: code[q] · second + offset, four per thread. */
extern "C" __global__ void __launch_bounds__(256)
unnest(const u8 *absmax, const float *second, const float *code, const float *offset, float *out, u32 fours) {
    u32 at = blockIdx.x * 256 + threadIdx.x;
    griddepcontrol_wait();
    if (at >= fours)
        return;
    u32 codes = ((const u32 *)absmax)[at];
    float by = second[at / 64], shift = *offset;
    ((float4 *)out)[at] = make_float4(code[codes & 255] * by + shift, code[codes >> 8 & 255] * by + shift,
                                      code[codes >> 16 & 255] * by + shift, code[codes >> 24] * by + shift);
}
