// Combine turns cell sums into results; tap sums turns them into what backward keeps.
//
// A block of combine has one output channel and up to kBatchTile batch elements. Its result is a
// product of length depth = (input channels of the group) * cells. Each thread owns every
// blockDim-th term: it folds that term's weight once, into a register, and meets the cell sums of
// all its batch elements with it, so the order of additions depends on neither the batch size nor
// its split. Folding touches only the weights, so it runs while stats still reads; the wait comes
// after it.
#include <cmath>

#include "cuda/device.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kBatchTile = 16;
constexpr int kMostThreads = 256;

struct CombineArguments {
  Cells cells;
  Weight weight;
  Bias bias;
  int64_t batch;
  int64_t c_in;
  int64_t c_out;
  int64_t group_in;
  int64_t group_out;
  int64_t planes;
  int64_t chunks;
  int64_t blocks;
  double scale;  // 1 / (positions of the output)
  double multiplier;
};

// Calls use(weight) for each tap that covers the cell, in order.
template <typename T, typename Use>
__device__ inline void for_taps_of_cell(const CombineArguments& p, const T* w, int64_t cell,
                                        Use&& use) {
  const CellBands bands = bands_of(p.cells, cell);
  const Band& band0 = p.cells.axis[0].band(bands.b[0]);
  const Band& band1 = p.cells.axis[1].band(bands.b[1]);
  const Band& band2 = p.cells.axis[2].band(bands.b[2]);
  for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
    for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
      const T* row = w + t0 * p.weight.stride[0] + t1 * p.weight.stride[1];
      for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
        use(widen(row[t2 * p.weight.stride[2]]));
      }
    }
  }
}

template <typename Acc>
__device__ inline Acc cell_sum(const CombineArguments& p, const Acc* cell_sums, int64_t index) {
  const int64_t chunk_stride = p.planes * p.cells.count();
  Acc sum = cell_sums[index];
  for (int64_t chunk = 1; chunk < p.chunks; ++chunk) sum += cell_sums[index + chunk * chunk_stride];
  return sum;
}

// Adds `values` over the block, in a fixed order; every thread gets the totals through `totals`.
template <int kCount, typename Acc>
__device__ inline void block_sums(Acc (&values)[kCount], Acc (*warp_sums)[kBatchTile],
                                  Acc* totals) {
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

template <typename T>
__global__ void combine_kernel(const __grid_constant__ CombineArguments p,
                               const AccumulateOf<T>* cell_sums, T* y) {
  using Acc = AccumulateOf<T>;
  __shared__ Acc warp_sums[kMostThreads / kWarp][kBatchTile];
  __shared__ Acc totals[kBatchTile];
  const int64_t cells = p.cells.count();
  const int64_t depth = p.group_in * cells;
  const int64_t batch_tiles = ceil_div(p.batch, kBatchTile);
  const Acc scale = static_cast<Acc>(p.scale);
  bool waited = false;

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    const int64_t o = block / batch_tiles;
    const int64_t n_begin = block % batch_tiles * kBatchTile;
    const int n_count = static_cast<int>(min(p.batch - n_begin, int64_t{kBatchTile}));
    const int64_t c_begin = o / p.group_out * p.group_in;
    const T* w = static_cast<const T*>(p.weight.data) + c_begin * p.weight.stride_c_in +
                 o % p.group_out * p.weight.stride_c_out;
    const int64_t sums_begin = (n_begin * p.c_in + c_begin) * cells;
    const int64_t sums_stride = p.c_in * cells;  // from one batch element to the next

    Acc values[kBatchTile] = {};
    for (int64_t term = threadIdx.x; term < depth; term += blockDim.x) {
      Acc folded = 0;
      for_taps_of_cell(p, w + term / cells * p.weight.stride_c_in, term % cells,
                       [&](Acc weight) { folded += weight; });
      folded *= scale;
      if (!waited) wait_for_previous_kernel();
      waited = true;
#pragma unroll
      for (int i = 0; i < kBatchTile; ++i) {
        if (i < n_count) {
          values[i] += folded * cell_sum(p, cell_sums, sums_begin + i * sums_stride + term);
        }
      }
    }
    block_sums(values, warp_sums, totals);

    // Folding adds weights before they meet a cell sum, and so would turn inf*1 + inf*(-1), a NaN
    // in the convolution, into inf*0.5 or the like: where a total is not finite, tap by tap
    // decides.
    for (int i = 0; i < n_count; ++i) {
      if (isfinite(totals[i])) continue;  // the same for the whole block
      __syncthreads();
      Acc careful[1] = {};
      for (int64_t term = threadIdx.x; term < depth; term += blockDim.x) {
        const Acc sum = cell_sum(p, cell_sums, sums_begin + i * sums_stride + term);
        for_taps_of_cell(p, w + term / cells * p.weight.stride_c_in, term % cells,
                         [&](Acc weight) { careful[0] += weight * scale * sum; });
      }
      block_sums(careful, warp_sums, totals + i);
    }

    if (threadIdx.x < n_count) {
      const Acc b = p.bias.data == nullptr
                        ? Acc(0)
                        : Acc(widen(static_cast<const T*>(p.bias.data)[o * p.bias.stride]));
      y[(n_begin + threadIdx.x) * p.c_out + o] =
          narrow<T>(static_cast<Acc>(p.multiplier) * (totals[threadIdx.x] + b));
    }
    __syncthreads();
  }
  // A kernel that ended without a wait could be taken for finished before stats is.
  if (!waited) wait_for_previous_kernel();
}

struct TapSumsArguments {
  Cells cells;
  int64_t planes;
  int64_t chunks;
  int64_t taps;
};

template <typename Acc>
__global__ void tap_sums_kernel(const __grid_constant__ TapSumsArguments p, const Acc* cell_sums,
                                Acc* tap_sums) {
  const int64_t cells = p.cells.count();
  const int64_t total = p.planes * p.taps;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x) {
    int64_t tap = i % p.taps;
    Range bands[kAxes];
    for (int a = kAxes - 1; a >= 0; --a) {
      const AxisCells& axis = p.cells.axis[a];
      const Range run = run_of_tap(axis.axis, tap % axis.axis.kernel);
      tap /= axis.axis.kernel;
      bands[a].begin = run.empty() ? 0 : axis.band_of(run.begin);
      bands[a].end = run.empty() ? 0 : axis.band_of(run.end - 1) + 1;
    }
    Acc sum = 0;
    for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
      const Acc* from = cell_sums + (chunk * p.planes + i / p.taps) * cells;
      for (int64_t b0 = bands[0].begin; b0 < bands[0].end; ++b0) {
        for (int64_t b1 = bands[1].begin; b1 < bands[1].end; ++b1) {
          for (int64_t b2 = bands[2].begin; b2 < bands[2].end; ++b2) {
            sum += from[p.cells.index(b0, b1, b2)];
          }
        }
      }
    }
    tap_sums[i] = sum;
  }
}

}  // namespace

cudaError_t launch_combine(const Problem& problem, const Cells& cells, const Weight& weight,
                           const Bias& bias, Dtype dtype, int64_t chunks, const Queue& queue,
                           const void* cell_sums, void* y) {
  if (problem.batch == 0) return cudaSuccess;
  CombineArguments p;
  p.cells = cells;
  p.weight = weight;
  p.bias = bias;
  p.batch = problem.batch;
  p.c_in = problem.c_in;
  p.c_out = problem.c_out;
  p.group_in = problem.c_in / problem.groups;
  p.group_out = problem.c_out / problem.groups;
  p.planes = problem.planes();
  p.chunks = chunks;
  p.blocks = problem.c_out * ceil_div(problem.batch, kBatchTile);
  p.scale = problem.mean_scale();
  p.multiplier = problem.multiplier;
  const int64_t depth = p.group_in * cells.count();
  const int threads =
      static_cast<int>(depth < kMostThreads ? round_up(depth, kWarp) : kMostThreads);
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    return launch(&combine_kernel<T>, p.blocks, threads, 0, queue.stream, queue.overlaps, p,
                  static_cast<const AccumulateOf<T>*>(cell_sums), static_cast<T*>(y));
  });
}

cudaError_t launch_tap_sums(const Problem& problem, const Cells& cells, Dtype dtype, int64_t chunks,
                            const Queue& queue, const void* cell_sums, void* tap_sums) {
  constexpr int kThreads = 256;
  if (problem.planes() == 0) return cudaSuccess;
  TapSumsArguments p;
  p.cells = cells;
  p.planes = problem.planes();
  p.chunks = chunks;
  p.taps = problem.taps();
  const int64_t blocks = ceil_div(p.planes * p.taps, kThreads);
  const auto run = [&](auto accumulate) {
    using Acc = decltype(accumulate);
    return launch(&tap_sums_kernel<Acc>, blocks, kThreads, 0, queue.stream, false, p,
                  static_cast<const Acc*>(cell_sums), static_cast<Acc*>(tap_sums));
  };
  return dtype == Dtype::kFloat64 ? run(double{}) : run(float{});
}

}  // namespace convt_reduce::cuda
