/* Parameter tables of decode.cu, and its loads of weights, which run ahead over all products. */

#pragma once

enum { QKV, OUT, GATED, DOWN };

struct Linear {
    Weight w;               /* with the numbers that build() reads */
    const u16 *bias;        /* [rows] or null */
    const u16 *up;          /* B [rows, rank] of the adapters, scaled */
    u32 begin, rank;        /* `begin`: first rank of its part of u */
};

struct Product {
    Linear parts[3];
    const u16 *down;             /* A [ranks, columns] of the adapters */
    const u16 *mask;             /* [batch, ranks] or null: which sequence uses which adapter */
    const int *order;            /* [columns] or null: the place of each input among the columns of the weights */
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
        return {product.parts + i / ROWS, tile * ROWS + i % ROWS};
    const Linear *linear = product.parts;
    u32 row = tile * TILE_ROWS + i;
    for (; row >= linear->w.rows; linear++)
        row -= linear->w.rows;
    return {linear, row};
}

/* Tables of three layers in shared memory. */
__device__ __forceinline__ Layer *tables() { return (Layer *)(shared + Weight::TABLE + WARPS * STAGES * STAGE); }

/* The words of tile r in a chunk. */
__device__ __forceinline__ u8 *words_of(u8 *stage, int chunk, int r) {
    return stage + (chunk * RT + r) * 32 * Weight::LANE;
}

typedef Weight::Scales Scales[RT];

/* A warp's loads of weights, which run ahead over all products of all layers: words into its ring, scales to registers.
*/
struct Copies {
    const Step &s;
    u32 first, first_tile, stride, lane;            /* constants of the warp */
    u32 layer = 0, kind = 0, tile, k_tile, filled = 0, now = 0; /* `now`: the layer being computed */
    u32 k_tiles, tiles;
    Weight weights[RT];
    Weight::Source<1> sources[RT];

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
            k_tiles = product->columns / UNIT, tiles = product->tiles;
            for (; tile < tiles && k_tile >= k_tiles; tile += stride)
                k_tile -= k_tiles;
            if (tile < tiles)
                break;
            layer += kind == DOWN, kind = (kind + 1) % 4;
        }
#pragma unroll
        for (int r = 0; r < RT; r++) {
            Located p = locate(*product, kind, tile, ROWS * r);
            weights[r] = p.linear->w;
            sources[r].seek(weights[r], p.row, k_tile, lane);
        }
    }

    /* Start copying the next K tile into the ring, and load its scales. */
    __device__ __forceinline__ void next(u8 *ring, Scales &scales) {
        if (layer < s.count) {
#pragma unroll
            for (int r = 0; r < RT; r++) {
                sources[r].load_scales(scales + r, weights[r]);
#pragma unroll
                for (int chunk = 0; chunk < 2; chunk++)
                    sources[r].copy(words_of(ring + filled * STAGE, chunk, r), weights[r], chunk, lane);
            }
            k_tile += WK;
            if (k_tile >= k_tiles)
                k_tile -= k_tiles, tile += stride, enter();
            else
#pragma unroll
                for (int r = 0; r < RT; r++)
                    sources[r].next(weights[r], WK);
        }
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        commit();
    }
};
