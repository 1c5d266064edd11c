/* Attention of one new token: a block has one query head of one row at a time (ops.decode_attention is the
specification). It rotates q and the new key, and writes what is new to the cache if its head is the first of those that
share the key. Eight lanes have a slot of the cache at a time, each HEAD / 8 of its values, and a running maximum of flash
attention (Dao et al. 2022, arXiv:2205.14135, section 3.1) of their own; all are joined at the end. */

constexpr u32 EACH = HEAD / 8, TEAMS = THREADS / 8, AHEAD = 2; /* slots that a team loads before it uses them */

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

struct Attention {
    Cell *keys, *values;          /* [batch, key heads, slots, HEAD] */
    const u16 *q_norm, *k_norm;   /* [HEAD] each, or null */
    const u16 *cos, *sin;         /* [slots, HEAD], by position */
    const u32 *padding;           /* [batch]: the row's first slot */
    u32 heads, key_heads, slots, window, last;
    float eps, scale;

    __device__ __forceinline__ u32 first_slot(u32 m) const {
        u32 first = padding[m];
        return window && last + 1 > window + first ? last + 1 - window : first;
    }

    /* Begin to bring the head's keys and values near, if it is the first that shares them; a long cache's first part. */
    __device__ __forceinline__ void foresee(u32 m, u32 head) const {
        constexpr u32 LINE = 128 / sizeof(Cell);
        u32 group = heads / key_heads, first = first_slot(m), lines = ((last - first) * HEAD + LINE - 1) / LINE;
        u64 begin = (((u64)m * key_heads + head / group) * slots + first) * HEAD;
        for (u32 i = threadIdx.x; head % group == 0 && i < min(lines, 8 * THREADS); i += THREADS) {
            prefetch(keys + begin + i * LINE);
            prefetch(values + begin + i * LINE);
        }
    }

    /* Query (part 0), key or value as they come from their product, ready for use, by one warp. */
    __device__ __forceinline__ void prepare(const u16 *qkv, u32 m, u32 head, u32 part, u32 lane, float *q, Cell *kv) const {
        constexpr u32 E = HEAD / 32;
        u32 group = heads / key_heads, key_head = head / group;
        u32 at = part == 0 ? head : part == 1 ? heads + key_head : heads + key_heads + key_head;
        const u16 *from = qkv + ((u64)m * (heads + 2 * key_heads) + at) * HEAD;
        const u16 *norm = part == 0 ? q_norm : part == 1 ? k_norm : nullptr;
        float x[E], square = 0;
#pragma unroll
        for (u32 j = 0; j < E; j++)
            x[j] = number<BF16>(from[lane + 32 * j]), square += x[j] * x[j];
        if (norm) {
#pragma unroll
            for (u32 mask = 16; mask; mask /= 2)
                square += shuffle(square, mask);
            float factor = rsqrtf(square / HEAD + eps);
#pragma unroll
            for (u32 j = 0; j < E; j++)
                x[j] *= factor * number<BF16>(norm[lane + 32 * j]);
        }
        if (part < 2) {
            u64 position = (u64)(last - padding[m]) * HEAD;
#pragma unroll
            for (u32 j = 0; j < E / 2; j++) {
                u64 i = position + lane + 32 * j;
                float first = x[j], second = x[j + E / 2];
                x[j] = first * number<BF16>(cos[i]) - second * number<BF16>(sin[i]);
                x[j + E / 2] = second * number<BF16>(cos[i + HEAD / 2]) + first * number<BF16>(sin[i + HEAD / 2]);
            }
        }
        Cell *cache = (part == 1 ? keys : values) + (((u64)m * key_heads + key_head) * slots + last) * HEAD;
#pragma unroll
        for (u32 j = 0; j < E; j++) {
            u16 bits = (u16)pair<BF16>(x[j], 0.0f);
            u32 i = lane + 32 * j;
            if (part == 0) {
                q[i] = number<BF16>(bits) * scale * 1.44269504f; /* powers of two from here on */
            } else {
                Cell cell = KV8 ? to_e4m3(number<BF16>(bits)) : bits;
                kv[(part - 1) * HEAD + i] = cell;
                if (head % group == 0)
                    cache[i] = cell;
            }
        }
    }

    /* Sum up slots first + team, first + team + TEAMS, ...: `acc` is a lane's part of the values, weighted. */
    __device__ __forceinline__ void scan(
        u64 cache, u32 first, const float *q, const Cell *kv, float &top, float &total, float (&acc)[EACH]) const {
        u32 team = threadIdx.x / 8, begin = threadIdx.x % 8 * EACH;
        float query[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; i++)
            query[i] = q[begin + i];
        for (u32 base = first; base <= last; base += TEAMS * AHEAD) {
            Cells key[AHEAD], value[AHEAD];
#pragma unroll
            for (u32 a = 0; a < AHEAD; a++) {
                u32 slot = base + a * TEAMS + team;
                bool old = slot < last; /* the newest may not be in the cache yet; those beyond do not count */
                key[a].load((old ? keys + cache + (u64)slot * HEAD : kv) + begin);
                value[a].load((old ? values + cache + (u64)slot * HEAD : kv + HEAD) + begin);
            }
#pragma unroll
            for (u32 a = 0; a < AHEAD; a++) {
                float score = 0;
#pragma unroll
                for (u32 i = 0; i < EACH; i++)
                    score += query[i] * key[a][i];
#pragma unroll
                for (u32 mask = 4; mask; mask /= 2)
                    score += shuffle(score, mask);
                bool counts = base + a * TEAMS + team <= last;
                float higher = counts ? fmaxf(top, score) : top, fade = exp2f(top - higher);
                float weight = counts ? exp2f(score - higher) : 0.0f;
                total = total * fade + weight, top = higher;
#pragma unroll
                for (u32 i = 0; i < EACH; i++)
                    acc[i] = acc[i] * fade + weight * value[a][i];
            }
        }
    }

    /* Head `head` of row `m` of qkv [batch, heads + 2 key heads, HEAD], to out [HEAD]. `room`: shared memory. */
    __device__ __forceinline__ void attend(const u16 *qkv, u16 *out, u32 m, u32 head, float *room) const {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float *q = room, *parts = room + 2 * HEAD;
        Cell *kv = (Cell *)(room + HEAD);
        for (u32 part = warp; part < 3; part += WARPS)
            prepare(qkv, m, head, part, lane, q, kv);
        workers_arrive<THREADS>();
        float top = -1e30f, total = 0, acc[EACH] = {};
        scan(((u64)m * key_heads + head / (heads / key_heads)) * slots * HEAD, first_slot(m), q, kv, top, total, acc);
#pragma unroll
        for (u32 mask = 8; mask < 32; mask *= 2) {
            float other = shuffle(top, mask), higher = fmaxf(top, other);
            float mine = exp2f(top - higher), theirs = exp2f(other - higher);
            total = total * mine + shuffle(total, mask) * theirs, top = higher;
#pragma unroll
            for (u32 i = 0; i < EACH; i++)
                acc[i] = acc[i] * mine + shuffle(acc[i], mask) * theirs;
        }
        float *part = parts + warp * (HEAD + 2);
        if (lane < 8) {
#pragma unroll
            for (u32 i = 0; i < EACH; i++)
                part[lane * EACH + i] = acc[i];
            part[HEAD] = top, part[HEAD + 1] = total;
        }
        workers_arrive<THREADS>();
        for (u32 i = threadIdx.x; i < HEAD; i += THREADS) {
            float highest = parts[HEAD], sum = 0, weights = 0;
            for (u32 w = 1; w < WARPS; w++)
                highest = fmaxf(highest, parts[w * (HEAD + 2) + HEAD]);
            for (u32 w = 0; w < WARPS; w++) {
                const float *from = parts + w * (HEAD + 2);
                float weight = exp2f(from[HEAD] - highest);
                sum += weight * from[i], weights += weight * from[HEAD + 1];
            }
            out[i] = (u16)pair<BF16>(sum / weights, 0.0f);
        }
        workers_arrive<THREADS>();
    }
};
