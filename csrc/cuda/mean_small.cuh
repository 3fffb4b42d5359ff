// Stats and combine in one kernel, for small calls: a cluster of blocks has a few batch elements
// and up to 8 output channels of a group for each of its blocks.
//
// Each block adds up its share of the cluster's planes, as stats_small_tile.cuh does, and hands the
// cell sums to all blocks of the cluster. Meanwhile its other threads fold the weights of its own
// output channels. When the cluster has met, a block has what combine needs in its shared memory,
// and goes on as combine_split.cuh does. Sums and products are made in the same order as there: the
// results are the same bits.
#pragma once

#include "cuda/combine_split_tile.cuh"
#include "cuda/stats_small_tile.cuh"

namespace convt_reduce::cuda {

constexpr int kMeanCluster = 8;  // blocks, at most: the size that CUDA calls portable
constexpr int kMeanTeams = 2;    // that fold, at most: kSplitThreads, which also multiply
static_assert(kMeanTeams * kFoldThreads == kSplitThreads);
constexpr int kMeanWarps = 4;     // that add up, at most
constexpr int kMeanBlocks = 2;    // of a processor, so that those of the next call begin early
constexpr int kMeanTogether = 2;  // planes that a few lanes walk: larger ones are not served

using MeanTile = SplitTile<1, 1, 2>;  // its results are those of the other tiles, bit by bit

struct MeanTiles {
  int64_t row_tiles;     // of the batch
  int64_t column_tiles;  // of a group's output channels, of 8 for each block
  int64_t clusters;      // groups * column_tiles * row_tiles
  int64_t columns8;
  int cluster;   // blocks
  int rows;      // batch elements of a tile
  int steps;     // of depth
  int teams;     // that fold
  int panel_at;  // where in shared memory folded weights begin,
  int sums_at;   // cell sums [rows][depth],
  int list_at;   // and the list of a plane's cells
};

template <int kLanes, typename T>
__global__ void __launch_bounds__(kSplitThreads + kMeanWarps * kWarp, kMeanBlocks)
    mean_small_kernel(const __grid_constant__ CombineArguments p,
                      const __grid_constant__ SmallArguments a,
                      const __grid_constant__ MeanTiles tiles,
                      const __grid_constant__ Covers covers, T* y) {
  using Tile = MeanTile;
  constexpr int kGroups = kWarp / kLanes;
  constexpr int kPairs = Tile::kColumns / 2;  // of a row
  if constexpr (!has_clusters()) {
    __trap();  // not launched
    return;
  }
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  __shared__ uint64_t barriers[kMeanWarps];
  __shared__ int wide_cells;
  const bool alone = tiles.cluster == 1;  // the waits of a cluster would be for all of the block
  if (!alone) arrive_at_cluster();
  Fragment* const panel = reinterpret_cast<Fragment*>(shared + tiles.panel_at);
  float* const sums = reinterpret_cast<float*>(shared + tiles.sums_at);
  ListedCell* const cells = reinterpret_cast<ListedCell*>(shared + tiles.list_at);
  unsigned short* const order = reinterpret_cast<unsigned short*>(shared + a.order_at);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int fold_threads = tiles.teams * kFoldThreads;
  const int depth = static_cast<int>(p.depth);

  const int64_t cluster = blockIdx.x / tiles.cluster;
  const int rank = static_cast<int>(blockIdx.x - cluster * tiles.cluster);
  const int64_t rest = quotient(cluster, tiles.row_tiles);
  const int64_t n_begin = (cluster - rest * tiles.row_tiles) * tiles.rows;
  const int64_t group = quotient(rest, tiles.column_tiles);
  const int64_t column = (rest - group * tiles.column_tiles) * tiles.cluster + rank;
  const int rows = static_cast<int>(min(p.batch - n_begin, int64_t{tiles.rows}));
  const bool has_column = column < tiles.columns8;  // else it helps with the sums

  // What needs no input comes before the wait.
  const int last = blockDim.x / kWarp - 1;
  if (warp == last) {
    const int wide = list_cells(a.plane, kNarrow, cells);
    if (lane == 0) wide_cells = wide;
  }
  list_elements(a.plane, sizeof(T), warp, last + 1, order);
  const FoldLoads<kInsideTaps> loads(p);
  const int sum_warp = warp - fold_threads / kWarp;  // those that fold come first
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  // Of the two neighbouring channels whose results this thread will write, if any.
  const int row = threadIdx.x / kPairs;
  const int64_t of_group = column * kColumns8 + threadIdx.x % kPairs * 2;
  const int64_t o = group * p.group_out + of_group;
  const int outs = row < rows ? static_cast<int>(min(p.group_out - of_group, int64_t{2})) : 0;
  const float bias[2] = {outs > 0 ? bias_of<T>(p, o) : 0.0f,
                         outs > 1 ? bias_of<T>(p, o + 1) : 0.0f};

  if (sum_warp >= 0 && sum_warp < a.warps) {
    unsigned char* const mine = shared + a.warps_at + sum_warp * a.warp_bytes;
    float* const results = reinterpret_cast<float*>(mine);
    const uintptr_t data = address_of(a.data) + n_begin * a.stretch_bytes +
                           group * a.planes * a.positions * static_cast<int64_t>(sizeof(T));
    Loader loader(barriers + sum_warp, 1, a.gap == 0 ? 1 : kGroups);
    const SmallLoad copy(a, sizeof(T), mine + a.tile_at);
    const int64_t end = rows * a.tiles;
    const int64_t step = int64_t{tiles.cluster} * a.warps;
    int64_t index = rank + int64_t{tiles.cluster} * sum_warp;
    SmallTile tile = {};
    if (index < end) {
      tile = SmallTile::at<T>(a, data, index);
      copy.start(a, tile, loader);
    }
    __syncwarp();
    if (!alone) wait_for_cluster();  // its blocks' shared memory is there
    while (index < end) {
      loader.wait(0, 0);
      sum_few<kLanes, kMeanTogether, T>(a, copy.data_of(a, tile), tile.planes, cells, wide_cells,
                                        order, results);
      float* const to = sums + tile.first * a.cells;
      const int count = tile.planes * a.cells;
      index += step;
      if (index < end) {
        tile = SmallTile::at<T>(a, data, index);
        copy.start(a, tile, loader);
      }
#pragma unroll 1
      for (int i = lane; i < count; i += kWarp) {
        const float sum = results[i];
#pragma unroll 1
        for (int r = 0; r < tiles.cluster; ++r) store_to_cluster(to + i, r, sum);
      }
      __syncwarp();
    }
  } else {
    if (sum_warp < 0 && has_column) {
      const int count = static_cast<int>(p.cells.count());
      fold_weights<kInsideTaps, T>(p, covers, FirstTeams{tiles.teams}, loads, group, 0,
                                   (tiles.steps + count - 1) / count, column, 1, tiles.steps,
                                   reinterpret_cast<float*>(shared),
                                   [&](int step, int) -> Fragment& { return panel[step]; });
    }
    __syncwarp();
    if (!alone) wait_for_cluster();
  }
  __syncwarp();
  meet_cluster();
  if (!has_column) return;

  float4* const parts = reinterpret_cast<float4*>(shared);
  if (warp < kSplitWarps) {
    const float* from[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      from[half] = sums + min(half * 8 + lane / 4, rows - 1) * depth + lane % 4 * 4;
    }
    const auto load_sums = [&](int first, float4(&loaded)[Tile::kAhead* 2]) {
#pragma unroll
      for (int i = 0; i < Tile::kAhead * 2; ++i) {
        const int term = min(first + i / 2 * kSplitWarps, tiles.steps) * kStep;
        loaded[i] = load_terms(from[i % 2] + term, term + lane % 4 * 4 < depth);
      }
    };
    multiply_steps<Tile>(warp, kSplitWarps, tiles.steps, panel, 1, 1, load_sums, parts);
  }
  __syncthreads();
  if (outs <= 0) return;
  put_means<T>(p, warps_sum<Tile>(parts, row, threadIdx.x % kPairs), bias, o, outs,
               sums + row * depth, y + (n_begin + row) * p.c_out + o);
}

}  // namespace convt_reduce::cuda
