// Adds the chunks of planes that stats read in several. Where they are few, combine_split.cu does
// it on the way.
#include <algorithm>

#include "cuda/device.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kMergeThreads = 256;
constexpr int kLeastLanes = 8;  // of many chunks

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
    if (entry < entries && lanes == 1) {
      sum = sum_of_few(cell_sums + entry, entries, static_cast<int>(chunks));
    } else if (entry < entries) {
      Acc lost = 0;
#pragma unroll 8
      for (int64_t chunk = lane; chunk < chunks; chunk += lanes) {
        add_exactly(sum, lost, cell_sums[chunk * entries + entry]);
      }
      sum = settled(sum, lost);
    }
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
template <typename Acc>
__global__ void __launch_bounds__(kMergeThreads)
    merge_many_kernel(Acc* cell_sums, int64_t entries, int64_t chunks) {
  let_next_kernel_start();  // stats has waited for all that came before us
  wait_for_previous_kernel();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; entry < entries;
       entry += step) {
    Acc sums[kLeastLanes] = {};
    Acc lost[kLeastLanes] = {};
    const Acc* from = cell_sums + entry;
#pragma unroll 1
    for (int64_t chunk = 0; chunk < chunks; chunk += kLeastLanes) {
      Acc loaded[kLeastLanes];
#pragma unroll
      for (int lane = 0; lane < kLeastLanes; ++lane) {
        loaded[lane] = chunk + lane < chunks ? from[(chunk + lane) * entries] : Acc(0);
      }
#pragma unroll
      for (int lane = 0; lane < kLeastLanes; ++lane) {
        add_exactly(sums[lane], lost[lane], loaded[lane]);
      }
    }
#pragma unroll
    for (int lane = 0; lane < kLeastLanes; ++lane) sums[lane] = settled(sums[lane], lost[lane]);
#pragma unroll
    for (int half = kLeastLanes / 2; half > 0; half /= 2) {
#pragma unroll
      for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    cell_sums[entry] = sums[0];
  }
}

template <typename Acc>
cudaError_t merge(int64_t entries, int64_t chunks, const Queue& queue, void* cell_sums) {
  constexpr int64_t kLaneChunks = 8;  // of many, for a thread
  constexpr int kManyThreads = 128;
  Acc* sums = static_cast<Acc*>(cell_sums);
  // Few chunks have one lane, since combine may have to add them too.
  const int lanes = chunks <= kMostMergedChunks
                        ? 1
                        : static_cast<int>(largest_power_of_two(std::clamp<int64_t>(
                              chunks / kLaneChunks, kLeastLanes, kMergeThreads)));
  if (lanes == kLeastLanes && entries >= queue.processors * int64_t{kManyThreads}) {
    return launch(&merge_many_kernel<Acc>, ceil_div(entries, kManyThreads), kManyThreads, 0,
                  queue.stream, queue.overlaps, sums, entries, chunks);
  }
  return launch(&merge_kernel<Acc>, ceil_div(entries, kMergeThreads / lanes), kMergeThreads, 0,
                queue.stream, queue.overlaps, sums, entries, chunks, lanes);
}

}  // namespace

cudaError_t launch_merge(const Problem& problem, const Cells& cells, Dtype dtype, int64_t chunks,
                         const Queue& queue, void* cell_sums) {
  const int64_t entries = problem.planes() * cells.count();
  if (entries == 0) return cudaSuccess;
  return dtype == Dtype::kFloat64 ? merge<double>(entries, chunks, queue, cell_sums)
                                  : merge<float>(entries, chunks, queue, cell_sums);
}

}  // namespace convt_reduce::cuda
