// Combine for large batches by products of warpgroups: combine_strip.cuh. Only batches of more than
// kLargeBatch come here: their elements need not have the bits that they have alone.
#include "cuda/combine_strip.cuh"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

namespace convt_reduce::cuda {
namespace {

StripTiles tiles_of(const StripSizes& sizes, const Queue& queue, int64_t width) {
  StripTiles tiles;
  tiles.rows = ceil_div(sizes.batch, kRows64);
  tiles.columns8 = ceil_div(sizes.group_out, kColumns8);
  tiles.columns = ceil_div(tiles.columns8, width);
  const int64_t strips = sizes.groups * tiles.columns;
  tiles.row_blocks = std::clamp<int64_t>(queue.processors / strips, 1, tiles.rows);
  tiles.blocks = strips * tiles.row_blocks;
  tiles.steps = sizes.steps;
  return tiles;
}

// Fragments side by side in a strip: so many that a processor is done first. 0: none fits, or they
// would leave too much empty.
int64_t width_of(const StripSizes& sizes, const Queue& queue) {
  int64_t best = 0;
  int64_t least = 0;
  for (const int64_t width : {8, 12, 16}) {
    const StripTiles tiles = tiles_of(sizes, queue, width);
    const int64_t channels = tiles.columns * width * kColumns8;
    if (strip_shared(sizes.steps, width) > most_shared(queue.shared_kib) ||
        channels >= 2 * sizes.group_out || 2 * tiles.blocks < queue.processors) {
      continue;
    }
    // As measured: what a tile takes besides its products is as much as those of 2 to 3 fragments,
    // and weights arrive in half the time that products with them take.
    const int64_t turns = ceil_div(tiles.blocks, int64_t{queue.processors});
    const int64_t time = turns * (ceil_div(tiles.rows, tiles.row_blocks) * (2 * width + 5) + width);
    if (best != 0 && time >= least) continue;
    best = width;
    least = time;
  }
  return best;
}

template <int kWidth, int kGroups, typename T>
cudaError_t launch_width(const CombineArguments& p, const StripSizes& sizes, const Queue& queue,
                         const float* cell_sums, const Matrices* folded, T* y) {
  const StripTiles tiles = tiles_of(sizes, queue, kWidth);
  const auto kernel = &strip_kernel<kWidth, kGroups, T>;
  const cudaError_t error = allow_most_shared(kernel, queue.shared_kib);
  if (error != cudaSuccess) return error;
  return launch(kernel, tiles.blocks, kGroups * kWarpgroup, strip_shared(tiles.steps, kWidth),
                queue.stream, queue.overlaps, p, tiles, cell_sums, folded, y);
}

}  // namespace

bool strips_serve(const StripSizes& sizes, const Queue& queue) {
  return queue.warpgroup_products && sizes.batch > kLargeBatch &&
         ceil_div(sizes.steps, kStripSteps) <= kMostStripStages && width_of(sizes, queue) != 0;
}

cudaError_t launch_strips(const CombineArguments& p, Dtype dtype, const Queue& queue,
                          const void* cell_sums, const void* folded, void* y) {
  const StripSizes sizes = {p.batch, p.c_out / p.group_out, p.group_out, ceil_div(p.depth, kStep)};
  return dispatch(dtype, [&](auto element) -> cudaError_t {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;  // tensor cores multiply floats
    } else {
      const float* sums = static_cast<const float*>(cell_sums);
      const Matrices* weights = static_cast<const Matrices*>(folded);
      T* to = static_cast<T*>(y);
      switch (width_of(sizes, queue)) {
        case 8:
          return launch_width<8, 3>(p, sizes, queue, sums, weights, to);
        case 12:
          return launch_width<12, 3>(p, sizes, queue, sums, weights, to);
        case 16:
          return launch_width<16, 2>(p, sizes, queue, sums, weights, to);
      }
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace convt_reduce::cuda
