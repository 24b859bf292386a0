// What the threads of a block, and the blocks of a cluster, do together.
#pragma once
#include <cstdint>

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 EVERY = 0xffffffffu;

__device__ __forceinline__ u32 lane() { return threadIdx.x & 31; }
__device__ __forceinline__ u32 warp() { return threadIdx.x >> 5; }
__device__ __forceinline__ u32 lanes_below() { return (1u << lane()) - 1; }

// A condition whose code stands behind what is done else.
__device__ __forceinline__ bool seldom(bool condition) { return __builtin_expect(condition, false); }

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Every block of the cluster has come here; what it wrote before is seen by all of them behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same in two halves, without a promise about what was written.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A word of the shared memory of block `rank` of the cluster, at the place where this block has `p`.
__device__ __forceinline__ u32 remote(const u32* p, u32 rank) {
  u32 at, value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

// The next kernel of the stream, if it was launched so, may begin; what comes before its `wait_for_leader` runs beside
// this kernel, what comes behind sees all that this kernel wrote.
__device__ __forceinline__ void let_followers_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_leader() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 warp_inclusive(u32 value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    u32 left = __shfl_up_sync(EVERY, value, step);
    if (lane() >= step) value += left;
  }
  return value;
}

__device__ __forceinline__ uint2 remote(const uint2* p, u32 rank) {
  u32 at;
  uint2 value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint4 remote(const uint4* p, u32 rank) {
  u32 at;
  uint4 value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(at)
               : "memory");
  return value;
}

// Sends a value to the place in block `rank` of the cluster where this block has `to`, and tells that block's barrier.
__device__ __forceinline__ void send(uint4* to, u32 rank, const uint4& value, u64* barrier) {
  u32 at, tell;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(tell) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(tell)
               : "memory");
}
__device__ __forceinline__ void send(u64* to, u32 rank, u64 value, u64* barrier) {
  u32 at, tell;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(tell) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(at), "l"(value),
               "r"(tell)
               : "memory");
}

// Sum of the values of the threads before this one; `total` of all. `room` holds a word for each warp, and no
// thread may still be reading it: callers alternate between two.
template <int THREADS>
__device__ __forceinline__ u32 block_before(u32 value, u32* room, u32& total) {
  u32 within = warp_inclusive(value);
  if (lane() == 31) room[warp()] = within;
  __syncthreads();
  u32 sums = lane() < THREADS / 32 ? room[lane()] : 0;
  total = __reduce_add_sync(EVERY, sums);
  return __reduce_add_sync(EVERY, lane() < warp() ? sums : 0) + within - value;
}
