// Adds the chunks that a form of stats left.
#pragma once

#include <algorithm>

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kMergeThreads = 256;
constexpr int kMostOwnLanes = 8;

// cell_sums [chunks][entries] -> their sums, into the first row. `lanes` threads share an entry,
// and neighbouring threads have neighbouring entries.
template <typename Acc>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(Acc* cell_sums, int64_t entries, int64_t chunks, int lanes) {
  __shared__ Acc sums[kMergeThreads];
  const int per_block = kMergeThreads / lanes;
  const int lane = threadIdx.x / per_block;
  const int64_t blocks = ceil_div(entries, per_block);
  let_next_kernel_start();  // stats has waited for all that came before us
  wait_for_previous_kernel();
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t entry = block * per_block + (threadIdx.x - lane * per_block);
    Acc sum = 0;
    Acc lost = 0;
    if (entry < entries) {
#pragma unroll 8
      for (int64_t chunk = lane; chunk < chunks; chunk += lanes) {
        add_exactly(sum, lost, cell_sums[chunk * entries + entry]);
      }
    }
    sum = settled(sum, lost);
    for (int half = lanes / 2; half > 0; half /= 2) {
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (lane < half) sum += sums[threadIdx.x + half * per_block];
      __syncthreads();
    }
    if (lane == 0 && entry < entries) cell_sums[entry] = sum;
  }
}

// The same for many entries, with the work of all lanes in one thread: the same sums, bit by bit.
template <int kLanes, typename Acc>
__global__ void __launch_bounds__(kMergeThreads)
    merge_many_kernel(Acc* cell_sums, int64_t entries, int64_t chunks) {
  constexpr int kTogether = kMostOwnLanes / kLanes;
  let_next_kernel_start();  // stats has waited for all that came before us
  wait_for_previous_kernel();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; entry < entries;
       entry += step) {
    Acc sums[kLanes] = {};
    Acc lost[kLanes] = {};
    const Acc* from = cell_sums + entry;
#pragma unroll kTogether
    for (int64_t chunk = 0; chunk < chunks; chunk += kLanes) {
      Acc loaded[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        loaded[lane] = chunk + lane < chunks ? from[(chunk + lane) * entries] : Acc(0);
      }
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        add_exactly(sums[lane], lost[lane], loaded[lane]);
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = settled(sums[lane], lost[lane]);
#pragma unroll
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma unroll
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    cell_sums[entry] = sums[0];
  }
}

template <typename Acc>
cudaError_t launch_merge(int64_t entries, int64_t chunks, const Queue& queue, void* cell_sums) {
  constexpr int64_t kLaneChunks = 8;  // of many, for a thread
  constexpr int64_t kManyThreads = 128;
  Acc* sums = static_cast<Acc*>(cell_sums);
  const int lanes = static_cast<int>(largest_power_of_two(std::clamp<int64_t>(
      chunks / kLaneChunks, std::min<int64_t>(chunks, kLaneChunks), kMergeThreads)));
  if (entries >= queue.processors * kManyThreads && lanes <= kMostOwnLanes) {
    const auto many = [&](auto kernel) {
      return launch(kernel, ceil_div(entries, kManyThreads), kManyThreads, 0, queue.stream,
                    queue.overlaps, sums, entries, chunks);
    };
    if (lanes == 8) return many(&merge_many_kernel<8, Acc>);
    if (lanes == 4) return many(&merge_many_kernel<4, Acc>);
    if (lanes == 2) return many(&merge_many_kernel<2, Acc>);
  }
  return launch(&merge_kernel<Acc>, ceil_div(entries, kMergeThreads / lanes), kMergeThreads, 0,
                queue.stream, queue.overlaps, sums, entries, chunks, lanes);
}

}  // namespace convt_reduce::cuda
