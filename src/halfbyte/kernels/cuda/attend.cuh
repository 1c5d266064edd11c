/* Attention of one new token (specification: ops.decode_attention). A unit is QUERIES query heads of one sequence with
a common key head; SPLITS blocks share its slots. Each block rotates the queries and the new key; one block per key head
writes the new key and value to the cache. Eight lanes (a team) process AHEAD slots of the cache at a time, HEAD / 8
values of each, with their own running maximum of flash attention (Dao et al. 2022, arXiv:2205.14135, section 3.1). A
warp combines its lanes, an epilogue warp combines its block's warps, and an epilogue warp of the first split combines
all blocks, whose results carry epochs. SPLITS above 1 needs a block for each unit's split. Loads from the cache are
issued early: old slots do not wait for the new query.

Constants: HEAD, QUERIES, SPLITS, KV8, FLAG_SYNC. */

#pragma once

#if KV8 /* the cache is in E4M3, else in x's dtype */
typedef u8 Cell;
#else
typedef u16 Cell;
#endif

enum { KEY = QUERIES, VALUE }; /* parts of a unit, after its queries */
constexpr u32 PER_WORD = 4 / sizeof(Cell), EACH = HEAD / 8, TEAMS = THREADS / 8;
constexpr u32 AHEAD = EACH / PER_WORD > 4 ? 1 : 2; /* limited by the registers that an MMA warp keeps */
constexpr u32 STRIDE = TEAMS * AHEAD, APART = SPLITS * STRIDE; /* slots of a chunk of all teams; to the block's next */

struct Cells { /* a lane's part of a slot */
    alignas(16) u32 words[EACH / PER_WORD];

    __device__ __forceinline__ void load(const Cell *from) {
        if (sizeof words == 8)
            *(uint2 *)words = *(const uint2 *)from;
        else
#pragma unroll
            for (u32 i = 0; i < sizeof words / 16; i++)
                ((uint4 *)words)[i] = ((const uint4 *)from)[i];
    }

    __device__ __forceinline__ float operator[](u32 i) const {
        u32 bits = words[i / PER_WORD] >> i % PER_WORD * (8 * sizeof(Cell));
        return KV8 ? from_e4m3(bits) : number<BF16>((u16)bits);
    }
};

struct Chunk { /* AHEAD slots of a team */
    Cells key[AHEAD], value[AHEAD];
};

struct Unit {
    u32 number, split, row, head, key, begin; /* `head`: its first query head; `begin`: the first visible slot */
    bool first_head;                          /* its first query head is the key head's first */
    u64 place;                                /* offset in the cache */
};

struct Attention {
    Cell *keys, *values;          /* [batch, key heads, slots, HEAD] */
    const u16 *q_norm, *k_norm;   /* [HEAD] each, or null */
    const u16 *cos, *sin;         /* [slots, HEAD], by position */
    const u32 *padding;           /* [batch]: the row's first slot */
    u32 heads, key_heads, slots, window, last;
    float eps, scale;

    /* Unit and split of turn `turn`. */
    __device__ __forceinline__ Unit unit(u32 turn) const {
        Unit u;
        u32 group = heads / key_heads;
        u.number = turn / SPLITS, u.split = turn % SPLITS;
        u.row = u.number * QUERIES / heads, u.head = u.number * QUERIES - u.row * heads;
        u.key = u.head / group, u.first_head = u.head == u.key * group;
        u.place = ((u64)u.row * key_heads + u.key) * slots * HEAD;
        u.begin = padding[u.row];
        u.begin = window && last + 1 > window + u.begin ? last + 1 - window : u.begin;
        return u;
    }

    /* Prefetch the first part of a block's units' cache to L2, once per key head. */
    __device__ __forceinline__ void prefetch_cache(u32 turns) const {
        constexpr u32 LINE = 128 / sizeof(Cell), ALL_SPLITS = SPLITS * THREADS;
        for (u32 turn = gridDim.x - 1 - blockIdx.x; turn < turns; turn += gridDim.x) {
            Unit u = unit(turn);
            u32 lines = u.first_head ? ((last - u.begin) * HEAD + LINE - 1) / LINE : 0;
            for (u32 i = u.split * THREADS + threadIdx.x; i < min(lines, 8 * ALL_SPLITS); i += ALL_SPLITS) {
                prefetch(keys + u.place + u.begin * HEAD + i * LINE);
                prefetch(values + u.place + u.begin * HEAD + i * LINE);
            }
        }
    }

    /* Load this team's slots from `base` on, those before `last`. */
    __device__ __forceinline__ void fetch(Chunk &chunk, const Unit &u, u32 base) const {
        u64 begin = u.place + threadIdx.x % 8 * EACH;
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) {
            u32 slot = base + a * TEAMS + threadIdx.x / 8;
            chunk.key[a] = chunk.value[a] = {};
            if (slot < last) {
                chunk.key[a].load(keys + begin + (u64)slot * HEAD);
                chunk.value[a].load(values + begin + (u64)slot * HEAD);
            }
        }
    }

    /* Load this team's first slots. */
    __device__ __forceinline__ void fetch(Chunk &chunk, const Unit &u) const {
        fetch(chunk, u, u.begin + u.split * STRIDE);
    }

    /* Address of a part of qkv: a query (0 ...), the key or the value. */
    __device__ __forceinline__ const u16 *part_of(const u16 *qkv, const Unit &u, u32 part) const {
        u32 head = part < KEY ? u.head + part : heads + u.key + (part == VALUE) * key_heads;
        return qkv + ((u64)u.row * (heads + 2 * key_heads) + head) * HEAD;
    }

    /* Copy `count` parts to shared memory, waiting for each until it is written. */
    __device__ __forceinline__ void take(u16 *to, const u16 *qkv, const Unit &u, u32 part, u32 count, u32 lane) const {
        constexpr u32 PIECES = HEAD / 8;
        for (u32 i = lane; i < count * PIECES; i += 32) {
            const uint4 *from = (const uint4 *)part_of(qkv, u, part + i / PIECES) + i % PIECES;
            ((uint4 *)to)[i] = take_written(from, peek(from));
        }
        __syncwarp();
    }

    /* Normalise, rotate and scale a part with one warp, into q [QUERIES, HEAD] or kv [2, HEAD]. With FLAG_SYNC it is
       first copied to its place there; the key and the value together. */
    __device__ __forceinline__ void prepare(
        const u16 *qkv, const Unit &u, u32 part, u32 lane, float *q, Cell *kv) const {
        constexpr u32 E = HEAD / 32;
        const u16 *norm = part < KEY ? q_norm : part == KEY ? k_norm : nullptr;
        u64 position = (u64)(last - padding[u.row]) * HEAD;
        float x[E], c[E], s[E], weight[E], square = 0; /* loads that need not wait come first */
#pragma unroll
        for (u32 j = 0; j < E; j++) {
            u32 i = lane + 32 * j;
            c[j] = number<BF16>(cos[position + i]), s[j] = number<BF16>(sin[position + i]);
            weight[j] = norm ? number<BF16>(norm[i]) : 1.0f;
        }
        const u16 *from = part_of(qkv, u, part);
        if (FLAG_SYNC) {
            u16 *place = part < KEY ? (u16 *)(q + part * HEAD) : (u16 *)kv + (part - KEY) * HEAD;
            if (part <= KEY)
                take(place, qkv, u, part, part < KEY ? 1 : 2, lane);
            from = place;
        }
#pragma unroll
        for (u32 j = 0; j < E; j++)
            x[j] = number<BF16>(from[lane + 32 * j]), square += x[j] * x[j];
        __syncwarp();
        if (norm) {
#pragma unroll
            for (u32 mask = 16; mask; mask /= 2)
                square += shuffle(square, mask);
            float factor = rsqrtf(square / HEAD + eps);
#pragma unroll
            for (u32 j = 0; j < E; j++)
                x[j] *= factor * weight[j];
        }
        if (part <= KEY)
#pragma unroll
            for (u32 j = 0; j < E / 2; j++) {
                float first = x[j], second = x[j + E / 2];
                x[j] = first * c[j] - second * s[j];
                x[j + E / 2] = second * c[j + E / 2] + first * s[j + E / 2];
            }
        Cell *cache = (part == KEY ? keys : values) + u.place + (u64)last * HEAD;
#pragma unroll
        for (u32 j = 0; j < E; j++) {
            u16 bits = (u16)pair<BF16>(x[j], 0.0f);
            u32 i = lane + 32 * j;
            if (part < KEY) {
                q[part * HEAD + i] = number<BF16>(bits) * scale * 1.44269504f; /* scores are base-2 from here on */
            } else {
                Cell cell = KV8 ? to_e4m3(number<BF16>(bits)) : bits;
                kv[(part - KEY) * HEAD + i] = cell;
                if (u.first_head && u.split == 0)
                    cache[i] = cell;
            }
        }
    }

    /* State of one query: maximum score, sum of weights, this lane's part of the weighted values. */
    struct Query {
        float top = -1e30f, total = 0, acc[EACH] = {};

        /* `query`: this lane's part, in shared memory to save registers. */
        __device__ __forceinline__ void add(const Chunk &chunk, const float *query, u32 base, u32 end) {
            float score[AHEAD], higher = top, q[EACH];
#pragma unroll
            for (u32 i = 0; i < EACH; i++)
                q[i] = query[i];
#pragma unroll
            for (u32 a = 0; a < AHEAD; a++) {
                score[a] = 0;
#pragma unroll
                for (u32 i = 0; i < EACH; i++)
                    score[a] += q[i] * chunk.key[a][i];
#pragma unroll
                for (u32 mask = 4; mask; mask /= 2)
                    score[a] += shuffle(score[a], mask);
                score[a] = base + a * TEAMS + threadIdx.x / 8 < end ? score[a] : -1e38f; /* weight 0 */
                higher = fmaxf(higher, score[a]);
            }
            rescale(higher);
#pragma unroll
            for (u32 a = 0; a < AHEAD; a++) {
                float weight = exp2f(score[a] - top);
                total += weight;
#pragma unroll
                for (u32 i = 0; i < EACH; i++)
                    acc[i] += weight * chunk.value[a][i];
            }
        }

        __device__ __forceinline__ void rescale(float higher) {
            float fade = exp2f(top - higher);
            total *= fade, top = higher;
#pragma unroll
            for (u32 i = 0; i < EACH; i++)
                acc[i] *= fade;
        }

        /* Combine the teams of the warp. */
        __device__ __forceinline__ void join() {
#pragma unroll
            for (u32 mask = 8; mask < 32; mask *= 2) {
                rescale(fmaxf(top, shuffle(top, mask)));
                total += shuffle(total, mask);
#pragma unroll
                for (u32 i = 0; i < EACH; i++)
                    acc[i] += shuffle(acc[i], mask);
            }
        }
    };

    /* Add a chunk of slots before `end` to all queries. */
    __device__ __forceinline__ void add(
        Query (&queries)[QUERIES], const Chunk &chunk, const float *q, u32 base, u32 end) const {
#pragma unroll
        for (u32 j = 0; j < QUERIES; j++)
            queries[j].add(chunk, q + j * HEAD + threadIdx.x % 8 * EACH, base, end);
    }

    /* Add the newest slot, with the first team of a warp. */
    __device__ __forceinline__ void add_newest(Query (&queries)[QUERIES], const float *q, const Cell *kv) const {
        Chunk chunk;
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) {
            chunk.key[a].load(kv + threadIdx.x % 8 * EACH);
            chunk.value[a].load(kv + HEAD + threadIdx.x % 8 * EACH);
        }
        add(queries, chunk, q, last - threadIdx.x / 32 * 4, last + 1);
    }

    /* Attend over a unit's split of qkv [batch, heads + 2 key heads, HEAD], up to the combination of warps. `chunk` is
       its first chunk; `buffer` is shared memory. With FLAG_SYNC, old slots do not wait for the new key and value. */
    __device__ __forceinline__ void attend(const u16 *qkv, const Unit &u, Chunk &chunk, float *buffer) const {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = lane % 8 * EACH;
        float *q = buffer, *parts = buffer + (QUERIES + 1) * HEAD;
        Cell *kv = (Cell *)(buffer + QUERIES * HEAD);
        for (u32 part = warp; part < (FLAG_SYNC ? KEY : VALUE + 1); part += WARPS)
            prepare(qkv, u, part, lane, q, kv);
        mma_warps_sync<THREADS>();
        Query queries[QUERIES];
        for (u32 base = u.begin + u.split * STRIDE; base < last; base += 2 * APART) { /* two chunks, without copying */
            Chunk other;
            fetch(other, u, base + APART);
            add(queries, chunk, q, base, last);
            if (base + APART >= last)
                break;
            fetch(chunk, u, base + 2 * APART);
            add(queries, other, q, base + APART, last);
        }
        if (u.split == 0 && warp == WARPS - 1) {
#pragma unroll 1
            for (u32 part = KEY; FLAG_SYNC && part <= VALUE; part++)
                prepare(qkv, u, part, lane, q, kv);
            __syncwarp();
            add_newest(queries, q, kv);
        }
#pragma unroll
        for (u32 j = 0; j < QUERIES; j++) {
            queries[j].join();
            float *part = parts + (warp * QUERIES + j) * (HEAD + 2);
            if (lane < 8) {
#pragma unroll
                for (u32 i = 0; i < EACH; i++)
                    part[begin + i] = queries[j].acc[i];
                part[HEAD] = queries[j].top, part[HEAD + 1] = queries[j].total;
            }
        }
    }

    /* Combine the warps' results of a unit's split from its buffer into out [QUERIES, HEAD], with one epilogue warp per
       query. `shares`: results of the other splits, [units, QUERIES, SPLITS - 1, HEAD + 2]. */
    static __device__ __forceinline__ void finish(
        u16 *out, const float *buffer, const Unit &u, u32 index, u32 lane, u64 *shares, u32 epoch) {
        constexpr u32 E = HEAD / 32, WARP = QUERIES * (HEAD + 2), OTHERS = SPLITS - 1;
        for (u32 j = index; j < QUERIES; j += EPILOGUE_WARPS) {
            const float *parts = buffer + (QUERIES + 1) * HEAD + j * (HEAD + 2);
            float top = parts[HEAD], weights[WARPS], total = 0, sum[E] = {};
#pragma unroll
            for (u32 w = 1; w < WARPS; w++)
                top = fmaxf(top, parts[w * WARP + HEAD]);
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                weights[w] = exp2f(parts[w * WARP + HEAD] - top);
                total += weights[w] * parts[w * WARP + HEAD + 1];
#pragma unroll
                for (u32 e = 0; e < E; e++)
                    sum[e] += weights[w] * parts[w * WARP + lane + 32 * e];
            }
            u64 *of_others = shares + ((u64)u.number * QUERIES + j) * OTHERS * (HEAD + 2);
            if (u.split) {
                u64 *to = of_others + (u.split - 1) * (HEAD + 2);
#pragma unroll
                for (u32 e = 0; e < E; e++)
                    put_with_epoch(to + lane + 32 * e, sum[e], epoch);
                if (lane < 2)
                    put_with_epoch(to + HEAD + lane, lane ? total : top, epoch);
                continue;
            }
            u64 first[OTHERS + 1][E + 2];
#pragma unroll
            for (u32 k = 0; k < OTHERS; k++)
#pragma unroll
                for (u32 e = 0; e < E + 2; e++)
                    first[k][e] = peek(of_others + k * (HEAD + 2) + (e < E ? lane + 32 * e : HEAD + e - E));
#pragma unroll
            for (u32 k = 0; k < OTHERS; k++) {
                const u64 *from = of_others + k * (HEAD + 2);
                float theirs = take_at_epoch(from + HEAD, epoch, first[k][E]), higher = fmaxf(top, theirs);
                float mine = exp2f(top - higher), weight = exp2f(theirs - higher);
                top = higher, total = total * mine + weight * take_at_epoch(from + HEAD + 1, epoch, first[k][E + 1]);
#pragma unroll
                for (u32 e = 0; e < E; e++)
                    sum[e] = sum[e] * mine + weight * take_at_epoch(from + lane + 32 * e, epoch, first[k][e]);
            }
#pragma unroll
            for (u32 e = 0; e < E; e++)
                put_four<BF16>(out + j * HEAD + lane + 32 * e, sum[e] / total, true);
        }
    }
};
