// Combine on tensor cores where the depth is small enough for one kernel, without slices.
//
//   split    few blocks: combine_split.cuh. For the smallest batches a block folds its weights
//            itself, so that there is no kernel but this one.
//   panel    many: combine_panel.cuh
//   strip    the same, where there are products of warpgroups: combine_strip.cu
//
// What is left for combine_batch.cu is large in every direction.
#include "cuda/combine_split.cuh"

#include <algorithm>
#include <type_traits>

#include "cuda/combine_panel.cuh"

namespace convt_reduce::cuda {
namespace {

// From small to large batches; their results are the same, bit by bit.
using InsideTile = SplitTile<1, 1, 2>;
using HalfInsideTile = SplitTile<1, 1, 2, 1>;
using LowTile = SplitTile<1, 1, 4>;
using PairTile = SplitTile<1, 2, 2>;
using SquareTile = SplitTile<2, 2, 2>;
using LargeTile = SplitTile<2, 4, 1>;

// Of batches of up to kLargeBatch: blocks, and steps of all of them; with more, tiles must be
// larger.
constexpr int64_t kMostSmallBlocks = 8;  // per processor, as the next
constexpr int64_t kMostSmallSteps = 512;
// Of any: steps that a block takes alone, that a block of a cluster takes about, and blocks of a
// cluster.
constexpr int64_t kMostLoneSteps = 64;
constexpr int64_t kClusterSteps = 24;
constexpr int64_t kMostCluster = 8;
// Of larger ones.
constexpr int64_t kFullBlocks = 2;     // that a processor has at a time
constexpr int64_t kMostBlocks = 4;     // of the largest tiles, per processor
constexpr int64_t kMostSteps = 128;    // of all blocks, per processor
constexpr int64_t kMostOwnSteps = 64;  // of one block: with more, slices are faster
constexpr int64_t kLeastPanelSteps = 8;

// Of what a block folds itself.
constexpr int64_t kMostInsideDepth = 256;
constexpr int64_t kMostInsideCells = 32;  // its shared memory is what every block may have

// With more sums of chunks to a block, its few blocks take longer than merge and a launch.
constexpr int64_t kMostMergedSums = 2048 * kRows16;

enum class Way { kNone, kInside, kLow, kPair, kSquare, kLarge, kPanel, kStrip };

struct Sizes {
  int64_t batch;
  int64_t groups;
  int64_t group_out;
  int64_t depth;

  int64_t steps() const { return ceil_div(depth, kStep); }
  int64_t columns8() const { return ceil_div(group_out, kColumns8); }
};

template <typename Tile>
int64_t blocks_of(const Sizes& sizes) {
  return sizes.groups * ceil_div(sizes.columns8(), Tile::kWidth) *
         ceil_div(sizes.batch, Tile::kRows);
}

// For any batch of up to kLargeBatch as for the largest, so that an element's bits are those that
// it has alone.
int64_t most_blocks_of_pairs(Sizes sizes) {
  sizes.batch = kLargeBatch;
  return blocks_of<PairTile>(sizes);
}

PanelTiles panel_tiles(const Sizes& sizes, int processors) {
  PanelTiles tiles;
  tiles.rows = ceil_div(sizes.batch, kRows16);
  tiles.columns8 = sizes.columns8();
  tiles.columns = ceil_div(tiles.columns8, kPanelWidth);
  const int64_t panels = sizes.groups * tiles.columns;
  tiles.row_blocks = std::clamp<int64_t>(processors / panels, 1, tiles.rows);
  tiles.blocks = panels * tiles.row_blocks;
  tiles.steps = sizes.steps();
  return tiles;
}

bool suits_panel(const Sizes& sizes, const Queue& queue) {
  const int64_t channels = ceil_div(sizes.columns8(), kPanelWidth) * kPanelWidth * kColumns8;
  return sizes.steps() >= kLeastPanelSteps && channels <= sizes.group_out * 5 / 4 &&
         panel_shared(sizes.steps()) <= most_shared(queue.shared_kib) &&
         panel_tiles(sizes, queue.processors).blocks * 4 >= queue.processors * int64_t{3};
}

bool suits_strip(const Sizes& sizes, const Queue& queue) {
  return strips_serve({sizes.batch, sizes.groups, sizes.group_out, sizes.steps()}, queue);
}

// Whether a block may fold its weights itself.
bool is_light(const Sizes& sizes, const Cells& cells) {
  return sizes.depth <= kMostInsideDepth && taps_of(cells) <= kInsideTaps &&
         cells.count() <= kMostInsideCells && !needs_table(cells);
}

// Blocks of a cluster, which share the steps of a tile. The same for all batches of up to
// kLargeBatch, so that an element's bits are those that it has alone.
int cluster_of(const Sizes& sizes, const Queue& queue) {
  if (!queue.overlaps || sizes.steps() <= kMostLoneSteps) return 1;
  const int64_t tiles =
      sizes.batch > kLargeBatch ? blocks_of<LowTile>(sizes) : most_blocks_of_pairs(sizes);
  return static_cast<int>(largest_power_of_two(std::clamp<int64_t>(
      std::min(sizes.steps() / kClusterSteps, kFullBlocks * queue.processors / tiles), 1,
      kMostCluster)));
}

Way way_of(const Sizes& sizes, const Cells& cells, Dtype dtype, const Queue& queue) {
  if (!queue.tensor_cores || dtype == Dtype::kFloat64) return Way::kNone;
  if (!suits_tensor_tiles(sizes.depth, sizes.groups, sizes.group_out)) return Way::kNone;
  const int64_t cluster = cluster_of(sizes, queue);
  if (sizes.steps() > kMostSplitSteps * cluster) return Way::kNone;
  const int64_t processors = queue.processors;
  const int64_t full = kFullBlocks * processors;
  const int64_t low = blocks_of<LowTile>(sizes);
  if (sizes.batch <= kLargeBatch) {
    const int64_t blocks = most_blocks_of_pairs(sizes);
    if (blocks > kMostSmallBlocks * processors ||
        blocks * sizes.steps() > kMostSmallSteps * processors) {
      return Way::kNone;
    }
    if (is_light(sizes, cells) && low <= full) return Way::kInside;
    if (sizes.columns8() == 1 || (cluster == 1 && low <= processors)) return Way::kLow;
    if (cluster == 1 || blocks_of<PairTile>(sizes) * cluster <= processors) {
      return Way::kPair;
    }
    return Way::kSquare;
  }
  if (sizes.steps() > kMostOwnSteps * cluster) return Way::kNone;
  if (cluster > 1) return Way::kLow;
  const auto fits = [&](int64_t blocks, int64_t most) {
    return blocks <= most && blocks * sizes.steps() <= kMostSteps * processors;
  };
  if (fits(low, processors)) return Way::kLow;
  if (sizes.columns8() >= PairTile::kWidth) {
    if (fits(blocks_of<PairTile>(sizes), full)) return Way::kPair;
    if (fits(blocks_of<SquareTile>(sizes), full)) return Way::kSquare;
  }
  if (sizes.columns8() >= LargeTile::kWidth &&
      fits(blocks_of<LargeTile>(sizes), kMostBlocks * processors)) {
    return Way::kLarge;
  }
  if (suits_strip(sizes, queue)) return Way::kStrip;
  return suits_panel(sizes, queue) ? Way::kPanel : Way::kNone;
}

// Batch elements of a block that folds its weights itself: so few that it has little to load, as
// long as all blocks together leave half of the processors to stats. Their number changes no bits.
int inside_rows(const Sizes& sizes, int64_t chunks, int64_t processors) {
  constexpr int64_t kMostLoads = 8192;  // sums of a block
  for (const int rows : {4, HalfInsideTile::kRows}) {
    const int64_t blocks = sizes.groups * sizes.columns8() * ceil_div(sizes.batch, rows);
    if (2 * rows * sizes.depth * chunks > kMostLoads && 2 * blocks <= processors) return rows;
  }
  return InsideTile::kRows;
}

Sizes sizes_of(const Problem& problem, const Cells& cells) {
  return {problem.batch, problem.groups, problem.c_out / problem.groups,
          problem.c_in / problem.groups * cells.count()};
}

Sizes sizes_of(const CombineArguments& p) {
  return {p.batch, p.c_out / p.group_out, p.group_out, p.depth};
}

template <typename Tile, bool kInside, typename T>
cudaError_t launch_split(const CombineArguments& p, const Sizes& sizes, const Queue& queue,
                         const float* cell_sums, const Fragment* folded, T* y,
                         int tile_rows = Tile::kRows) {
  SplitTiles tiles;
  tiles.tile_rows = tile_rows;
  tiles.rows = ceil_div(sizes.batch, tiles.tile_rows);
  tiles.columns8 = sizes.columns8();
  tiles.columns = ceil_div(tiles.columns8, Tile::kWidth);
  tiles.blocks = sizes.groups * tiles.columns * tiles.rows;
  tiles.steps = sizes.steps();
  tiles.cluster = kInside ? 1 : cluster_of(sizes, queue);
  const size_t shared =
      sizeof(float4) * split_shared<Tile, kInside>(static_cast<int>(p.cells.count()), tiles.steps);
  const Covers covers = kInside ? covers_of(p) : Covers{};
  return launch_clusters(&split_kernel<Tile, kInside, T>, tiles.blocks, tiles.cluster,
                         kSplitThreads, shared, queue.stream, queue.overlaps, p, tiles, covers,
                         cell_sums, folded, y);
}

template <typename T>
cudaError_t launch_panel(const CombineArguments& p, const Sizes& sizes, const Queue& queue,
                         const float* cell_sums, const Fragment* folded, T* y) {
  const PanelTiles tiles = panel_tiles(sizes, queue.processors);
  const int64_t shared = panel_shared(tiles.steps);
  const cudaError_t error = allow_most_shared(&panel_kernel<T>, queue.shared_kib);
  if (error != cudaSuccess) return error;
  return launch(&panel_kernel<T>, tiles.blocks, kPanelThreads, shared, queue.stream, queue.overlaps,
                p, tiles, cell_sums, folded, y);
}

}  // namespace

bool combine_splits(const Problem& problem, const Cells& cells, Dtype dtype, const Queue& queue) {
  return way_of(sizes_of(problem, cells), cells, dtype, queue) != Way::kNone;
}

bool combine_folds_inside(const Problem& problem, const Cells& cells, Dtype dtype,
                          const Queue& queue) {
  return way_of(sizes_of(problem, cells), cells, dtype, queue) == Way::kInside;
}

bool combine_takes_matrices(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue) {
  return way_of(sizes_of(problem, cells), cells, dtype, queue) == Way::kStrip;
}

bool combine_split_merges(const Problem& problem, const Cells& cells, Dtype dtype,
                          const Queue& queue, int64_t chunks) {
  static_assert(InsideTile::kMerges && LowTile::kMerges && PairTile::kMerges);
  const Sizes sizes = sizes_of(problem, cells);
  const int64_t rows = std::min<int64_t>(sizes.batch, kRows16);
  const int64_t of_block = sizes.depth / cluster_of(sizes, queue) * chunks * rows;
  if (chunks > kMostMergedChunks || of_block > kMostMergedSums) return false;
  const Way way = way_of(sizes, cells, dtype, queue);
  return way == Way::kInside || way == Way::kLow || way == Way::kPair;
}

int64_t combine_split_scratch(const Problem& problem, const Cells& cells, Dtype dtype,
                              const Queue& queue) {
  const Sizes sizes = sizes_of(problem, cells);
  if (way_of(sizes, cells, dtype, queue) == Way::kInside) return 0;
  constexpr int64_t kFloats = sizeof(Fragment) / sizeof(float);
  return sizes.groups * sizes.steps() * sizes.columns8() * kFloats;
}

int64_t combine_split_steps(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue) {
  const Sizes sizes = sizes_of(problem, cells);
  return way_of(sizes, cells, dtype, queue) == Way::kInside ? 0 : sizes.steps();
}

cudaError_t launch_combine_split(const CombineArguments& p, Dtype dtype, const Queue& queue,
                                 const void* cell_sums, bool is_folded, void* scratch, void* y) {
  const Sizes sizes = sizes_of(p);
  const Way way = way_of(sizes, p.cells, dtype, queue);
  Fragment* const folded = static_cast<Fragment*>(scratch);
  if (way != Way::kInside && !is_folded) {
    const cudaError_t error =
        launch_fold(p, dtype, sizes.steps(), sizes.columns8(), way == Way::kStrip, queue, folded);
    if (error != cudaSuccess) return error;
  }
  if (way == Way::kStrip) return launch_strips(p, dtype, queue, cell_sums, folded, y);
  return dispatch(dtype, [&](auto element) -> cudaError_t {
    using T = decltype(element);
    if constexpr (std::is_same_v<T, double>) {
      return cudaErrorInvalidValue;  // no way
    } else {
      const float* sums = static_cast<const float*>(cell_sums);
      T* to = static_cast<T*>(y);
      switch (way) {
        case Way::kNone:
        case Way::kStrip:
          break;
        case Way::kInside: {
          const int rows = inside_rows(sizes, p.chunks, queue.processors);
          return rows <= HalfInsideTile::kRows
                     ? launch_split<HalfInsideTile, true>(p, sizes, queue, sums, folded, to, rows)
                     : launch_split<InsideTile, true>(p, sizes, queue, sums, folded, to, rows);
        }
        case Way::kLow:
          return launch_split<LowTile, false>(p, sizes, queue, sums, folded, to);
        case Way::kPair:
          return launch_split<PairTile, false>(p, sizes, queue, sums, folded, to);
        case Way::kSquare:
          return launch_split<SquareTile, false>(p, sizes, queue, sums, folded, to);
        case Way::kLarge:
          return launch_split<LargeTile, false>(p, sizes, queue, sums, folded, to);
        case Way::kPanel:
          return launch_panel(p, sizes, queue, sums, folded, to);
      }
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace convt_reduce::cuda
