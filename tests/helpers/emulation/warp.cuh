/* The functions of halfbyte/kernels/cuda/warp.cuh on a CPU: a thread is a fiber that runs until it meets a barrier, and
asynchronous copies happen as late as the kernel allows, so that a wait or a barrier that is missing shows. */

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <ucontext.h>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __constant__
#define LAYOUT(...) extern "C" { u32 layout[] = {__VA_ARGS__}; }
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define threadIdx (current->thread)
#define blockIdx (current->block)
#define memory (memories[current->block.x])
#define shared (memory.data())

struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Index { u32 x; } gridDim;

struct Copy { u8 *to; const void *from; size_t size; bool inside; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    Index thread, block;
    u32 number;                   /* of the thread, among those of all blocks that run together */
    u32 first = 0, count = 0;     /* fibers of the barrier it waits at; none if count is 0 */
    bool done = false;
    std::vector<std::vector<Copy>> groups{1};
    u32 a[4], b[2];               /* what multiply() takes from other lanes */
    float value;                  /* and shuffle() */
};

std::vector<std::unique_ptr<Fiber>> fibers;   /* of the blocks that run */
std::vector<std::vector<u8>> memories;        /* their shared memory */
Fiber *current;
ucontext_t scheduler;
u32 threads_of_block;
std::function<void()> body;

void meet(u32 first, u32 count) {
    current->first = first, current->count = count;
    swapcontext(&current->context, &scheduler);
}
void __syncwarp() { meet(current->number / 32 * 32, 32); }
void __syncthreads() { meet(current->number - current->thread.x, threads_of_block); }
template <int COUNT> void group_sync(u32 group) { meet(current->number - current->thread.x + group * COUNT, COUNT); }
void griddepcontrol_wait() {}

/* Blocks of a cluster are neighbours that run together; who waits has arrived. */
void cluster_arrive() {}
void cluster_wait(u32 blocks) {
    meet(current->number - current->thread.x - current->block.x % blocks * threads_of_block, blocks * threads_of_block);
}
void put_in_cluster(const float *to, u32 block, float value, u32 blocks) {
    auto at = (const u8 *)to - memory.data();
    memcpy(&memories[current->block.x / blocks * blocks + block].at(at), &value, sizeof value);
}

float shuffle(float value, u32 mask) {
    current->value = value;
    __syncwarp();
    float other = fibers[current->number ^ mask]->value;
    __syncwarp();
    return other;
}
void prefetch(const void *) {}
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
u32 atomic_add_release(u32 *counter) { return (*counter)++; }
void spin_until(const u32 *counter, u32 number) {
    while (*counter < number)
        meet(0, 0);
}
void red_add_release(u32 *counter) { ++*counter; }
void red_add_release_cta(u32 *counter) { ++*counter; }
void spin_until_cta(const u32 *counter, u32 number) { spin_until(counter, number); }
template <int COUNT> void mma_warps_sync() { meet(current->number - current->thread.x, COUNT); }
struct Numbered { u32 came = 0, round = 0; };
std::map<std::pair<u32, u32>, Numbered> numbered; /* barriers by block and number */
template <int COUNT> void named_barrier_arrive(u32 number) {
    Numbered &barrier = numbered[{current->block.x, number}];
    if (++barrier.came == COUNT)
        barrier.came = 0, barrier.round++;
}
template <int COUNT> void named_barrier_sync(u32 number) {
    Numbered &barrier = numbered[{current->block.x, number}];
    u32 round = barrier.round;
    named_barrier_arrive<COUNT>(number);
    while (barrier.round == round)
        meet(0, 0);
}
float rsqrtf(float value) { return 1 / std::sqrt(value); }
template <typename T> void opaque(T &) {}
u32 choose(u32 mask, u32 yes, u32 no) { return yes & mask | no & ~mask; }
u32 __funnelshift_l(u32 low, u32 high, u32 shift) { return high << shift | (shift ? low >> (32 - shift) : 0); }
uint4 from_global(const void *pointer) { return *(const uint4 *)pointer; }
template <typename T> T read_once(const void *pointer) { return *(const T *)pointer; }
template <typename T> T read_again(const void *pointer) { return *(const T *)pointer; }
u32 uniform(u32 value) { return value; }
void store(void *pointer, uint4 value) { *(uint4 *)pointer = value; }
constexpr u32 RESERVED = 1024; /* bytes of shared memory before a block's own */
u32 address(const void *pointer) { return RESERVED + (u32)((const u8 *)pointer - memory.data()); }
template <typename T> T from_shared(u32 address) {
    T value;
    memcpy(&value, &memory.at(address - RESERVED), sizeof value);
    return value;
}

template <int SIZE> void copy(u8 *to, const void *from, bool inside) {
    if ((uintptr_t)from % SIZE || (uintptr_t)to % SIZE)
        fprintf(stderr, "a copy is not aligned\n"), abort();
    memset(to, 0xff, SIZE); /* NaN, until it has come */
    current->groups.back().push_back({to, from, SIZE, inside});
}
void commit() { current->groups.emplace_back(); }
template <int LATER> void wait() {
    auto &groups = current->groups;
    while (groups.size() > LATER + 1) {
        for (Copy &c : groups.front())
            c.inside ? memcpy(c.to, c.from, c.size) : memset(c.to, 0, c.size);
        groups.erase(groups.begin());
    }
}

void put_with_epoch(u64 *to, float value, u32 epoch) {
    u32 bits;
    memcpy(&bits, &value, 4);
    *to = (u64)epoch << 32 | bits;
}
u64 peek(const u64 *from) { return *from; }
uint4 peek(const uint4 *from) { return *from; }
uint4 take_written(const uint4 *from, uint4 eight) {
    for (; eight.y == 0xffffffff || eight.w == 0xffffffff; eight = *from)
        meet(0, 0);
    return eight;
}
float take_at_epoch(const u64 *from, u32 epoch, u64 both) {
    for (; both >> 32 != epoch; both = *from)
        meet(0, 0);
    float value;
    memcpy(&value, &both, 4);
    return value;
}

template <typename T, u32 AT> T look(u32 offset) { return *(const T *)(shared + AT + offset); }
template <u32 AT> uint2 look_at_two(u32 offset) { return look<uint2, AT>(offset); }

float __uint_as_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
u32 __float_as_uint(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
u32 __byte_perm(u32 x, u32 y, u32 selector) {
    u64 both = (u64)y << 32 | x;
    u32 result = 0;
    for (int i = 0; i < 4; i++)
        result |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}

template <bool BFLOAT> u16 rounded(float value) {
    u32 bits = __float_as_uint(value);
    if (BFLOAT)
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    _Float16 half = (_Float16)value;
    u16 result;
    memcpy(&result, &half, 2);
    return result;
}
template <bool BFLOAT> float number(u16 bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return BFLOAT ? __uint_as_float((u32)bits << 16) : (float)half;
}
template <bool BFLOAT> u32 pair(float first, float second) {
    return rounded<BFLOAT>(first) | (u32)rounded<BFLOAT>(second) << 16;
}

template <bool BFLOAT> void put_four(u16 *to, float value, bool inside) {
    u32 two = pair<BFLOAT>(value, shuffle(value, 1));
    u32 others = __float_as_uint(shuffle(__uint_as_float(two), 2));
    if (inside && current->thread.x % 4 == 0)
        *(u64 *)to = (u64)others << 32 | two;
}

float from_e4m3(u32 code) { return __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f; }
u8 to_e4m3(float value) {
    u32 bits = __float_as_uint(std::fmin(std::fabs(value), 448.0f) * 0x1p-120f);
    return (bits + 0x7ffff + (bits >> 20 & 1)) >> 20 | (value < 0) << 7;
}

template <bool BFLOAT> u32 times(u32 a, u32 b) {
    return pair<BFLOAT>(number<BFLOAT>(a) * number<BFLOAT>(b), number<BFLOAT>(a >> 16) * number<BFLOAT>(b >> 16));
}

template <bool BFLOAT> u32 fused(u32 a, u32 b, u32 c) {
    float first = number<BFLOAT>(a) * number<BFLOAT>(b) + number<BFLOAT>(c);
    return pair<BFLOAT>(first, number<BFLOAT>(a >> 16) * number<BFLOAT>(b >> 16) + number<BFLOAT>(c >> 16));
}

/* Fragments as the PTX manual has them for mma.m16n8k16: a lane g * 4 + t holds of A rows g (a0, a2) and g + 8 (a1, a3),
columns 2t, 2t+1 (a0, a1) and 2t+8, 2t+9 (a2, a3); of B column g, the same rows; of D columns 2t, 2t+1 of rows g, g + 8. */
template <bool BFLOAT> void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    memcpy(current->a, a, sizeof a);
    current->b[0] = b0, current->b[1] = b1;
    __syncwarp();
    u32 warp = current->number / 32 * 32, g = current->number % 32 / 4, t = current->number % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const Fiber &left = *fibers[warp + g * 4 + k % 8 / 2], &right = *fibers[warp + (2 * t + i % 2) * 4 + k % 8 / 2];
            u32 x = left.a[i / 2 + k / 8 * 2], y = right.b[k / 8];
            d[i] += number<BFLOAT>(x >> k % 2 * 16) * number<BFLOAT>(y >> k % 2 * 16);
        }
    __syncwarp();
}

void enter() {
    body();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

void run_all() {
    for (size_t left = fibers.size(); left;) {
        bool moved = false;
        for (auto &fiber : fibers) {
            bool ready = !fiber->done;
            for (u32 i = 0; ready && i < fiber->count; i++) {
                Fiber &other = *fibers[fiber->first + i];
                ready = other.first == fiber->first && other.count == fiber->count;
            }
            if (!ready)
                continue;
            if (fiber->count) { /* all are there: all may go on */
                u32 first = fiber->first, count = fiber->count;
                for (u32 i = 0; i < count; i++)
                    fibers[first + i]->count = 0;
            }
            moved = true;
            current = fiber.get();
            swapcontext(&scheduler, &fiber->context);
            left -= fiber->done;
        }
        if (!moved)
            fprintf(stderr, "threads wait for each other\n"), abort();
    }
}

/* Run `work` in blocks × threads threads, one block after the other or all together. */
void launch(u32 blocks, u32 threads, u32 bytes, std::function<void()> work, bool together = false) {
    gridDim.x = blocks, threads_of_block = threads, body = work;
    memories.assign(blocks, std::vector<u8>(bytes, 0xff));
    for (u32 block = 0; block < blocks; block++) {
        if (!together)
            fibers.clear();
        for (u32 i = 0; i < threads; i++) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber &f = *fibers.back();
            f.thread.x = i, f.number = fibers.size() - 1, f.block.x = block;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
            makecontext(&f.context, enter, 0);
        }
        if (!together || block + 1 == blocks)
            run_all();
    }
    fibers.clear();
}
