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
  int64_t cluster = 0;  // blocks; 0: it cannot be shared
  int64_t rows = 1;     // batch elements of a tile
  int64_t row_tiles = 1;
  int64_t across = 1;         // blocks of a row of tiles, in all groups
  int64_t cluster_bytes = 0;  // what a cluster reads

  int64_t clusters() const { return across * row_tiles / cluster; }
  bool serves() const {
    return cluster > 0 && cluster_bytes <= kMostBlockBytes * cluster &&
           cluster_bytes * clusters() <= kMostBytes;
  }
};

// Of the ways to have up to `most` blocks, that in which a block reads least.
Sharing share(const Problem& problem, Dtype dtype, int64_t most) {
  Sharing sharing;
  sharing.columns8 = ceil_div(problem.c_out / problem.groups, kColumns8);
  const int64_t fewest = ceil_div(problem.batch, kRows16);
  for (int64_t cluster = kMeanCluster; cluster > 0; cluster /= 2) {
    const int64_t across = problem.groups * round_up(sharing.columns8, cluster);
    const int64_t tiles = std::clamp(most / across, fewest, problem.batch);
    const int64_t rows = ceil_div(problem.batch, tiles);
    const int64_t row_tiles = ceil_div(problem.batch, rows);
    if (across * row_tiles > most) continue;
    if (sharing.cluster > 0 && rows * sharing.cluster >= sharing.rows * cluster) continue;
    sharing.cluster = cluster;
    sharing.rows = rows;
    sharing.row_tiles = row_tiles;
    sharing.across = across;
  }
  sharing.cluster_bytes =
      sharing.rows * (problem.c_in / problem.groups) * problem.positions() * element_bytes(dtype);
  return sharing;
}

// Blocks, if possible so few that those of the next call find room beside them: whole clusters do
// not find it everywhere.
Sharing share(const Problem& problem, Dtype dtype, const Queue& queue) {
  const Sharing few = share(problem, dtype, int64_t{queue.processors} * 3 / 8);
  return few.serves() ? few : share(problem, dtype, int64_t{queue.processors} / 2);
}

// The cells of a plane, as list_cells() lists them.
void list_cells(const ListedPlane& plane, int count, MeanTiles& tiles) {
  tiles.listed = 0;
  tiles.wide = 0;
  if (count > kMeanListed) return;
  tiles.listed = count;
  int narrow = count;
  int number = 0;
  const int positions = plane.depths.size * plane.rows.size * plane.columns.size;
  for (int channel = 0; channel < plane.channels; ++channel) {
    for (int b0 = 0; b0 < plane.depths.bands; ++b0) {
      for (int b1 = 0; b1 < plane.rows.bands; ++b1) {
        for (int b2 = 0; b2 < plane.columns.bands; ++b2, ++number) {
          const ListedBox box(plane, b0, b1, b2);
          const int first = channel * positions + box.first;
          const int at = box.size > kNarrow ? tiles.wide++ : --narrow;
          tiles.cells[at] = {static_cast<unsigned short>(first),
                             static_cast<unsigned short>(first + box.size),
                             static_cast<unsigned short>(number)};
        }
      }
    }
  }
}

template <int kLanes, typename T>
cudaError_t launch_mean_of(const CombineArguments& p, const Cells& cells, const Input& input,
                           int channels, int64_t positions, const Sharing& sharing,
                           const Queue& queue, T* y) {
  constexpr int64_t kGroups = kWarp / kLanes;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const int count = static_cast<int>(p.cells.count());
  MeanTiles tiles = {.columns8 = static_cast<int>(sharing.columns8),
                     .cluster = static_cast<int>(sharing.cluster),
                     .rows = static_cast<int>(sharing.rows),
                     .taps = static_cast<int>(taps_of(cells))};
  tiles.steps = static_cast<int>(ceil_div(p.depth, kStep));
  tiles.teams =
      static_cast<int>(std::min<int64_t>(ceil_div(p.group_in, kFoldChannels), kMeanTeams));
  const int64_t fold =
      int64_t{tiles.teams} * fold_floats<kInsideTaps>(count) * static_cast<int64_t>(sizeof(float));
  const int64_t parts = kSplitThreads * static_cast<int64_t>(sizeof(float4));
  tiles.panel_at = static_cast<int>(round_up(std::max(fold, parts), kVectorBytes));
  tiles.sums_at = tiles.panel_at + tiles.steps * static_cast<int>(sizeof(Fragment));
  tiles.masks_at = tiles.sums_at + static_cast<int>(tiles.rows * p.depth * sizeof(float));
  tiles.list_at = tiles.masks_at + count * kMaskFloats * static_cast<int>(sizeof(float));

  SmallArguments a{.data = input.data,
                   .stretch_bytes = input.stride_n * kBytes,
                   .plane = ListedPlane(cells, channels)};
  a.positions = static_cast<int>(positions) * channels;
  a.cells = count * channels;
  a.planes = p.group_in / channels;
  // Tiles as small as leave all warps busy, each with one, and a warp's lanes too.
  constexpr int64_t kLeastElements = 128;
  const int64_t row_tiles = std::max<int64_t>(int64_t{tiles.cluster} * kMeanWarps / tiles.rows, 1);
  const int64_t least =
      std::max(ceil_div(a.planes, row_tiles), ceil_div(kLeastElements, a.positions));
  a.per_tile =
      static_cast<int>(std::min(std::min<int64_t>(least, kGroups * kMeanTogether), a.planes));
  a.tiles = ceil_div(a.planes, a.per_tile);
  a.all_tiles = tiles.rows * a.tiles;
  lay_out_small<kLanes, T>(kMeanTogether, a.per_tile, tiles.list_at, a);
  tiles.parts_at = 0;
  if (a.per_tile * kLanes <= kWarp / 2) {
    // Of 8 elements each, and of two rests for each lane.
    const int64_t most_parts = a.per_tile * (a.positions / 8 + 2 * kLanes);
    const int64_t bytes = round_up(most_parts * static_cast<int64_t>(sizeof(float)), kVectorBytes);
    tiles.parts_at = a.tile_at;
    a.tile_at += static_cast<int>(bytes);
    a.warp_bytes += static_cast<int>(bytes);
  }
  const int64_t room = most_shared(queue.shared_kib) - a.warps_at;
  const int64_t warps =
      std::min({ceil_div(a.all_tiles, tiles.cluster), int64_t{kMeanWarps}, room / a.warp_bytes});
  a.warps = static_cast<int>(std::max<int64_t>(warps, 1));
  list_cells(a.plane, a.cells, tiles);
  tiles.taps_inverse = inverse_of(tiles.taps);
  tiles.taps1_inverse = inverse_of(cells.axis[1].axis.kernel);
  tiles.taps2_inverse = inverse_of(cells.axis[2].axis.kernel);
  tiles.rows_inverse = inverse_of(a.plane.rows.size);
  tiles.columns_inverse = inverse_of(a.plane.columns.size);
  tiles.tiles_inverse = inverse_of(a.tiles);
  tiles.planes_inverse = inverse_of(a.per_tile);
  tiles.last_inverse = inverse_of(a.planes - (a.tiles - 1) * a.per_tile);

  const Covers covers = covers_of(p);
  tiles.used = 0;
  for (int cell = 0; cell < count; ++cell) {
    tiles.used |= static_cast<unsigned>(covers.of_cell[cell]);
  }
  const int threads = std::max(kSplitThreads, tiles.teams * kFoldThreads + a.warps * kWarp);
  const int64_t shared = a.warps_at + int64_t{a.warps} * a.warp_bytes;
  auto* const kernel = &mean_small_kernel<kLanes, T>;
  if (shared > kSharedPerBlock) {
    const cudaError_t error = allow_most_shared(kernel, queue.shared_kib);
    if (error != cudaSuccess) return error;
  }
  const int64_t groups = p.c_out / p.group_out;
  const dim3 grid(static_cast<unsigned>(sharing.across / groups),
                  static_cast<unsigned>(sharing.row_tiles), static_cast<unsigned>(groups));
  return launch_grid(kernel, grid, tiles.cluster, threads, shared, queue.stream, queue.overlaps, p,
                     a, tiles, covers, y);
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
  return share(problem, dtype, queue).serves();
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
