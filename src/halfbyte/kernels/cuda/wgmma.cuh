/* PTX instructions of Hopper (sm_90a) for a group of four warps. tests/kernels/emulation/wgmma.cuh implements the same
functions on a CPU. Constant: BF16. */

#pragma once

#include "warp.cuh"

/* A barrier in shared memory, whose phases end when `count` threads have arrived; a waiting thread passes the parity of
the phase. wgmma may read data of cp.async without a fence. */
__device__ __forceinline__ void mbarrier_init(u64 *barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
/* Arrive when all copies that this thread has started are complete. */
__device__ __forceinline__ void cp_async_mbarrier_arrive(u64 *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u64 *barrier, u32 odd) {
    asm volatile("{.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}"
                 ::"r"(address(barrier)), "r"(odd) : "memory");
}

/* Change the number of registers per thread from here on: one group releases registers, others take more. */
template <int COUNT> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* Start copying 4 or 16 bytes to an address in shared memory. */
template <int SIZE> __device__ __forceinline__ void copy_to(u32 to, const void *from) {
    if (SIZE == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/* Low half of a descriptor of consecutive rows of 128 bytes in shared memory, at a multiple of 1024; the other half is
constant. Eight 16-byte pieces of row r are swizzled: piece p is at place p ^ r % 8. An offset in memory, or of 32 bytes
along a row, adds a sixteenth of it. */
__device__ __forceinline__ u32 descriptor_of(u32 rows) { return 1 << 16 | (rows & 0x3ffff) >> 4; }

/* Order register accesses before what follows; close the group of started products; wait until it is complete. */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 N> __device__ __forceinline__ void wgmma_wait(float (&d)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4 * N; i++)
        asm volatile("" : "+f"(d[i / 4][i % 4])::"memory"); /* prevents earlier reads */
}
/* Wait until the group before the last one, which read `a`, is complete. */
template <u32 M> __device__ __forceinline__ void wgmma_wait_before(u32 (&a)[M][2][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
    for (u32 i = 0; i < 8 * M; i++)
        asm volatile("" : "+r"(a[i / 8][i / 4 % 2][i % 4])::"memory"); /* in use until here */
}

#define TO_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TO_15 TO_7 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TO_23 TO_15 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TO_31 TO_23 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TO_47 TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TO_63 TO_47 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define TWO(n) SUMS(n), SUMS(n + 1)
#define EIGHT(n) TWO(n), TWO(n + 2), TWO(n + 4), TWO(n + 6)
#define WGMMA(SIZE, D, A, B, ADD, ...)                                                                                   \
    asm volatile("{.reg .pred add;\n.reg .b64 x;\nsetp.ne.b32 add, " ADD ", 0;\nmov.b64 x, {" B ", 0x40000040};\n"      \
                 "wgmma.mma_async.sync.aligned.m64n" SIZE "k16.f32." TYPES " {" D "}, {" A "}, x, add, 1, 1, 0;}"        \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x), "r"((int)add) : "memory")
#if BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

/* Start d += a x, or d = a x: 64×16 times 16×8·N; a warp has 16 rows as in multiply(), x is a descriptor. */
template <u32 N> __device__ __forceinline__ void wgmma(float (&d)[N][4], const u32 (&a)[4], u32 x, bool add) {
    if constexpr (N == 2)
        WGMMA("16", TO_7, "%8, %9, %10, %11", "%12", "%13", TWO(0));
    else if constexpr (N == 4)
        WGMMA("32", TO_15, "%16, %17, %18, %19", "%20", "%21", TWO(0), TWO(2));
    else if constexpr (N == 6)
        WGMMA("48", TO_23, "%24, %25, %26, %27", "%28", "%29", TWO(0), TWO(2), TWO(4));
    else if constexpr (N == 8)
        WGMMA("64", TO_31, "%32, %33, %34, %35", "%36", "%37", EIGHT(0));
    else if constexpr (N == 12)
        WGMMA("96", TO_47, "%48, %49, %50, %51", "%52", "%53", EIGHT(0), TWO(8), TWO(10));
    else if constexpr (N == 16)
        WGMMA("128", TO_63, "%64, %65, %66, %67", "%68", "%69", EIGHT(0), EIGHT(8));
    else
        static_assert(N == 2, "there is no product of so many tiles");
}
