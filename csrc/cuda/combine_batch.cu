// Combine for large batches and for large weights: a matrix product of the cell sums with weights
// that are folded once.
//
//   fold      folded weights, while stats still reads: combine_fold.cu
//   multiply  a block has a tile of batch elements by output channels, and one slice of the depth,
//             so that few results still fill the GPU; one slice: y, several: parts
//   finish    adds parts [slices][batch][c_out] in order
//
// combine_tensor.cuh multiplies on tensor cores;
// combine_plain.cuh does both for float64 and for GPUs that lack them.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/combine.cuh"
#include "cuda/combine_fold.cuh"
#include "cuda/combine_plain.cuh"
#include "cuda/combine_tensor.cuh"

namespace convt_reduce::cuda {

// A thread's means that came out not finite, again. Not in the anonymous namespace, like
// careful_mean.
template <int kCount, typename T>
__device__ __noinline__ void finish_carefully(const CombineArguments& p, int64_t slices,
                                              int64_t begin, int64_t step,
                                              const AccumulateOf<T>* cell_sums,
                                              const AccumulateOf<T>* parts, T* y) {
  const int64_t total = p.batch * p.c_out;
  for (int64_t first = begin; first < total; first += step) {
    for (int64_t i = first; i < first + kCount; ++i) {
      AccumulateOf<T> mean = 0;
      for (int64_t slice = 0; slice < slices; ++slice) mean += parts[slice * total + i];
      if (isfinite(mean)) continue;
      const int64_t n = quotient(i, p.c_out);
      const int64_t o = i - n * p.c_out;
      y[i] = result<T>(p, careful_mean<T>(p, n, o, cell_sums), bias_of<T>(p, o));
    }
  }
}

namespace {

constexpr int kFinishThreads = 128;
constexpr int kFinishLoads = 4;  // of a thread at a time

// A thread has kCount neighbouring results, of which c_out is a multiple.
template <int kCount, typename T>
__global__ void __launch_bounds__(kFinishThreads, 8)
    finish_kernel(const __grid_constant__ CombineArguments p, int64_t slices,
                  const AccumulateOf<T>* cell_sums, const AccumulateOf<T>* parts, T* y) {
  using Acc = AccumulateOf<T>;
  struct alignas(kCount * sizeof(Acc)) Parts {
    Acc at[kCount];
  };
  struct alignas(kCount * sizeof(T)) Results {
    T at[kCount];
  };
  let_next_kernel_start();  // stats has waited for all that came before us
  wait_for_previous_kernel();
  const int64_t total = p.batch * p.c_out;
  const int64_t begin = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) * kCount;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kCount;
  bool rare = false;
  for (int64_t i = begin; i < total; i += step) {
    const int64_t o = i - quotient(i, p.c_out) * p.c_out;
    Acc bias[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) bias[e] = bias_of<T>(p, o + e);
    Acc means[kCount] = {};
    Acc lost[kCount] = {};
    for (int64_t slice = 0; slice < slices; slice += kFinishLoads) {
      const int left = static_cast<int>(min(slices - slice, int64_t{kFinishLoads}));
      Parts loaded[kFinishLoads];
#pragma unroll
      for (int j = 0; j < kFinishLoads; ++j) {
        loaded[j] = {};
        if (j < left) loaded[j] = *reinterpret_cast<const Parts*>(parts + (slice + j) * total + i);
      }
#pragma unroll
      for (int j = 0; j < kFinishLoads; ++j) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) add_exactly(means[e], lost[e], loaded[j].at[e]);
      }
    }
    Results results;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      means[e] = settled(means[e], lost[e]);
      rare |= !isfinite(means[e]);
      results.at[e] = result<T>(p, means[e], bias[e]);
    }
    *reinterpret_cast<Results*>(y + i) = results;
  }
  if (rare) finish_carefully<kCount, T>(p, slices, begin, step, cell_sums, parts, y);
}

template <typename T>
cudaError_t launch_finish(const CombineArguments& p, int64_t slices, const Queue& queue,
                          const AccumulateOf<T>* cell_sums, const AccumulateOf<T>* parts, T* y) {
  constexpr int kMost = Vector<AccumulateOf<T>>::kSize;
  const auto run = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    return launch(&finish_kernel<kCount, T>, ceil_div(p.batch * p.c_out, kCount * kFinishThreads),
                  kFinishThreads, 0, queue.stream, queue.overlaps, p, slices, cell_sums, parts, y);
  };
  if (p.c_out % kMost == 0) return run(std::integral_constant<int, kMost>{});
  return run(std::integral_constant<int, 1>{});
}

// ---- on tensor cores ----------------------------------------------------------------------------

using NarrowTile = TensorTile<4, 1, 2, 3>;
using MiddleTile = TensorTile<4, 4, 1, 4>;
using WideTile = TensorTile<4, 8, 1, 3>;
using LowTile = TensorTile<1, 8, 1, 3>;  // for few batch elements

// Terms of a slice: no fewer, so that parts stay small beside the operands; no more, unless the
// tile keeps totals, so that sums stay accurate; and between them as many as give about so many
// blocks: three or four for each processor of the GPU that this was measured on.
constexpr int64_t kLeastSlice = 128;
constexpr int64_t kMostSlice = 512;
constexpr int64_t kWantedBlocks = 384;
constexpr int64_t kWantedNarrowBlocks = 512;
constexpr int64_t kFewBlocks = 132;  // with fewer, even of the least slices, tiles are smaller

bool is_narrow(int64_t group_out) { return group_out <= NarrowTile::kColumns; }

int64_t steps_of(int64_t depth) { return round_up(depth, kMostStage) / kStep; }

template <typename Tile>
TensorTiles plan_tensor(int64_t batch, int64_t groups, int64_t group_out, int64_t depth) {
  TensorTiles tiles;
  tiles.batch = ceil_div(batch, Tile::kRows);
  tiles.out = ceil_div(group_out, Tile::kColumns);
  const int64_t whole = groups * tiles.batch * tiles.out;  // blocks, if there were no slices
  // The same for a batch of one, whatever the tile: so that an element's bits are those that it has
  // alone.
  const bool narrow = is_narrow(group_out);
  const int64_t of_alone =
      groups * ceil_div(group_out, narrow ? NarrowTile::kColumns : WideTile::kColumns);
  const int64_t wanted = ceil_div(narrow ? kWantedNarrowBlocks : kWantedBlocks,
                                  batch <= kLargeBatch ? of_alone : whole);
  const int64_t most = Tile::kTotals ? depth : kMostSlice;
  const int64_t slice = std::max(std::min(ceil_div(depth, wanted), most), kLeastSlice);
  tiles.slice = round_up(std::min(slice, depth), kMostStage);
  tiles.slices = ceil_div(depth, tiles.slice);
  tiles.blocks = whole * tiles.slices;
  tiles.steps = steps_of(depth);
  tiles.columns8 = ceil_div(group_out, kColumns8);
  tiles.aligned = depth % 4 == 0;
  return tiles;
}

// Calls use(tile, tiles) with the tile for the sizes.
template <typename Use>
auto with_tile(int64_t batch, int64_t groups, int64_t group_out, int64_t depth, Use&& use) {
  const auto with = [&](auto tile) {
    return use(tile, plan_tensor<decltype(tile)>(batch, groups, group_out, depth));
  };
  if (is_narrow(group_out)) return with(NarrowTile{});
  if (group_out <= MiddleTile::kColumns) return with(MiddleTile{});
  if (batch <= LowTile::kRows) return with(LowTile{});
  const int64_t wide_blocks = groups * ceil_div(batch, WideTile::kRows) *
                              ceil_div(group_out, WideTile::kColumns) *
                              ceil_div(depth, kLeastSlice);
  return wide_blocks < kFewBlocks ? with(MiddleTile{}) : with(WideTile{});
}

int64_t folded_fragments(const TensorTiles& tiles, int64_t groups) {
  return groups * tiles.steps * tiles.columns8;
}

template <typename T>
cudaError_t launch_tensor(const CombineArguments& p, Dtype dtype, const Queue& queue,
                          const float* cell_sums, bool is_folded, Fragment* folded, T* y) {
  const int64_t groups = p.c_out / p.group_out;
  return with_tile(p.batch, groups, p.group_out, p.depth, [&](auto tile, const TensorTiles& tiles) {
    using Tile = decltype(tile);
    float* parts = reinterpret_cast<float*>(folded + folded_fragments(tiles, groups));
    cudaError_t error = cudaSuccess;
    if (!is_folded) {
      error = launch_fold(p, dtype, tiles.steps, tiles.columns8, false, queue, folded);
    }
    if (error != cudaSuccess) return error;
    error =
        launch(&tensor_kernel<Tile, T>, tiles.blocks, Tile::kThreads, 0, queue.stream,
               queue.overlaps, p, tiles, cell_sums, static_cast<const Fragment*>(folded), parts, y);
    if (error != cudaSuccess || tiles.slices == 1) return error;
    return launch_finish<T>(p, tiles.slices, queue, cell_sums, parts, y);
  });
}

template <typename T>
cudaError_t launch_plain(const CombineArguments& p, const Queue& queue,
                         const AccumulateOf<T>* cell_sums, AccumulateOf<T>* folded, T* y) {
  using Acc = AccumulateOf<T>;
  const plain::Tiles tiles = plain::plan(p.batch, p.c_out / p.group_out, p.group_out, p.depth);
  Acc* parts = folded + round_up(p.c_out * p.depth, Vector<Acc>::kSize);
  cudaError_t error =
      launch(&plain::fold_kernel<T>, ceil_div(p.c_out * p.group_in, plain::kFoldThreads),
             plain::kFoldThreads, 0, queue.stream, queue.overlaps, p, folded);
  if (error != cudaSuccess) return error;
  error = launch(&plain::multiply_kernel<T>, tiles.blocks, plain::kThreads, 0, queue.stream,
                 queue.overlaps, p, tiles, cell_sums, static_cast<const Acc*>(folded), parts, y);
  if (error != cudaSuccess || tiles.slices == 1) return error;
  return launch_finish<T>(p, tiles.slices, queue, cell_sums, parts, y);
}

}  // namespace

int64_t combine_batch_scratch(const Problem& problem, const Cells& cells, Dtype dtype,
                              const Queue& queue) {
  const int64_t groups = problem.groups;
  const int64_t group_out = problem.c_out / groups;
  const int64_t depth = problem.c_in / groups * cells.count();
  const auto parts = [&](int64_t slices) {
    return slices == 1 ? 0 : slices * problem.batch * problem.c_out;
  };
  if (dtype != Dtype::kFloat64 && queue.tensor_cores) {
    return with_tile(problem.batch, groups, group_out, depth, [&](auto, const TensorTiles& tiles) {
      constexpr int64_t kFloats = sizeof(Fragment) / sizeof(float);
      return folded_fragments(tiles, groups) * kFloats + parts(tiles.slices);
    });
  }
  const plain::Tiles tiles = plain::plan(problem.batch, groups, group_out, depth);
  return round_up(problem.c_out * depth, kVectorBytes / 4) + parts(tiles.slices);
}

int64_t combine_batch_steps(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue) {
  if (dtype == Dtype::kFloat64 || !queue.tensor_cores) return 0;
  return steps_of(problem.c_in / problem.groups * cells.count());
}

cudaError_t launch_combine_batch(const CombineArguments& p, Dtype dtype, const Queue& queue,
                                 const void* cell_sums, bool is_folded, void* scratch, void* y) {
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    using Acc = AccumulateOf<T>;
    const Acc* sums = static_cast<const Acc*>(cell_sums);
    if constexpr (std::is_same_v<Acc, float>) {
      if (queue.tensor_cores) {
        return launch_tensor<T>(p, dtype, queue, sums, is_folded, static_cast<Fragment*>(scratch),
                                static_cast<T*>(y));
      }
    }
    return launch_plain<T>(p, queue, sums, static_cast<Acc*>(scratch), static_cast<T*>(y));
  });
}

}  // namespace convt_reduce::cuda
