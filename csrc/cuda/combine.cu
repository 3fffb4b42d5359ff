// Combine turns cell sums into results; tap sums turns them into what backward keeps.
//
// A block of combine has one output channel and up to kTile batch elements. Each thread owns every
// blockDim-th term of the channel's product: it folds that term's weight once, into a register, and
// meets the cell sums of all its batch elements with it, so the order of additions does not depend
// on the batch size. Folding touches only the weights, so it runs while stats still reads; the wait
// comes after it. This is for float64 and for what tensor cores do not take as it lies: where they
// do, combine_split.cu comes first. Large batches and large weights go to combine_batch.cu.
#include <algorithm>
#include <cmath>

#include "cuda/combine_fold.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kMostTile = 32;
constexpr int kMostThreads = 256;
// Above so many folded weights, or above kLargeBatch, weights are folded once for all, in
// combine_batch.cu. Folding is slow where each of many cells has many taps.
constexpr int64_t kLargeFold = int64_t{1} << 19;
constexpr int64_t kLargeFoldOfManyCells = int64_t{1} << 16;
constexpr int64_t kManyCells = 16;  // more than these
// Of stats: blocks that fold, and bytes of input for each of them, at least, and for each of its
// taps. With less to read, a kernel that folds is done as soon as stats.
constexpr int64_t kMostBesideBlocks = 256;
constexpr int64_t kLeastBesideBytes = 256 * 1024;
constexpr int64_t kBesideTapBytes = 12 * 1024;
constexpr int64_t kDeep = 2048;  // terms, above which tensor cores in slices are faster

// Adds `values` over the block, in a fixed order; every thread gets the totals through `totals`.
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

template <int kTile, typename T>
__global__ void combine_kernel(const __grid_constant__ CombineArguments p,
                               const AccumulateOf<T>* cell_sums, T* y) {
  using Acc = AccumulateOf<T>;
  __shared__ Acc warp_sums[kMostThreads / kWarp][kTile];
  __shared__ Acc totals[kTile];
  const int64_t sums_stride = p.c_in * p.cells.count();  // from one batch element to the next
  const int64_t batch_tiles = ceil_div(p.batch, kTile);
  bool waited = false;

  for (int64_t block = blockIdx.x; block < p.c_out * batch_tiles; block += gridDim.x) {
    const int64_t o = quotient(block, batch_tiles);
    const int64_t n_begin = (block - o * batch_tiles) * kTile;
    const int n_count = static_cast<int>(min(p.batch - n_begin, int64_t{kTile}));
    const Channel channel(p, o);
    const int64_t sums_begin = (n_begin * p.c_in + channel.c_begin) * p.cells.count();

    const Acc bias = bias_of<T>(p, o);
    Acc values[kTile] = {};
    for (int64_t term = threadIdx.x; term < p.depth; term += blockDim.x) {
      const Acc folded = folded_weight<T>(p, channel, term);
      if (!waited) {
        wait_for_previous_kernel();
        let_next_kernel_start();
      }
      waited = true;
      // All loads before the first use, so that they are answered together.
      const Acc* from = cell_sums + sums_begin + term;
      Acc sums[kTile];
#pragma unroll
      for (int i = 0; i < kTile; ++i) sums[i] = i < n_count ? from[i * sums_stride] : Acc(0);
#pragma unroll
      for (int i = 0; i < kTile; ++i) values[i] += folded * sums[i];
    }
    block_sums(values, warp_sums, totals);

    for (int i = 0; i < n_count; ++i) {
      if (isfinite(totals[i])) continue;  // the same for the whole block
      __syncthreads();
      Acc careful[1] = {};
      for (int64_t term = threadIdx.x; term < p.depth; term += blockDim.x) {
        const Acc sum = cell_sums[sums_begin + i * sums_stride + term];
        careful[0] += careful_term<T>(p, channel, term, sum);
      }
      block_sums(careful, warp_sums, totals + i);
    }
    if (threadIdx.x < n_count) {
      y[(n_begin + threadIdx.x) * p.c_out + o] = result<T>(p, totals[threadIdx.x], bias);
    }
    __syncthreads();
  }
  // A kernel that ended without a wait could be taken for finished before stats is.
  if (!waited) wait_for_previous_kernel();
}

struct TapSumsArguments {
  Cells cells;
  int64_t planes;
  int64_t taps;
};

template <typename Acc>
__global__ void tap_sums_kernel(const __grid_constant__ TapSumsArguments p, const Acc* cell_sums,
                                Acc* tap_sums) {
  const int64_t cells = p.cells.count();
  const int64_t total = p.planes * p.taps;
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t plane = quotient(i, p.taps);
    int64_t tap = i - plane * p.taps;
    Range bands[kAxes];
    for (int a = kAxes - 1; a >= 0; --a) {
      const AxisCells& axis = p.cells.axis[a];
      const int64_t rest = quotient(tap, axis.axis.kernel);
      const Range run = run_of_tap(axis.axis, tap - rest * axis.axis.kernel);
      tap = rest;
      bands[a].begin = run.empty() ? 0 : axis.band_of(run.begin);
      bands[a].end = run.empty() ? 0 : axis.band_of(run.end - 1) + 1;
    }
    Acc sum = 0;
    const Acc* from = cell_sums + plane * cells;
    for (int64_t b0 = bands[0].begin; b0 < bands[0].end; ++b0) {
      for (int64_t b1 = bands[1].begin; b1 < bands[1].end; ++b1) {
        for (int64_t b2 = bands[2].begin; b2 < bands[2].end; ++b2) {
          sum += from[p.cells.index(b0, b1, b2)];
        }
      }
    }
    tap_sums[i] = sum;
  }
}

bool folds_first(const Problem& problem, const Cells& cells, Dtype dtype, const Queue& queue) {
  const int64_t depth = problem.c_in / problem.groups * cells.count();
  const bool many = cells.count() > kManyCells;
  const bool fast = queue.tensor_cores && dtype != Dtype::kFloat64 && depth > kDeep;
  return problem.batch > kLargeBatch || fast ||
         depth * problem.c_out > (many ? kLargeFoldOfManyCells : kLargeFold);
}

}  // namespace

int64_t combine_scratch(const Problem& problem, const Cells& cells, Dtype dtype,
                        const Queue& queue) {
  if (problem.batch == 0) return 0;
  if (combine_splits(problem, cells, dtype, queue)) {
    return combine_split_scratch(problem, cells, dtype, queue);
  }
  if (!folds_first(problem, cells, dtype, queue)) return 0;
  return combine_batch_scratch(problem, cells, dtype, queue);
}

BesideFold plan_beside(const Problem& problem, const Cells& cells, const Weight& weight,
                       Dtype dtype, const StatsPlan& plan, const Queue& queue, void* scratch) {
  BesideFold fold;
  if (scratch == nullptr || plan.kind == StatsPlan::Kind::kSmall ||
      plan.kind == StatsPlan::Kind::kBoxes || !fits_covers(cells)) {
    return fold;
  }
  fold.steps = combine_splits(problem, cells, dtype, queue)
                   ? combine_split_steps(problem, cells, dtype, queue)
                   : combine_batch_steps(problem, cells, dtype, queue);
  if (fold.steps == 0) return fold;
  fold.weight = weight;
  fold.folded = scratch;
  fold.group_in = problem.c_in / problem.groups;
  fold.group_out = problem.c_out / problem.groups;
  fold.columns8 = ceil_div(fold.group_out, kColumns8);
  fold.chunks = ceil_div(fold.steps, cells.count());
  const int64_t blocks = problem.groups * fold.chunks * fold.columns8 * 2;
  const int64_t bytes = problem.planes() * problem.positions() * element_bytes(dtype);
  if (blocks > kMostBesideBlocks ||
      bytes < blocks * std::max(kLeastBesideBytes, problem.taps() * kBesideTapBytes)) {
    return fold;
  }
  fold.matrices = combine_takes_matrices(problem, cells, dtype, queue);
  fold.scale = static_cast<float>(problem.mean_scale());
  for (int a = 0; a < kAxes; ++a) {
    const AxisCells& axis = cells.axis[a];
    fold.taps[a] = static_cast<int>(axis.axis.kernel);
    fold.bands[a] = static_cast<int>(axis.bands);
    for (int64_t b = 0; b < axis.bands; ++b) {
      fold.tap_begin[a][b] = static_cast<unsigned char>(axis.band(b).tap_begin);
      fold.tap_end[a][b] = static_cast<unsigned char>(axis.band(b).tap_end);
    }
  }
  fold.blocks = static_cast<int>(blocks);
  return fold;
}

bool combine_merges(const Problem& problem, const Cells& cells, Dtype dtype, const Queue& queue,
                    int64_t chunks) {
  return problem.batch > 0 && combine_split_merges(problem, cells, dtype, queue, chunks);
}

cudaError_t launch_combine(const Problem& problem, const Cells& cells, const Weight& weight,
                           const Bias& bias, Dtype dtype, const Queue& queue, const void* cell_sums,
                           int64_t chunks, bool folded, void* scratch, void* y) {
  if (problem.batch == 0) return cudaSuccess;
  const CombineArguments p(problem, cells, weight, bias, chunks);
  if (combine_splits(problem, cells, dtype, queue)) {
    return launch_combine_split(p, dtype, queue, cell_sums, folded, scratch, y);
  }
  if (folds_first(problem, cells, dtype, queue)) {
    return launch_combine_batch(p, dtype, queue, cell_sums, folded, scratch, y);
  }
  const int threads =
      static_cast<int>(p.depth < kMostThreads ? round_up(p.depth, kWarp) : kMostThreads);
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const auto run = [&](auto tile) {
      constexpr int kTile = decltype(tile)::value;
      return launch(&combine_kernel<kTile, T>, p.c_out * ceil_div(p.batch, kTile), threads, 0,
                    queue.stream, queue.overlaps, p, static_cast<const AccumulateOf<T>*>(cell_sums),
                    static_cast<T*>(y));
    };
    // The tile changes no bits. Few output channels leave processors idle unless it is small.
    const auto fits = [&](int64_t smaller, int64_t tile) {
      return p.batch <= smaller || p.c_out * ceil_div(p.batch, tile) < queue.processors / 2;
    };
    if (fits(4, 16)) return run(std::integral_constant<int, 4>{});
    if (fits(16, kMostTile)) return run(std::integral_constant<int, 16>{});
    return run(std::integral_constant<int, kMostTile>{});
  });
}

cudaError_t launch_tap_sums(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue, const void* cell_sums, void* tap_sums) {
  constexpr int kThreads = 256;
  if (problem.planes() == 0) return cudaSuccess;
  TapSumsArguments p;
  p.cells = cells;
  p.planes = problem.planes();
  p.taps = problem.taps();
  const int64_t blocks = ceil_div(p.planes * p.taps, kThreads);
  const auto run = [&](auto accumulate) {
    using Acc = decltype(accumulate);
    return launch(&tap_sums_kernel<Acc>, blocks, kThreads, 0, queue.stream, queue.overlaps, p,
                  static_cast<const Acc*>(cell_sums), static_cast<Acc*>(tap_sums));
  };
  return dtype == Dtype::kFloat64 ? run(double{}) : run(float{});
}

}  // namespace convt_reduce::cuda
