// Sums over the threads of a block.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

// Adds `values` over the block, in a fixed order; every thread gets the totals through `totals`.
// warp_sums has a row per warp.
template <int kCount, int kTile, typename Acc>
__device__ inline void block_sums(Acc (&values)[kCount], Acc (*warp_sums)[kTile], Acc* totals) {
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int half = kWarp / 2; half > 0; half /= 2) {
      values[i] += __shfl_down_sync(0xffffffffu, values[i], half);
    }
    if (lane == 0) warp_sums[warp][i] = values[i];
  }
  __syncthreads();
  if (threadIdx.x < kCount) {
    Acc total = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w)
      total += warp_sums[w][threadIdx.x];
    totals[threadIdx.x] = total;
  }
  __syncthreads();
}

}  // namespace convt_reduce::cuda
