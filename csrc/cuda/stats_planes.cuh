// Stats for inputs whose planes are contiguous: one pass of 16-byte loads.
//
// A thread adds whole vectors into one sum per slot until its run ends. What a run gave goes to the
// thread's own places in shared memory, one per cell; at the end those are added across threads in
// a fixed order. planes.cuh says who reads what.
#pragma once

#include "cuda/planes.cuh"

namespace convt_reduce::cuda {

constexpr int kManyLoads = 16;  // independent 16-byte loads in flight per thread
constexpr int kFewLoads = 4;    // on the way to a run's end

template <int kLoads, int kAlignment, typename T, typename Index, typename Acc>
__device__ inline void add_vectors(const T* from, Index step, Acc (&sums)[Vector<T>::kSize]) {
  Vector<T> vectors[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) vectors[u] = load_vector<kAlignment>(from + u * step);
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize; ++j) sums[j] += widen(vectors[u].at[j]);
  }
}

// Moves the slots' sums to the thread's places in shared memory.
template <bool kColumns, int kSize, typename Acc>
__device__ inline void put_down(Acc (&sums)[kSize], const int (&column_band)[kSize], int cell,
                                Acc* mine) {
  if (kColumns) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) mine[(cell + column_band[j]) * blockDim.x] += sums[j];
  } else {
    Acc sum = sums[0];
#pragma unroll
    for (int j = 1; j < kSize; ++j) sum += sums[j];
    mine[cell * blockDim.x] += sum;
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) sums[j] = 0;
}

// One vector that a run's end or the plane's end may cut. Leaves `run` at the run of the
// vector's last element.
template <int kAlignment, bool kColumns, typename T, typename Index, typename Acc>
__device__ inline void add_cut_vector(const PlanesShape<Index>& p, const T* plane,
                                      const Share<kColumns, T, Index>& share, Run<Index>& run,
                                      Acc (&sums)[Vector<T>::kSize], Acc* mine) {
  constexpr int kSize = Vector<T>::kSize;
  const Index position = share.position;
  Acc values[kSize];
  if (share.whole(1, p.positions)) {
    const Vector<T> vector = load_vector<kAlignment>(plane + position);
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = widen(vector.at[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const Index at = position + j;
      values[j] = at < p.positions ? widen(plane[at]) : Acc(0);
    }
  }
  const Index end = position + kSize < p.positions ? position + kSize : p.positions;
  Index from = position;
  while (from < end) {
    if (from >= run.end) {
      put_down<kColumns>(sums, share.column_band, run.cell, mine);
      run = run_at<kColumns>(p, from);
    }
    const Index to = run.end < end ? run.end : end;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (position + j >= from && position + j < to) sums[j] += values[j];
    }
    from = to;
  }
}

template <int kAlignment, bool kColumns, typename T, typename Index, typename Acc>
__device__ inline void add_chunk(const PlanesShape<Index>& p, const T* plane, int64_t chunk,
                                 int lane, Acc* mine) {
  constexpr int kSize = Vector<T>::kSize;
  Share<kColumns, T, Index> share(p, 0, chunk, lane);
  if (share.position >= share.end) return;
  Acc sums[kSize] = {};
  Run<Index> run = run_at<kColumns>(p, share.position);
  while (share.position < share.end) {
    const Index whole_end = run.end < share.end ? run.end : share.end;
    if (share.whole(kManyLoads, whole_end)) {
      add_vectors<kManyLoads, kAlignment>(plane + share.position, share.step, sums);
      share.position += kManyLoads * share.step;
    } else if (share.whole(kFewLoads, whole_end)) {
      add_vectors<kFewLoads, kAlignment>(plane + share.position, share.step, sums);
      share.position += kFewLoads * share.step;
    } else {
      add_cut_vector<kAlignment>(p, plane, share, run, sums, mine);
      share.position += share.step;
    }
  }
  put_down<kColumns>(sums, share.column_band, run.cell, mine);
}

template <int kAlignment, bool kColumns, typename T, typename Index>
__global__ void stats_planes_kernel(const __grid_constant__ PlanesShape<Index> p,
                                    const __grid_constant__ Input input, int64_t channels,
                                    int reduce_width, uint64_t covered,
                                    AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* places = reinterpret_cast<Acc*>(shared);  // [cells][threads]
  let_next_kernel_start();
  const int cells = static_cast<int>(p.cells);
  const int group = threadIdx.x / p.lanes;
  const int lane = threadIdx.x % p.lanes;
  const int adders = blockDim.x / reduce_width;
  const int64_t items = p.planes * p.chunks;

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    for (int cell = 0; cell < cells; ++cell) places[cell * blockDim.x + threadIdx.x] = 0;
    const int64_t item = block * p.groups + group;
    if (group < p.groups && item < items) {
      const int64_t plane = quotient(item, p.chunks);
      const int64_t n = quotient(plane, channels);
      const T* from = static_cast<const T*>(input.data) + n * input.stride_n +
                      (plane - n * channels) * input.stride_c;
      add_chunk<kAlignment, kColumns, T, Index>(p, from, item - plane * p.chunks, lane,
                                                places + threadIdx.x);
    }
    __syncthreads();

    // Every thread takes the same number of turns, since the shuffles need whole warps.
    for (int first = 0; first < p.groups * cells; first += adders) {
      const int task = first + threadIdx.x / reduce_width;
      const int task_group = task / cells;
      const int cell = task - task_group * cells;
      const int64_t task_item = block * p.groups + task_group;
      const bool real = task_group < p.groups && task_item < items;
      Acc sum = 0;
      if (real) {
        const Acc* from = places + cell * blockDim.x + task_group * p.lanes;
        for (int i = threadIdx.x % reduce_width; i < p.lanes; i += reduce_width) sum += from[i];
      }
      for (int half = reduce_width / 2; half > 0; half /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, half, reduce_width);
      }
      if (real && threadIdx.x % reduce_width == 0) {
        const int64_t plane = quotient(task_item, p.chunks);
        const int64_t row = (task_item - plane * p.chunks) * p.planes + plane;
        cell_sums[row * cells + cell] = (covered >> cell) & 1 ? sum : Acc(0);
      }
    }
    __syncthreads();
  }
}

}  // namespace convt_reduce::cuda
