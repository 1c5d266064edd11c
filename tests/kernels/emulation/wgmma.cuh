/* The functions of halfbyte/kernels/cuda/wgmma.cuh on a CPU. Products happen when they are waited for; until then their
sums are NaN. */

#pragma once

#include "warp.cuh"

struct { u32 x; } blockDim;

struct Pending { float (*d)[4]; u32 a[4]; u32 x; bool add; float before[16][4]; };
std::vector<std::vector<Pending>> pending(2048); /* by thread */

/* A barrier: how many threads end a phase, how many are missing in this one, and whether it is odd. */
struct Barrier { u32 count : 16, missing : 16, odd; };
void mbarrier_init(u64 *barrier, u32 count) { *(Barrier *)barrier = {count, count, 0}; }
void mbarrier_arrive(u64 *barrier) {
    Barrier &b = *(Barrier *)barrier;
    if (--b.missing == 0)
        b.missing = b.count, b.odd ^= 1;
}
void cp_async_mbarrier_arrive(u64 *barrier) {
    commit();
    wait<0>();
    mbarrier_arrive(barrier);
}
void mbarrier_wait(u64 *barrier, u32 odd) {
    while (((Barrier *)barrier)->odd == odd)
        meet(0, 0);
}
template <int COUNT> void setmaxnreg_dec() {}
template <int COUNT> void setmaxnreg_inc() {}
template <int SIZE> void copy_to(u32 to, const void *from) { copy<SIZE>(&memory.at(to - RESERVED), from, true); }
u32 descriptor_of(u32 rows) {
    if (rows % 1024)
        fprintf(stderr, "rows of x are not aligned\n"), abort();
    return rows >> 4;
}
void wgmma_fence() { meet(current->number / 128 * 128, 128); }
void wgmma_commit() {}
template <u32 N> void wgmma(float (&d)[N][4], const u32 (&a)[4], u32 x, bool add) {
    Pending later{d, {a[0], a[1], a[2], a[3]}, x, add};
    memcpy(later.before, d, sizeof d);
    memset(d, 0xff, sizeof d);
    pending[current->number].push_back(later);
}

/* Fragments as the PTX manual has them for wgmma.m64nNk16, of a warp as for mma.m16n8k16. */
template <u32 N> void wgmma_wait(float (&d)[N][4]) {
    u32 group = current->number / 128 * 128, warp = current->number / 32 * 32, lane = current->number % 32;
    meet(group, 128);
    auto &own = pending[current->number];
    if (own.empty() || own[0].d != d)
        fprintf(stderr, "nothing of these sums was begun\n"), abort();
    float sums[N][4];
    memcpy(sums, own[0].before, sizeof d);
    for (size_t o = 0; o < own.size(); o++)
        for (u32 n = 0; n < N; n++)
            for (u32 i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                float sum = own[o].add ? sums[n][i] : 0;
                for (u32 k = 0; k < 16; k++) {
                    u32 left = pending[warp + lane / 4 * 4 + k % 8 / 2][o].a[i / 2 + k / 8 * 2];
                    u32 at = own[o].x * 16 + m * 128 + k * 2;
                    at ^= (at >> 7 & 7) << 4;
                    sum += number<BF16>(left >> k % 2 * 16) * number<BF16>(from_shared<u16>(at));
                }
                sums[n][i] = sum;
            }
    memcpy(d, sums, sizeof d);
    meet(group, 128);
    own.clear();
}
