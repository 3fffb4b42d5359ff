// Weights folded once for all batch elements, into the fragments that tensor cores take.
#include "cuda/combine_fold.cuh"

#include <algorithm>
#include <type_traits>

namespace convt_reduce::cuda {
namespace {

constexpr int64_t kFoldBlocks = 1024;  // about: all run at once

struct FoldTiles {
  int64_t steps;
  int64_t columns8;
  int64_t chunks;         // of 16 input channels, enough for all steps
  int64_t across;         // fragments side by side that a block makes
  int64_t column_blocks;  // columns8 / across, rounded up
  int64_t blocks;
  bool matrices;
};

template <int kTaps, bool kAhead, typename T>
__global__ void __launch_bounds__(kFoldThreads, kTaps <= 16 ? 8 : 4)
    fold_fragments_kernel(const __grid_constant__ CombineArguments p,
                          const __grid_constant__ FoldTiles tiles,
                          const __grid_constant__ Covers covers, Fragment* folded) {
  extern __shared__ float4 shared[];
  let_next_kernel_start();  // stats has waited for all that came before us
  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x) {
    const int64_t rest = quotient(block, tiles.column_blocks);
    const int64_t column_begin = (block - rest * tiles.column_blocks) * tiles.across;
    const int64_t across = min(tiles.across, tiles.columns8 - column_begin);
    const int64_t group = quotient(rest, tiles.chunks);
    const int64_t chunk = rest - group * tiles.chunks;
    Fragment* const to =
        folded + (group * tiles.steps + chunk * p.cells.count()) * tiles.columns8 + column_begin;
    fold_weights<kTaps, kAhead, T>(p, covers, BlockTeams{}, FoldLoads<kTaps>(p), group, chunk, 1,
                                   column_begin, static_cast<int>(across), tiles.steps,
                                   reinterpret_cast<float*>(shared), [&](int step, int column) {
                                     return EitherFragment{to + step * tiles.columns8 + column,
                                                           tiles.matrices};
                                   });
  }
  wait_for_previous_kernel();
}

// For any number of taps and cells: a warp per fragment.
template <typename T>
__global__ void __launch_bounds__(kFoldThreads)
    fold_any_fragments_kernel(const __grid_constant__ CombineArguments p, int64_t steps,
                              int64_t columns8, int64_t fragments, bool matrices,
                              Fragment* folded) {
  constexpr int kWarps = kFoldThreads / kWarp;
  let_next_kernel_start();
  const int lane = threadIdx.x % kWarp;
  for (int64_t i = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarp; i < fragments;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t rest = quotient(i, columns8);
    const int64_t group = quotient(rest, steps);
    const int64_t of_group = (i - rest * columns8) * kColumns8 + lane / 4;
    const int64_t term = (rest - group * steps) * kStep + lane % 4 * 4;
    float values[4] = {};
    if (of_group < p.group_out) {
      const Channel channel(p, group * p.group_out + of_group);
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        if (term + e < p.depth) values[e] = folded_weight<T>(p, channel, term + e);
      }
    }
    put_fragment({values[0], values[1], values[2], values[3]}, lane,
                 EitherFragment{folded + i, matrices});
  }
  wait_for_previous_kernel();
}

template <typename T>
cudaError_t launch_fold_of(const CombineArguments& p, int64_t steps, int64_t columns8,
                           bool matrices, const Queue& queue, Fragment* folded) {
  const int64_t groups = p.c_out / p.group_out;
  const int64_t cells = p.cells.count();
  const int64_t taps = taps_of(p.cells);
  if (!fits_covers(p.cells)) {
    const int64_t fragments = groups * steps * columns8;
    return launch(&fold_any_fragments_kernel<T>, ceil_div(fragments, kFoldThreads / kWarp),
                  kFoldThreads, 0, queue.stream, queue.overlaps, p, steps, columns8, fragments,
                  matrices, folded);
  }
  FoldTiles tiles;
  tiles.matrices = matrices;
  tiles.steps = steps;
  tiles.columns8 = columns8;
  tiles.chunks = ceil_div(steps, cells);
  tiles.across = std::clamp<int64_t>(groups * tiles.chunks * columns8 / kFoldBlocks, 1, columns8);
  tiles.column_blocks = ceil_div(columns8, tiles.across);
  tiles.blocks = groups * tiles.chunks * tiles.column_blocks;
  const auto run = [&](auto most, auto ahead) {
    constexpr int kTaps = decltype(most)::value;
    const size_t shared = sizeof(float) * fold_floats<kTaps>(static_cast<int>(cells));
    return launch(&fold_fragments_kernel<kTaps, decltype(ahead)::value, T>, tiles.blocks,
                  kFoldThreads, shared, queue.stream, queue.overlaps, p, tiles, covers_of(p),
                  folded);
  };
  // Loading ahead costs a block that folds once a little.
  const std::false_type no;
  const std::true_type yes;
  const std::integral_constant<int, 9> up_to_9;
  const std::integral_constant<int, 16> up_to_16;
  if (taps <= 9) return tiles.across > 1 ? run(up_to_9, yes) : run(up_to_9, no);
  if (taps <= 16) return tiles.across > 1 ? run(up_to_16, yes) : run(up_to_16, no);
  if (taps <= 32) return run(std::integral_constant<int, 32>{}, no);
  return run(std::integral_constant<int, kMostFoldTaps>{}, no);
}

}  // namespace

cudaError_t launch_fold(const CombineArguments& p, Dtype dtype, int64_t steps, int64_t columns8,
                        bool matrices, const Queue& queue, Fragment* folded) {
  return dispatch(dtype, [&](auto element) -> cudaError_t {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;  // tensor cores multiply floats
    } else {
      return launch_fold_of<T>(p, steps, columns8, matrices, queue, folded);
    }
  });
}

}  // namespace convt_reduce::cuda
