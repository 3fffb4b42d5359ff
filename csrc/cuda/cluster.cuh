// Clusters of blocks, from compute capability 9.0 on, which reach into each other's shared memory.
#pragma once

#include "cuda/barriers.cuh"

namespace convt_reduce::cuda {

// Waits for all threads of the cluster's blocks; what these have in shared memory can be seen then.
__device__ inline void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Whether this code is compiled for GPUs that have clusters.
__device__ constexpr bool has_clusters() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

// meet_cluster in two parts, for blocks that only wait for others to have started.
__device__ inline void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Sends a float to where a block of the cluster has what ours has at `own`, and tells the barrier
// there, which is where ours has `barrier`, that it has arrived.
__device__ inline void send_to_cluster(float* own, unsigned barrier, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  const unsigned address = shared_address(own);
  unsigned to;
  unsigned to_barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to_barrier) : "r"(barrier), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(__float_as_uint(value)), "r"(to_barrier)
      : "memory");
#endif
}

// What a block of the cluster has where ours has `own`.
__device__ inline float2 load_of_cluster(const float2* own, int rank) {
  float2 v = {};
#if __CUDA_ARCH__ >= 900
  const unsigned address = shared_address(own);
  unsigned other;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y)
               : "r"(other)
               : "memory");
#endif
  return v;
}

}  // namespace convt_reduce::cuda
