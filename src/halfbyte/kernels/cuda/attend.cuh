/* Attention of one new token (ops.decode_attention is the specification): a block has QUERIES query heads of one row at a
time, a unit, which share a key. It rotates them and the new key, and writes what is new to the cache if its heads are the
first that share the key. Eight lanes have AHEAD slots of the cache at a time, each HEAD / 8 of their values, and a running
maximum of flash attention (Dao et al. 2022, arXiv:2205.14135, section 3.1) of their own; all are joined at the end. What
comes from the cache is on its way before it is needed: old slots do not wait for the new query.

Constants: HEAD, QUERIES, KV8. */

constexpr u32 EACH = HEAD / 8, TEAMS = THREADS / 8, AHEAD = 2;

#if KV8 /* the cache is in E4M3, else in x's dtype */
typedef u8 Cell;
#else
typedef u16 Cell;
#endif

constexpr u32 PER_WORD = 4 / sizeof(Cell);

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

struct Attention {
    Cell *keys, *values;          /* [batch, key heads, slots, HEAD] */
    const u16 *q_norm, *k_norm;   /* [HEAD] each, or null */
    const u16 *cos, *sin;         /* [slots, HEAD], by position */
    const u32 *padding;           /* [batch]: the row's first slot */
    u32 heads, key_heads, slots, window, last;
    float eps, scale;

    /* Of a unit: its row, its first head, the key's. */
    __device__ __forceinline__ u32 row_of(u32 unit) const { return unit * QUERIES / heads; }
    __device__ __forceinline__ u32 head_of(u32 unit) const { return unit * QUERIES % heads; }
    __device__ __forceinline__ u32 key_of(u32 unit) const { return head_of(unit) / (heads / key_heads); }
    __device__ __forceinline__ bool is_first(u32 unit) const { return head_of(unit) % (heads / key_heads) == 0; }

    /* Where the unit's slots are in the cache, and the first that it sees. */
    __device__ __forceinline__ u64 place_of(u32 unit) const {
        return ((u64)row_of(unit) * key_heads + key_of(unit)) * slots * HEAD;
    }
    __device__ __forceinline__ u32 first_slot(u32 unit) const {
        u32 first = padding[row_of(unit)];
        return window && last + 1 > window + first ? last + 1 - window : first;
    }

    /* Begin to bring a unit's keys and values near, if it is the first that shares them; a long cache's first part. */
    __device__ __forceinline__ void foresee(u32 unit) const {
        constexpr u32 LINE = 128 / sizeof(Cell);
        u32 first = first_slot(unit), lines = is_first(unit) ? ((last - first) * HEAD + LINE - 1) / LINE : 0;
        u64 begin = place_of(unit) + first * HEAD;
        for (u32 i = threadIdx.x; i < min(lines, 8 * THREADS); i += THREADS) {
            prefetch(keys + begin + i * LINE);
            prefetch(values + begin + i * LINE);
        }
    }

    /* This team's slots from `base` on, of those before the last. */
    __device__ __forceinline__ void fetch(Chunk &chunk, u32 unit, u32 base) const {
        u64 begin = place_of(unit) + threadIdx.x % 8 * EACH;
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

    /* A query (part 0 ...), the key or the value, as their product left them, made ready by one warp. */
    __device__ __forceinline__ void prepare(const u16 *qkv, u32 unit, u32 part, u32 lane, float *q, Cell *kv) const {
        constexpr u32 E = HEAD / 32, KEY = QUERIES, VALUE = QUERIES + 1;
        u32 m = row_of(unit), head = part < KEY ? head_of(unit) + part : heads + key_of(unit) + (part == VALUE) * key_heads;
        const u16 *from = qkv + ((u64)m * (heads + 2 * key_heads) + head) * HEAD;
        const u16 *norm = part < KEY ? q_norm : part == KEY ? k_norm : nullptr;
        u64 position = (u64)(last - padding[m]) * HEAD;
        float x[E], c[E], s[E], square = 0;
#pragma unroll
        for (u32 j = 0; j < E; j++) {
            u32 i = lane + 32 * j;
            x[j] = number<BF16>(from[i]), c[j] = number<BF16>(cos[position + i]), s[j] = number<BF16>(sin[position + i]);
            square += x[j] * x[j];
        }
        if (norm) {
#pragma unroll
            for (u32 mask = 16; mask; mask /= 2)
                square += shuffle(square, mask);
            float factor = rsqrtf(square / HEAD + eps);
#pragma unroll
            for (u32 j = 0; j < E; j++)
                x[j] *= factor * number<BF16>(norm[lane + 32 * j]);
        }
        if (part <= KEY)
#pragma unroll
            for (u32 j = 0; j < E / 2; j++) {
                float first = x[j], second = x[j + E / 2];
                x[j] = first * c[j] - second * s[j];
                x[j + E / 2] = second * c[j + E / 2] + first * s[j + E / 2];
            }
        Cell *cache = (part == KEY ? keys : values) + place_of(unit) + (u64)last * HEAD;
#pragma unroll
        for (u32 j = 0; j < E; j++) {
            u16 bits = (u16)pair<BF16>(x[j], 0.0f);
            u32 i = lane + 32 * j;
            if (part < KEY) {
                q[part * HEAD + i] = number<BF16>(bits) * scale * 1.44269504f; /* powers of two from here on */
            } else {
                Cell cell = KV8 ? to_e4m3(number<BF16>(bits)) : bits;
                kv[(part - KEY) * HEAD + i] = cell;
                if (is_first(unit))
                    cache[i] = cell;
            }
        }
    }

    /* Of one query: the highest score, the sum of weights, this lane's part of weighted values. */
    struct Query {
        float top = -1e30f, total = 0, acc[EACH] = {};

        /* `query`: this lane's part of it, in shared memory: registers are for more slots. */
        __device__ __forceinline__ void add(const Chunk &chunk, const float *query, u32 base, u32 last) {
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
                score[a] = base + a * TEAMS + threadIdx.x / 8 <= last ? score[a] : -1e38f; /* weighs nothing */
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

        /* Join the teams of the warp. */
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

    /* A unit of qkv [batch, heads + 2 key heads, HEAD], to out [QUERIES, HEAD]. `chunk` has its first slots; `room` is
       shared memory. */
    __device__ __forceinline__ void attend(const u16 *qkv, u16 *out, u32 unit, Chunk &chunk, float *room) const {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = lane % 8 * EACH;
        float *q = room, *parts = room + (QUERIES + 1) * HEAD;
        Cell *kv = (Cell *)(room + QUERIES * HEAD);
        for (u32 part = warp; part < QUERIES + 2; part += WARPS)
            prepare(qkv, unit, part, lane, q, kv);
        workers_arrive<THREADS>();
        Query queries[QUERIES];
        for (u32 base = first_slot(unit); base <= last; base += TEAMS * AHEAD) {
            Chunk next;
            fetch(next, unit, base + TEAMS * AHEAD);
#pragma unroll
            for (u32 a = 0; a < AHEAD; a++)
                if (base + a * TEAMS + threadIdx.x / 8 == last) /* the newest, which may not be in the cache yet */
                    chunk.key[a].load(kv + begin), chunk.value[a].load(kv + HEAD + begin);
#pragma unroll
            for (u32 j = 0; j < QUERIES; j++)
                queries[j].add(chunk, q + j * HEAD + begin, base, last);
            chunk = next;
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
        workers_arrive<THREADS>();
        for (u32 i = threadIdx.x; i < QUERIES * HEAD; i += THREADS)
            out[i] = (u16)pair<BF16>(joined(parts + i / HEAD * (HEAD + 2), i % HEAD), 0.0f);
        workers_arrive<THREADS>();
    }

    /* Value i of all warps' parts together. */
    static __device__ __forceinline__ float joined(const float *parts, u32 i) {
        constexpr u32 APART = QUERIES * (HEAD + 2);
        float highest = parts[HEAD], sum = 0, weights = 0;
#pragma unroll
        for (u32 w = 1; w < WARPS; w++)
            highest = fmaxf(highest, parts[w * APART + HEAD]);
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            float weight = exp2f(parts[w * APART + HEAD] - highest);
            sum += weight * parts[w * APART + i], weights += weight * parts[w * APART + HEAD + 1];
        }
        return sum / weights;
    }
};
