/* PTX instructions and types of the kernels in this folder. tests/kernels/emulation/warp.cuh implements the same
functions on a CPU, to test the kernels' code. */

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/* Numbers that Python reads from a compiled source (nvrtc.py): shared memory of a block, additional bytes per row of x,
and the sizes of the structs that Python fills in, in order. */
#define LAYOUT(...) extern "C" __constant__ u32 layout[] = {__VA_ARGS__}

extern __shared__ __align__(1024) u8 shared[];

__device__ __forceinline__ u32 address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

/* An optimisation barrier: the compiler does not recompute this value at its uses. */
__device__ __forceinline__ void opaque(u32 &value) { asm volatile("" : "+r"(value)); }
template <typename T> __device__ __forceinline__ void opaque(T *&pointer) { asm volatile("" : "+l"(pointer)); }

/* The bits of `yes` where `mask` has ones, else of `no`: one instruction, which the compiler may not find. */
__device__ __forceinline__ u32 choose(u32 mask, u32 yes, u32 no) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(yes), "r"(no), "r"(mask));
    return bits;
}

/* Load 16 bytes of global memory. */
__device__ __forceinline__ uint4 from_global(const void *pointer) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
    return v;
}

/* Load global memory that no kernel writes meanwhile: weights, which are read once and are not kept in the L1 cache, or
what is read again. The compiler does not move these loads towards their uses. */
template <typename T> __device__ __forceinline__ T read_once(const void *pointer);
template <> __device__ __forceinline__ uint4 read_once<uint4>(const void *pointer) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
    return v;
}
template <> __device__ __forceinline__ uint2 read_once<uint2>(const void *pointer) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y) : "l"(pointer));
    return v;
}
template <typename T> __device__ __forceinline__ T read_again(const void *pointer);
template <> __device__ __forceinline__ uint2 read_again<uint2>(const void *pointer) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
    return v;
}
template <> __device__ __forceinline__ u32 read_again<u32>(const void *pointer) {
    u32 word;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word) : "l"(pointer));
    return word;
}
template <> __device__ __forceinline__ float read_again<float>(const void *pointer) {
    return __uint_as_float(read_again<u32>(pointer));
}
template <> __device__ __forceinline__ u16 read_again<u16>(const void *pointer) {
    u16 half;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(half) : "l"(pointer));
    return half;
}
template <> __device__ __forceinline__ uint4 read_again<uint4>(const void *pointer) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
    return v;
}
template <> __device__ __forceinline__ u8 read_again<u8>(const void *pointer) {
    u32 byte;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(byte) : "l"(pointer));
    return (u8)byte;
}

/* The value of a warp's first lane, for values that are equal in all lanes: the compiler then computes them once. */
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(0xffffffff, value, 0); }

/* Store 16 bytes to global memory, evict-first. */
__device__ __forceinline__ void store(void *pointer, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/* Load 4, 8 or 16 bytes of shared memory that do not change any more. */
template <typename T> __device__ __forceinline__ T from_shared(u32 address);
template <> __device__ __forceinline__ u32 from_shared<u32>(u32 address) {
    u32 word;
    asm("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}
template <> __device__ __forceinline__ uint2 from_shared<uint2>(u32 address) {
    uint2 words;
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
    return words;
}

template <> __device__ __forceinline__ uint4 from_shared<uint4>(u32 address) {
    uint4 v;
    asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

/* Start copying SIZE bytes, 4, 8 or 16, to shared memory; zeros if not `inside`. Before Ampere, copies are synchronous. */
template <int SIZE> __device__ __forceinline__ void copy(u8 *to, const void *from, bool inside) {
#if __CUDA_ARCH__ < 800
    uint4 value = {};
    if (inside && SIZE == 16)
        value = *(const uint4 *)from;
    else if (inside)
        value.x = *(const u32 *)from, value.y = SIZE == 8 ? ((const u32 *)from)[1] : 0;
    if (SIZE == 16)
        *(uint4 *)to = value;
    else if (SIZE == 8)
        *(uint2 *)to = make_uint2(value.x, value.y);
    else
        *(u32 *)to = value.x;
#else
    u32 size = inside ? SIZE : 0;
    if (SIZE == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     ::"r"(address(to)), "l"(from), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;"
                     ::"r"(address(to)), "l"(from), "r"(size), "n"(SIZE) : "memory");
#endif
}

#ifdef ORIGIN
/* Load 4 bytes of shared memory at AT + offset in one instruction: the compiler would add `shared` to the offset first.
Its start depends on the device (ORIGIN bytes are reserved) and is an immediate of the instruction. */
template <typename T, u32 AT> __device__ __forceinline__ T look(u32 offset) {
    u32 bits;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(bits) : "r"(offset), "n"(ORIGIN + AT));
    return *(T *)&bits;
}
template <u32 AT> __device__ __forceinline__ uint2 look_at_two(u32 offset) { /* 8 bytes */
    uint2 words;
    asm("ld.shared.v2.u32 {%0, %1}, [%2 + %3];" : "=r"(words.x), "=r"(words.y) : "r"(offset), "n"(ORIGIN + AT));
    return words;
}
#endif

/* Close the group of copies started since the last commit(); wait until at most LATER groups are in flight. */
#if __CUDA_ARCH__ < 800
__device__ __forceinline__ void commit() {}
template <int LATER> __device__ __forceinline__ void wait() {}
#else
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
#endif

/* Two floats rounded to bf16 or fp16, the first in the low half. */
template <bool BFLOAT> __device__ __forceinline__ u32 pair(float first, float second) {
    u32 both;
#if __CUDA_ARCH__ < 800
    asm("{.reg .f16 low, high;\ncvt.rn.f16.f32 low, %1;\ncvt.rn.f16.f32 high, %2;\nmov.b32 %0, {low, high};}"
        : "=r"(both) : "f"(first), "f"(second));
#else
    if (BFLOAT)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
    return both;
}

template <bool BFLOAT> __device__ __forceinline__ float number(u16 bits) {
    float value;
    if (BFLOAT)
        return __uint_as_float((u32)bits << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

/* E4M3 to fp32, and fp32 to the nearest E4M3, saturating at ±448. */
__device__ __forceinline__ float from_e4m3(u32 code) {
    return __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
}
__device__ __forceinline__ u8 to_e4m3(float value) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(value));
    return (u8)both;
}

/* Products of two pairs of numbers. */
template <bool BFLOAT> __device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 both;
    if (BFLOAT)
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

/* a b + c of pairs of numbers, rounded once. */
template <bool BFLOAT> __device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
    u32 both;
    if (BFLOAT)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
    return both;
}

/* d += a b: 16×16 times 16×8, of 16 bits with fp32 sums. Before Ampere, two products of half the depth, of fp16 only. */
template <bool BFLOAT> __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ < 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%8}, {%0,%1,%2,%3};\n"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%6,%7}, {%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    if (BFLOAT)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* A barrier of the COUNT threads of a group of warps. */
template <int COUNT> __device__ __forceinline__ void group_sync(u32 group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(COUNT) : "memory");
}

/* Let the stream's next kernel start (it waits here in turn), and wait until the previous one has finished. Before
Hopper, kernels start when the previous one has finished. */
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

/* `value` of the lane whose number differs in the bits of `mask`. */
__device__ __forceinline__ float shuffle(float value, u32 mask) { return __shfl_xor_sync(0xffffffff, value, mask); }

/* Prefetch the 128 bytes around an address to the L2 cache. */
__device__ __forceinline__ void prefetch(const void *pointer) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer) : "memory");
}

/* Named barrier `number` of COUNT threads of a block: some wait, others arrive and continue. */
template <int COUNT> __device__ __forceinline__ void named_barrier_sync(u32 number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}
template <int COUNT> __device__ __forceinline__ void named_barrier_arrive(u32 number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(COUNT) : "memory");
}

/* Increment a counter in shared memory after all earlier reads of this thread; wait until it reaches a number. */
__device__ __forceinline__ void red_add_release_cta(u32 *counter) {
    asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(address(counter)) : "memory");
}
__device__ __forceinline__ void spin_until_cta(const u32 *counter, u32 number) {
    u32 now;
    do
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(now) : "r"(address(counter)) : "memory");
    while (now < number);
}

/* A barrier of all threads of a cluster's blocks, in two steps; and a store to the same place of another block. */
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait(u32) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void put_in_cluster(const float *to, u32 block, float value, u32) {
    asm volatile("{.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;}"
                 ::"r"(address(to)), "r"(block), "f"(value) : "memory");
}

/* A barrier of the first COUNT threads of a block. */
template <int COUNT> __device__ __forceinline__ void mma_warps_sync() {
    asm volatile("bar.sync 15, %0;" ::"n"(COUNT) : "memory");
}

/* Increment a counter after all earlier writes that this thread has done or observed; return the previous count. */
__device__ __forceinline__ u32 atomic_add_release(u32 *counter) {
    u32 before;
    asm volatile("fence.acq_rel.gpu;\natom.add.relaxed.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/* Like atomic_add_release, without the count. */
__device__ __forceinline__ void red_add_release(u32 *counter) {
    asm volatile("fence.acq_rel.gpu;\nred.add.relaxed.gpu.global.u32 [%0], 1;" ::"l"(counter) : "memory");
}

/* Wait until a counter reaches a number: writes before the increments are then visible. */
__device__ __forceinline__ void spin_until(const u32 *counter, u32 number) {
    u32 now;
    do
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    while (now < number);
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/* A number with an epoch, written and read as one, so that waiting for the epoch needs no fence. */
__device__ __forceinline__ void put_with_epoch(u64 *to, float value, u32 epoch) {
    u64 both = (u64)epoch << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}
__device__ __forceinline__ u64 peek(const u64 *from) {
    u64 both;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
    return both;
}
__device__ __forceinline__ uint4 peek(const uint4 *from) {
    u64 first, second;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
    return make_uint4((u32)first, (u32)(first >> 32), (u32)second, (u32)(second >> 32));
}
__device__ __forceinline__ float take_at_epoch(const u64 *from, u32 epoch, u64 both) { /* `both`: result of peek() */
    while (both >> 32 != epoch)
        both = peek(from);
    return __uint_as_float((u32)both);
}

/* Write four lanes' numbers in 16 bits as one word, from the first lane if `inside`. The bits are never all ones, so
that waiting until memory is not all ones any more needs no fence. */
template <bool BFLOAT> __device__ __forceinline__ void put_four(u16 *to, float value, bool inside) {
    u32 two = pair<BFLOAT>(value, shuffle(value, 1));
    u32 others = __float_as_uint(shuffle(__uint_as_float(two), 2));
    if (inside && threadIdx.x % 4 == 0)
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64)others << 32 | two) : "memory");
}
__device__ __forceinline__ uint4 take_written(const uint4 *from, uint4 eight) { /* `eight`: result of peek() */
    while (eight.y == 0xffffffff || eight.w == 0xffffffff)
        eight = peek(from);
    return eight;
}
