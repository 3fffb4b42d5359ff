// Which calls take the kernel of mean_small.cuh, and how their work is shared out.
#include "cuda/mean_small.cuh"

#include <algorithm>
#include <type_traits>

namespace convt_reduce::cuda {
namespace {

// What is read, by a block and by all clusters, at most: with more, two kernels are as fast, since
// a block has few warps that add up, and clusters for other channels read the same again.
constexpr int64_t kMostBlockBytes = 48 * 1024;
constexpr int64_t kMostBytes = 2048 * 1024;

// How clusters share a call.
struct Sharing {
  int64_t columns8 = 0;
  int64_t rows = 1;  // batch elements of a tile
  int64_t row_tiles = 1;
  int64_t cluster = kMeanCluster;
  int64_t column_tiles = 1;
  int64_t clusters = 1;
  int64_t cluster_bytes = 0;

  int64_t blocks() const { return clusters * cluster; }
};

// Blocks, at most: so many that those of the next call find room beside them.
int64_t most_blocks(const Queue& queue) { return queue.processors / 2; }

Sharing share(const Problem& problem, Dtype dtype, const Queue& queue) {
  Sharing sharing;
  const int64_t group_in = problem.c_in / problem.groups;
  sharing.columns8 = ceil_div(problem.c_out / problem.groups, kColumns8);
  const int64_t columns = problem.groups * sharing.columns8;
  const int64_t fewest = ceil_div(problem.batch, kRows16);
  const int64_t tiles = std::clamp(most_blocks(queue) / columns, fewest, problem.batch);
  sharing.rows = ceil_div(problem.batch, tiles);
  sharing.row_tiles = ceil_div(problem.batch, sharing.rows);
  const auto blocks = [&] {
    return problem.groups * round_up(sharing.columns8, sharing.cluster) * sharing.row_tiles;
  };
  while (sharing.cluster > 1 && blocks() > most_blocks(queue)) sharing.cluster /= 2;
  sharing.column_tiles = ceil_div(sharing.columns8, sharing.cluster);
  sharing.clusters = problem.groups * sharing.column_tiles * sharing.row_tiles;
  sharing.cluster_bytes = sharing.rows * group_in * problem.positions() * element_bytes(dtype);
  return sharing;
}

template <int kLanes, typename T>
cudaError_t launch_mean_of(const CombineArguments& p, const Cells& cells, const Input& input,
                           int channels, int64_t positions, const Sharing& sharing,
                           const Queue& queue, T* y) {
  constexpr int64_t kGroups = kWarp / kLanes;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const int count = static_cast<int>(p.cells.count());
  MeanTiles tiles = {.row_tiles = sharing.row_tiles,
                     .column_tiles = sharing.column_tiles,
                     .clusters = sharing.clusters,
                     .columns8 = sharing.columns8,
                     .cluster = static_cast<int>(sharing.cluster),
                     .rows = static_cast<int>(sharing.rows)};
  tiles.steps = static_cast<int>(ceil_div(p.depth, kStep));
  tiles.teams =
      static_cast<int>(std::min<int64_t>(ceil_div(p.group_in, kFoldChannels), kMeanTeams));
  const int64_t fold =
      int64_t{tiles.teams} * fold_floats<kInsideTaps>(count) * static_cast<int64_t>(sizeof(float));
  const int64_t parts = kSplitThreads * static_cast<int64_t>(sizeof(float4));
  tiles.panel_at = static_cast<int>(round_up(std::max(fold, parts), kVectorBytes));
  tiles.sums_at = tiles.panel_at + tiles.steps * static_cast<int>(sizeof(Fragment));
  tiles.list_at = tiles.sums_at + static_cast<int>(tiles.rows * p.depth * sizeof(float));

  SmallArguments a{.data = input.data,
                   .stretch_bytes = input.stride_n * kBytes,
                   .plane = ListedPlane(cells, channels)};
  a.positions = static_cast<int>(positions) * channels;
  a.cells = count * channels;
  a.planes = p.group_in / channels;
  // Tiles as small as leave all warps busy.
  const int64_t of_warp = ceil_div(tiles.rows * a.planes, int64_t{tiles.cluster} * kMeanWarps);
  a.per_tile = static_cast<int>(std::clamp<int64_t>(of_warp, 1, kGroups * kMeanTogether));
  a.tiles = ceil_div(a.planes, a.per_tile);
  a.all_tiles = tiles.rows * a.tiles;
  lay_out_small<kLanes, T>(kMeanTogether, a.per_tile, tiles.list_at, a);
  const int64_t room = most_shared(queue.shared_kib) - a.warps_at;
  const int64_t warps =
      std::min({ceil_div(a.all_tiles, tiles.cluster), int64_t{kMeanWarps}, room / a.warp_bytes});
  a.warps = static_cast<int>(std::max<int64_t>(warps, 1));
  const int threads = std::max(kSplitThreads, tiles.teams * kFoldThreads + a.warps * kWarp);
  const int64_t shared = a.warps_at + int64_t{a.warps} * a.warp_bytes;
  auto* const kernel = &mean_small_kernel<kLanes, T>;
  if (shared > kSharedPerBlock) {
    const cudaError_t error = allow_most_shared(kernel, queue.shared_kib);
    if (error != cudaSuccess) return error;
  }
  return launch_clusters(kernel, tiles.clusters, tiles.cluster, threads, shared, queue.stream,
                         queue.overlaps, p, a, tiles, covers_of(p), y);
}

}  // namespace

bool mean_small_serves(const Problem& problem, const Cells& cells, Dtype dtype,
                       const StatsPlan& plan, const Queue& queue) {
  // From compute capability 9.0 on there are clusters too.
  if (!queue.overlaps || plan.kind != StatsPlan::Kind::kSmall) return false;
  if (plan.small.together != kMeanTogether) return false;
  if (problem.batch == 0 || problem.batch > kLargeBatch) return false;
  if (plan.small.channels != 1 && problem.groups != 1) return false;
  if (!combine_folds_inside(problem, cells, dtype, queue)) return false;
  const Sharing sharing = share(problem, dtype, queue);
  return sharing.blocks() <= most_blocks(queue) &&
         sharing.cluster_bytes <= kMostBlockBytes * sharing.cluster &&
         sharing.cluster_bytes * sharing.clusters <= kMostBytes;
}

cudaError_t launch_mean_small(const Problem& problem, const Cells& cells, const Input& input,
                              const Weight& weight, const Bias& bias, Dtype dtype,
                              const StatsPlan& plan, const Queue& queue, void* y) {
  const CombineArguments p(problem, cells, weight, bias, 1);
  const Sharing sharing = share(problem, dtype, queue);
  return dispatch(dtype, [&](auto element) -> cudaError_t {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;  // not served
    } else {
      return with_small_lanes(plan.small.lanes, [&](auto lanes) {
        return launch_mean_of<decltype(lanes)::value, T>(p, cells, input, plan.small.channels,
                                                         problem.positions(), sharing, queue,
                                                         static_cast<T*>(y));
      });
    }
  });
}

}  // namespace convt_reduce::cuda
