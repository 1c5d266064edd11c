/* Parameter tables of decode.cu, and the asynchronous copies of weights, which run ahead over all products. */

#pragma once

enum { QKV, OUT, GATED, DOWN };

struct Linear {
    const u8 *packed, *absmax;
    const float *second;
    const u16 *bias;        /* [rows] or null */
    const u16 *up;          /* B [rows, rank] of the adapters, scaled */
    float offset;           /* of nested scales */
    u32 rows, begin, rank;  /* `begin`: first rank of its part of u */
};

struct Product {
    Linear parts[3];
    const u16 *down;             /* A [ranks, columns] of the adapters */
    const u16 *mask;             /* [batch, ranks] or null: which sequence uses which adapter */
    u32 columns, tiles, ranks, pad;
};

struct Layer {
    Product products[4];
    const u16 *norms[2];         /* weights of the norms after OUT and DOWN */
    const u16 *q_norm, *k_norm;
    Cell *keys, *values;
    u32 window, pad[3]; /* tables are multiples of 16 bytes, to align what follows */
};

struct Step {
    const Layer *layers;
    const u16 *norm;             /* the first layer's */
    u16 *hidden;                 /* [batch, width]: the residual stream */
    u16 *normed[2];              /* [batch, width]: the residual stream times the norms' weights, for QKV and GATED */
    u16 *qkv, *attended, *gated; /* [batch, ...]: outputs of products and attention */
    u64 *squares;                /* [batch, width / ROWS], with epochs */
    u64 *shares;                 /* results of attention's splits, with epochs */
    u64 *low;                    /* u [shares of K, batch, ranks], with epochs */
    u32 *counters;               /* blocks that have reached barriers, initially zero; number of earlier launches */
    const u16 *cos, *sin;
    const int *padding;
    const long long *slot;
    u32 count, batch, width, heads, key_heads, slots;
    float eps, scale;
    u32 slab, columns;         /* 16-bit numbers in a layer's exchange slab, or 0; columns of QKV's and GATED's x */
};

/* Linear and row of row i of a tile. */
struct Located {
    const Linear *linear;
    u32 row;
};

__device__ __forceinline__ Located locate(const Product &product, u32 kind, u32 tile, u32 i) {
    if (kind == GATED)
        return {product.parts + i / 8 % 2, tile * (ROWS / 2) + i / 16 * 8 + i % 8};
    const Linear *linear = product.parts;
    u32 row = tile * ROWS + i;
    for (; row >= linear->rows; linear++)
        row -= linear->rows;
    return {linear, row};
}

/* Tables of three layers in shared memory. */
__device__ __forceinline__ Layer *tables() {
    return (Layer *)(shared + Weight::TABLE + WARPS * STAGES * Weight::STAGE);
}

/* A warp's copies of weights, which run ahead over all products of all layers. */
struct Copies {
    const Step &s;
    u32 first, first_tile, stride, lane;            /* constants of the warp */
    u32 layer = 0, kind = 0, tile, k_tile, filled = 0, now = 0; /* `now`: the layer being computed */
    const u8 *codes[2], *scales;                    /* of rows i and i + 8 at this lane's piece; of row `lane` */
    const float *second;
    u32 block, columns, tiles;
    u32 edge, stretch;                              /* first tile of the next linear; bytes to the warp's next tile */

    __device__ __forceinline__ Copies(const Step &s, u32 first, u32 first_tile, u32 stride, u32 lane)
        : s(s), first(first), first_tile(first_tile), stride(stride), lane(lane), tile(first_tile), k_tile(first) {}

    /* Table of layer l; those of this layer and the next are in shared memory. */
    __device__ __forceinline__ const Layer *at(u32 l) const { return l - now < 2 ? tables() + l % 3 : s.layers + l; }

    /* Advance to the next existing K tile, from this one on, and compute its addresses. */
    __device__ __forceinline__ void enter() {
        const Product *product;
        for (;; tile = first_tile, k_tile = first) {
            if (layer == s.count)
                return;
            product = at(layer)->products + kind;
            columns = product->columns, tiles = product->tiles;
            for (; tile < tiles && k_tile >= columns / 256; tile += stride)
                k_tile -= columns / 256;
            if (tile < tiles)
                break;
            layer += kind == DOWN, kind = (kind + 1) % 4;
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            Located p = locate(*product, kind, tile, 8 * half + lane / 8);
            codes[half] = p.linear->packed + (u64)p.row * (columns / 2) + lane % 8 * 16;
        }
        if (lane < ROWS) {
            Located p = locate(*product, kind, tile, lane);
            scales = p.linear->absmax, second = p.linear->second, block = p.row * (columns / 64);
        }
        stretch = stride * (kind == GATED ? ROWS / 2 : ROWS) * (columns / 2);
        edge = kind == GATED ? tiles : 0;
        for (const Linear *linear = product->parts; edge <= tile; linear++)
            edge += linear->rows / ROWS;
    }

    /* Start copying the next K tile into the ring. 16-byte pieces are swizzled as the reader expects. */
    __device__ __forceinline__ void next(u8 *ring) {
        if (layer < s.count) {
            u8 *stage = ring + filled * Weight::STAGE;
            u32 at = lane / 8, piece = lane % 8, row = columns / 2, apart = kind == GATED ? 8 : 16;
#pragma unroll
            for (u32 i = 0; i < ROWS; i += 4) {
                const u8 *from = codes[i / 8 % 2] + (u64)(i / 16 * apart + i % 8) * row + k_tile * 128;
                u32 to = FLAG_SYNC ? swizzle_of_row(at, piece) : Weight::swizzle(at, piece);
                copy<16>(stage + (i + at) * 128 + to * 16, from, true);
            }
            if (lane < ROWS) {
                u32 now = block + k_tile * 4;
                constexpr u32 SCALE = Weight::SCALE;
                copy<SCALE>(stage + Weight::CODES + lane * SCALE, scales + (u64)now * (SCALE / 4), true);
                if (NESTED)
                    copy<4>(stage + Weight::CODES + ROWS * 4 + lane * 4, second + now / 256, true);
            }
            k_tile += WK;
            if (k_tile >= columns / 256) {
                k_tile -= columns / 256, tile += stride;
                if (tile < edge && k_tile < columns / 256)
                    codes[0] += stretch, codes[1] += stretch, block += stretch / 32;
                else
                    enter();
            }
        }
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        commit();
    }
};
