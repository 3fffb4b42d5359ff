// Barriers in shared memory for what is copied to it behind our back, from compute capability 9.0
// on: a thread says how many bytes will come, copies and other blocks count them down, and whoever
// waits sees them then. Barriers and places are given by their addresses in shared memory.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Makes a barrier on which `count` threads arrive. finish_barriers() ends it for all that a thread
// has made: others may use them after the next meeting.
__device__ inline void make_barrier(unsigned barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
__device__ inline void finish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives, and lets the barrier wait for so many bytes too.
__device__ inline void expect_bytes(unsigned barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Starts a copy of whole vectors, of which the barrier is told.
__device__ inline void copy_bulk(unsigned to, uintptr_t from, unsigned bytes, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// Waits for all that a barrier waits for, the `parity`th time modulo 2. kOfCluster: and that other
// blocks of the cluster have sent.
template <bool kOfCluster = false>
__device__ inline void wait_for_bytes(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  unsigned done;
  do {
    if constexpr (kOfCluster) {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    }
  } while (done == 0);
#endif
}

}  // namespace convt_reduce::cuda
