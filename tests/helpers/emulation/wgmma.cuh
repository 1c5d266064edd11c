/* The functions of halfbyte/kernels/cuda/wgmma.cuh on a CPU. Products happen when they are waited for; until then their
sums are NaN. */

#pragma once

#include "warp.cuh"

struct { u32 x; } blockDim;

/* A product that was begun: whose operands these are, and what the sums were before all that is under way. */
struct Pending { float (*d)[4]; u32 n; const u32 *from; u32 a[4]; u32 x; bool add; u32 group; };
struct Begun { std::vector<Pending> begun; std::map<float (*)[4], std::vector<float>> sums; u32 committed = 0; };
std::vector<Begun> pending(2048); /* by thread */

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
void wgmma_commit() { pending[current->number].committed++; }
template <u32 N> void wgmma(float (&d)[N][4], const u32 (&a)[4], u32 x, bool add) {
    Begun &own = pending[current->number];
    auto &sums = own.sums[d];
    if (sums.empty())
        sums.assign(&d[0][0], &d[0][0] + 4 * N);
    memset(d, 0xff, sizeof d);
    own.begun.push_back({d, N, a, {a[0], a[1], a[2], a[3]}, x, add, own.committed});
}

/* Fragments as the PTX manual has them for wgmma.m64nNk16, of a warp as for mma.m16n8k16. */
void wgmma_wait_for(u32 later) {
    u32 group = current->number / 128 * 128, warp = current->number / 32 * 32, lane = current->number % 32;
    meet(group, 128);
    Begun &own = pending[current->number];
    size_t done = 0;
    for (; done < own.begun.size() && own.begun[done].group + later < own.committed; done++) {
        const Pending &product = own.begun[done];
        if (memcmp(product.from, product.a, sizeof product.a))
            fprintf(stderr, "operands have changed too early\n"), abort();
        auto &sums = own.sums[product.d];
        for (u32 n = 0; n < product.n; n++)
            for (u32 i = 0; i < 4; i++) {
                u32 m = 8 * n + lane % 4 * 2 + i % 2;
                float sum = product.add ? sums[4 * n + i] : 0;
                for (u32 k = 0; k < 16; k++) {
                    u32 left = pending[warp + lane / 4 * 4 + k % 8 / 2].begun[done].a[i / 2 + k / 8 * 2];
                    u32 at = product.x * 16 + m * 128 + k * 2;
                    at ^= (at >> 7 & 7) << 4;
                    sum += number<BF16>(left >> k % 2 * 16) * number<BF16>(from_shared<u16>(at));
                }
                sums[4 * n + i] = sum;
            }
    }
    meet(group, 128);
    own.begun.erase(own.begun.begin(), own.begun.begin() + done);
    if (own.begun.empty()) {
        for (auto &[d, sums] : own.sums)
            memcpy(d, sums.data(), sums.size() * 4);
        own.sums.clear();
    }
}
template <u32 M> void wgmma_wait_before(u32 (&)[M][2][4]) { wgmma_wait_for(1); }
template <u32 N> void wgmma_wait(float (&)[N][4]) { wgmma_wait_for(0); }
