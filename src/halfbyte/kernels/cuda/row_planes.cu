/* y = x Wᵀ + b for one row of x and k-bit weights in bit planes (ops.bitplane), on tensor cores.

As in planes.cu W is mma's left operand, but the eight columns of its right one, of which a row of x would fill one, are
the eight blocks of 32 weights that a row of W has in 256 columns: B has x's block n in column n and zeros elsewhere. So
each block has a sum of its own, and its scale is one fp32 factor of that sum instead of one of each weight.

With g = lane / 4 and t = lane % 4, a lane decodes of rows g and g + 8 of W the blocks 2t and 2t + 1, and holds of x the
block g if it is one of these, else zeros. Products with blocks 2t go to one set of sums and those with blocks 2t + 1 to
another, so that one B serves both: columns of the other's blocks mean nothing.

A table in shared memory, in which each lane has entries of its own, turns a byte with the bits of two columns into
their numbers: operands as they stand. At 2 bits, where half a byte would do, it has the bits of both rows, and two
lanes share an entry of 8 bytes; at 5 bits, the fifth plane's bits are an address's bits beside the byte.

A block is WR groups of WK warps. A group has RT tiles of 16 rows at a time, and its warps take turns over 512 columns,
two steps; their sums are added in a fixed order. Each warp copies a step ahead, to slots of its own. All that is read
before begin_after_others() are weights.

Constants: BITS (2 to 5), RT (1 or 2), WR, WK, BF16 (else fp16), ORIGIN (where a block's shared memory begins). */

#include "planes.cuh"

constexpr u32 ROWS = 16, THREADS = 32 * WR * WK;
constexpr u32 ROW = 32 * BITS, PIECES = 2 * BITS; /* of a row's step: bytes, copies */
constexpr u32 TILE = ROWS * ROW, SLOT = RT * TILE, SCALES = RT * ROWS * 16; /* of two steps */
constexpr u32 TABLE = BITS == 3 ? 16384 : BITS == 5 ? 131072 : 65536;
constexpr u32 OWN = 2 * SLOT + 2 * SCALES, SUMS = TABLE + WR * WK * OWN; /* OWN: a warp's bytes */
constexpr int AHEAD = 3; /* look-ups that are on their way */

struct Planes {
    const u8 *packed, *scales; /* [N, K/32, BITS] words, [N, K/32] E4M4 */
    const float *codebook;     /* [2^BITS] */
    u32 rows, columns;         /* N, K */
};

LAYOUT(SUMS + 2 * WR * WK * RT * ROWS * 4, 0, sizeof(Planes));

/* The last tile begins early enough to be whole: rows that two tiles have come out alike. */
__device__ __forceinline__ u32 first_row(const Planes &w, u32 tile) {
    return tile * ROWS + ROWS <= w.rows ? tile * ROWS : w.rows - ROWS;
}

/* Where byte `at` of a row lies: what lanes that are served together read is in every bank once. */
__device__ __forceinline__ u32 place(u32 row, u32 at) { return row * ROW + (BITS == 4 ? at ^ (row & 1) << 4 : at); }

/* Where a warp copies from: two steps side by side, then the next two, of the tiles that are its group's, RT of them
`apart` at a time. */
struct Source {
    const Planes &w;
    const u8 *codes[RT], *scales; /* of the next two steps, the warp's and this lane's */
    u32 tile, two, lane, apart;
    u32 from[BITS], to[BITS]; /* a lane's pieces; if BITS is even, they follow from the first */

    __device__ __forceinline__ Source(const Planes &w, u32 tile, u32 two, u32 lane, u32 apart)
        : w(w), tile(tile), two(two), lane(lane), apart(apart) {
#pragma unroll
        for (u32 i = 0; i < (BITS % 2 ? BITS : 1); i++) {
            u32 piece = lane + 32 * i, row = piece / PIECES, at = piece % PIECES * 16;
            from[i] = row * (w.columns / 8 * BITS) + at, to[i] = place(row, at);
            keep(from[i]), keep(to[i]);
        }
        seek();
    }

    __device__ __forceinline__ void seek() {
#pragma unroll
        for (u32 r = 0; r < RT; r++)
            codes[r] = w.packed + (u64)first_row(w, tile + r * apart) * (w.columns / 8 * BITS) + two * (2 * ROW);
        u32 row = first_row(w, tile + lane / ROWS * apart) + lane % ROWS;
        scales = w.scales + (u64)row * (w.columns / 32) + two * 16;
    }

    /* Begin to copy one of two steps to a slot, and both steps' scales with the first. */
    __device__ __forceinline__ void fetch(u8 *slot, u8 *with, u32 odd, u32 tiles) {
        constexpr u32 APART = 32 / PIECES; /* rows from piece to piece of a lane */
#pragma unroll
        for (u32 r = 0; r < RT; r++) {
            if (r && tile + apart >= tiles)
                break;
            u8 *part = slot + r * TILE;
            const u8 *source = codes[r] + odd * ROW;
#pragma unroll
            for (u32 i = 0; i < BITS; i++)
                if (BITS % 2)
                    copy<16>(part + to[i], source + from[i], true);
                else
                    copy<16>(part + to[0] + i * APART * ROW, source + from[0] + i * APART * w.columns / 8 * BITS, true);
        }
        if (!odd && tile + lane / ROWS * apart < tiles && lane < RT * ROWS)
            copy<16>(with + lane * 16, scales, true);
    }

    __device__ __forceinline__ void next(u32 first, u32 twos, u32 stride) {
        two += WK, scales += WK * 16;
#pragma unroll
        for (u32 r = 0; r < RT; r++)
            codes[r] += WK * 2 * ROW;
        if (two >= twos) {
            two = first, tile += stride;
            seek();
        }
    }
};

/* A lane's blocks 2t and 2t + 1 of a row. */
__device__ __forceinline__ void load(u32 (&word)[2][BITS], const u8 *part, u32 row, u32 lane) {
    u32 words[2 * BITS], t = lane % 4;
    if (BITS == 2)
        *(uint4 *)words = *(const uint4 *)(part + place(row, 16 * t));
    else if (BITS == 4)
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(uint4 *)(words + 4 * i) = *(const uint4 *)(part + place(row, 32 * t + 16 * i));
    else
#pragma unroll
        for (int i = 0; i < BITS; i++)
            *(uint2 *)(words + 2 * i) = *(const uint2 *)(part + place(row, 8 * BITS * t + 8 * i));
#pragma unroll
    for (int i = 0; i < BITS; i++)
        word[0][i] = words[i], word[1][i] = words[BITS + i];
}

/* Scales of a lane's blocks 2t and 2t + 1 of row g + 8 · half. */
__device__ __forceinline__ u32 scales_of(const u8 *scales, int half, u32 lane) {
    return *(const u16 *)(scales + (lane / 4 + 8 * half) * 16 + lane % 4 * 2);
}
__device__ __forceinline__ float scale_of(u32 codes, int u) { return e4m4(u ? codes >> 8 : codes & 255); }

/* A lane's 32 values of x. */
struct Inputs {
    u32 v[16];

    __device__ __forceinline__ void load(const u16 *x, bool own) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (own)
                *(uint4 *)(v + 4 * j) = from_global(x + j * 8);
    }
};

__device__ __forceinline__ u32 two(const float *codebook, u32 index) {
    return pair<BF16>(codebook[code_of<2>(index, 0)], codebook[code_of<2>(index, 1)]);
}

__device__ __forceinline__ void build(const float *codebook) {
    constexpr u32 ENTRIES = BITS == 3 ? 64 : BITS == 5 ? 1024 : 256;
    for (u32 index = threadIdx.x; index < ENTRIES; index += THREADS) {
        u32 first = two(codebook, index), second = BITS == 2 ? two(codebook, index >> 4) : first;
        u32 at = (index & 255) << 8 | (index >> 8 & 1) << 7 | (index >> 9) << 16;
#pragma unroll
        for (u32 i = 0; i < 8; i++) /* neighbours begin at neighbouring places, for the banks' sake */
            *(uint4 *)(shared + at + (i + index) % 8 * 16) = make_uint4(first, second, first, second);
    }
}

/* A lane's block of rows g and g + 8. Byte j of p[half][r] has the bits of columns 8j + 2r and 8j + 2r + 1; at 2 bits
those of both rows are in p[0]. At 5 bits, those of the fifth plane are the highest bit of fifth[half][r]'s byte j and
the lowest of the byte after it, and bits 2 to 6 are the lane's. */
struct Blocks {
    u32 p[2][4], fifth[2][4];

    __device__ __forceinline__ Blocks(const u32 (&first)[BITS], const u32 (&second)[BITS], u32 lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 one = first[BITS - 1], other = second[BITS - 1];
            p[0][i] = BITS == 2 ? (i < 2 ? first[i] : second[i - 2]) : i < BITS ? first[i] : 0;
            p[1][i] = i < BITS ? second[i] : 0;
            fifth[0][i] = __funnelshift_l(one, one, 7 - 2 * i) & 0x81818181 | lane * 0x04040404;
            fifth[1][i] = __funnelshift_l(other, other, 7 - 2 * i) & 0x81818181 | lane * 0x04040404;
        }
        exchange_pairs(p[0]), exchange_pairs(p[1]);
    }

    /* mma's A of columns 8j + 4h and on. `place`: of the lane in an entry. */
    __device__ __forceinline__ void look_up(u32 (&a)[4], int j, int h, u32 place) const {
        u32 byte = 0x7604 | j << 4, fifth_too = j | (4 + j) << 4 | (j + 1) % 4 << 8;
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (BITS == 2)
                *(uint2 *)(a + 2 * r) = from_shared<uint2>(__byte_perm(p[0][2 * h + r], place, byte) + ORIGIN);
            else
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 index = p[half][2 * h + r], beside = fifth[half][2 * h + r];
                    u32 at = __byte_perm(index, place, byte);
                    if (BITS == 5)
                        at = __byte_perm(beside, index, fifth_too) & 0x1fffc;
                    a[2 * r + half] = from_shared<u32>(at + ORIGIN);
                }
    }
};

/* Add the products of a tile's 256 columns to the sums of rows g and g + 8. */
__device__ __forceinline__ void
add(float (&total)[2], const u8 *part, const u8 *scales, const Inputs &x, u32 place, u32 lane) {
    u32 word[2][2][BITS], codes[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        load(word[half], part, lane / 4 + 8 * half, lane), codes[half] = scales_of(scales, half, lane);
#pragma unroll
    for (int u = 0; u < 2; u++) {
        Blocks blocks(word[0][u], word[1][u], lane);
        u32 a[8][4];
        float sum[2][4] = {}; /* every second product's */
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            blocks.look_up(a[i], i / 2, i % 2, place);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i + AHEAD < 8)
                blocks.look_up(a[i + AHEAD], (i + AHEAD) / 2, (i + AHEAD) % 2, place);
            multiply<BF16>(sum[i % 2], a[i], x.v[2 * i], x.v[2 * i + 1]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
            total[half] += scale_of(codes[half], u) * (sum[0][2 * half + u] + sum[1][2 * half + u]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
row_planes(Planes w, const u16 *x, const u16 *bias, u16 *out, const float *factor) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / WK, first = warp % WK;
    u32 tiles = (w.rows + ROWS - 1) / ROWS, twos = w.columns / 512, apart = gridDim.x;
    u32 first_tile = group * RT * apart + blockIdx.x, stride = apart * WR * RT;
    u8 *slots = shared + TABLE + warp * OWN, *scales = slots + 2 * SLOT;
    float *sums = (float *)(shared + SUMS) + group * 2 * WK * RT * ROWS;

    Source source(w, first < twos ? first_tile : tiles, first, lane, apart);
    u32 ahead = 0; /* where scales are copied to */
    auto fetch_next = [&](u32 odd) {
        if (source.tile < tiles) {
            source.fetch(slots + odd * SLOT, scales + ahead * SCALES, odd, tiles);
            if (odd)
                source.next(first, twos, stride);
        }
        ahead ^= odd;
        commit();
    };
    fetch_next(0);
    build(w.codebook);
    float scale = *factor;
    __syncthreads();
    begin_after_others();

    u32 now = 0, turn = 0, n = lane / 4, place = BITS == 2 ? lane % 16 * 8 : lane * 4;
    bool own = n / 2 == lane % 4;
    const u16 *x_lane = x + n * 32;
    Inputs inputs = {};
    inputs.load(x_lane + (first < twos ? first * 512 : 0), own);
    for (u32 tile = first_tile; tile < tiles; tile += stride) {
        float total[RT][2] = {};
        for (u32 two = first; two < twos; two += WK) {
#pragma unroll
            for (u32 odd = 0; odd < 2; odd++) {
                wait<0>();
                __syncwarp(); /* every lane's copies are there, and every lane has read what is copied to next */
                fetch_next(odd ^ 1);
#pragma unroll
                for (int r = 0; r < RT; r++)
                    if (r == 0 || tile + apart < tiles)
                        add(total[r], slots + odd * SLOT + r * TILE,
                            scales + now * SCALES + r * ROWS * 16 + odd * 8, inputs, place, lane);
                u32 next = odd ? two + WK < twos ? two + WK : first : two;
                inputs.load(x_lane + next * 512 + (odd ^ 1) * 256, own);
            }
            now ^= 1;
        }
#pragma unroll
        for (int r = 0; r < RT; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                total[r][half] += shuffle(total[r][half], 1);
                total[r][half] += shuffle(total[r][half], 2);
                if (lane % 4 == 0)
                    sums[(first * RT + r) * ROWS + 8 * half + n] = total[r][half];
            }
        group_arrives<32 * WK>(group);
        u32 mine = tile + lane / ROWS * apart;
        if (first == 0 && lane < RT * ROWS && mine < tiles) {
            float y = 0;
#pragma unroll
            for (u32 k = 0; k < WK; k++)
                y += sums[k * RT * ROWS + lane];
            u32 row = first_row(w, mine) + lane % ROWS;
            out[row] = (u16)pair<BF16>(y * scale + (bias ? number<BF16>(bias[row]) : 0.0f), 0.0f);
        }
        turn ^= 1; /* the last tile's sums may still be read */
        sums = (float *)(shared + SUMS) + (group * 2 + turn) * WK * RT * ROWS;
    }
}
