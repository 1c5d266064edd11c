/* A ring buffer in shared memory, filled by PRODUCERS warps and emptied by GROUPS of four other warps.

Constants: GROUPS, STAGES. */

#pragma once

#include "wgmma.cuh"

constexpr u32 PRODUCERS = 4, WARPS = 4 * GROUPS;

/* The stages of a ring, their barriers, and the position of the next stage. */
struct Ring {
    u32 begin;
    u64 *full, *empty; /* [STAGES] */
    u32 size, at = 0, offset = 0, turn = 0;

    __device__ __forceinline__ Ring(u32 begin, u32 size)
        : begin(begin), full((u64 *)(shared + begin + STAGES * size)), empty(full + STAGES), size(size) {}

    __device__ __forceinline__ void set_up() {
        for (u32 i = 0; i < STAGES; i++)
            mbarrier_init(full + i, 32 * PRODUCERS), mbarrier_init(empty + i, WARPS);
    }
    __device__ __forceinline__ u32 stage() { return begin + offset; }
    __device__ __forceinline__ void next() {
        at++, offset += size;
        if (at == STAGES)
            at = offset = 0, turn ^= 1;
    }
};
