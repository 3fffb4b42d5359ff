// Stats and combine in one kernel, for small calls: a cluster of blocks has a few batch elements
// and up to 8 output channels of a group for each of its blocks.
//
// Each block adds up its share of the cluster's planes and sends the cell sums to all blocks of the
// cluster. Meanwhile its other threads fold the weights of its own output channels. When all sums
// are there, a block has what combine needs in its shared memory, and goes on as combine_split.cuh
// does. Sums and products are made in the same order as there: the results are the same bits.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/mean_small_fold.cuh"
#include "cuda/mean_small_sums.cuh"

namespace convt_reduce::cuda {

using MeanTile = SplitTile<1, 1, 2>;  // its results are those of the other tiles, bit by bit

// Shared memory of a warp that adds up: results [planes][cells], the parts of wide sums, the tile.
template <int kLanes, typename T>
__device__ __forceinline__ void sum_planes(const SmallArguments& a, const MeanTiles& tiles,
                                           const MeanPlanes& planes, const ListedCell* cells,
                                           int wide, const unsigned short* order,
                                           unsigned char* mine) {
  float* const results = reinterpret_cast<float*>(mine);
  if (tiles.parts_at > 0) {
    sum_wide_cells_in_parts<kLanes, T>(planes, a.cells, cells, wide, order,
                                       reinterpret_cast<float*>(mine + tiles.parts_at), results);
  } else {
    sum_wide_cells<kLanes, kMeanTogether, T>(planes, a.cells, cells, wide, order, results);
  }
  sum_narrow_cells<T>(planes, a.cells, cells, wide, order, results);
  __syncwarp();
}

// put_means() out of the way, where it may have to compute them again.
template <typename T>
__device__ __noinline__ void put_rare_means(const CombineArguments& p, float2 sum, float bias0,
                                            float bias1, int o, int outs, const float* sums,
                                            T* to) {
  const float bias[2] = {bias0, bias1};
  put_means<T>(p, sum, bias, o, outs, sums, to);
}

// Blocks on grid.x: output channels; grid.y: tiles of the batch; grid.z: groups.
template <int kLanes, typename T>
__global__ void __launch_bounds__(kMeanThreads)
    mean_small_kernel(const __grid_constant__ CombineArguments p,
                      const __grid_constant__ SmallArguments a,
                      const __grid_constant__ MeanTiles tiles,
                      const __grid_constant__ Covers covers, T* y) {
  using Tile = MeanTile;
  constexpr int kPairs = Tile::kColumns / 2;  // of a row
  if constexpr (!has_clusters()) {
    __trap();  // not launched
    return;
  }
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  __shared__ uint64_t barriers[kMeanWarps];
  __shared__ uint64_t arrivals;
  __shared__ int wide_cells;
  Fragment* const panel = reinterpret_cast<Fragment*>(shared + tiles.panel_at);
  float* const sums = reinterpret_cast<float*>(shared + tiles.sums_at);
  float* const masks = reinterpret_cast<float*>(shared + tiles.masks_at);
  ListedCell* const cells = reinterpret_cast<ListedCell*>(shared + tiles.list_at);
  unsigned short* const order = reinterpret_cast<unsigned short*>(shared + a.order_at);
  const unsigned all_sums = shared_address(&arrivals);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int depth = static_cast<int>(p.depth);
  const bool alone = tiles.cluster == 1;  // no cluster then
  const int rank = static_cast<int>(blockIdx.x) & (tiles.cluster - 1);
  const int column = blockIdx.x;
  const int group = blockIdx.z;
  const int n_begin = static_cast<int>(blockIdx.y) * tiles.rows;
  const int rows = min(static_cast<int>(p.batch) - n_begin, tiles.rows);
  const bool has_column = column < tiles.columns8;              // else it helps with the sums
  const int fold_warps = tiles.teams * (kFoldThreads / kWarp);  // those that fold come first
  const int sum_warp = warp - fold_warps;
  const int most = a.gap == 0 ? 1 : kWarp / kLanes;  // lanes that copy planes
  // What needs no input comes before the wait. A warp that has little else makes the barriers,
  // which takes long.
  if (warp == fold_warps - 1) {
    if (lane == 0) {
      for (int i = 0; i < a.warps; ++i) make_barrier(shared_address(barriers + i), most);
      make_barrier(all_sums, 1);
      finish_barriers();
      expect_bytes(all_sums, rows * depth * static_cast<unsigned>(sizeof(float)));
    }
    __syncwarp();
  }
  if (!alone) arrive_at_cluster();
  list_cells(a.plane, tiles, warp, cells, wide_cells);
  fill_masks(covers, static_cast<int>(p.cells.count()), warp, masks);
  list_plane(a.plane, tiles, sizeof(T), order);
  const bool adds_up = sum_warp >= 0 && sum_warp < a.warps;
  const int own_warp = adds_up ? sum_warp : 0;
  unsigned char* const mine = shared + a.warps_at + own_warp * a.warp_bytes;
  const uintptr_t data = address_of(a.data) + n_begin * a.stretch_bytes +
                         group * a.planes * a.positions * static_cast<int64_t>(sizeof(T));
  const int end = adds_up ? rows * static_cast<int>(a.tiles) : 0;
  int index = rank + tiles.cluster * own_warp;
  Loader loader(barriers + own_warp, 0, most);
  const SmallLoad copy(a, sizeof(T), mine + a.tile_at);
  SmallTile tile = {};
  FirstLoad first_load;
  MeanFold<T> fold;
  if (index < end) {
    tile = mean_tile<T>(a, tiles, data, index);
    first_load.prepare(a, tile, copy, most);
  } else if (warp < fold_warps && has_column) {
    fold.prepare(p, tiles, group, column);
  }
  // Of the two neighbouring channels whose results this thread will write, if any: a thread of the
  // first team.
  const int row = threadIdx.x / kPairs;
  const int of_group = column * kColumns8 + static_cast<int>(threadIdx.x) % kPairs * 2;
  const int o = group * static_cast<int>(p.group_out) + of_group;
  const int outs = row < rows ? min(static_cast<int>(p.group_out) - of_group, 2) : 0;
  float bias[2] = {};
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  if (!adds_up) {
    fold.load(p, tiles);
    if (outs > 0) bias[0] = bias_of<T>(p, o);
    if (outs > 1) bias[1] = bias_of<T>(p, o + 1);
    __syncwarp();
    if (!alone) wait_for_cluster();
    fold.fold(p, tiles, masks, reinterpret_cast<float*>(shared), panel);
  } else {
    if (index < end) first_load.start(a, tile, copy, loader, shared_address(barriers + own_warp));
    __syncwarp();
    if (!alone) wait_for_cluster();  // its blocks' shared memory is there
    while (index < end) {
      loader.wait(0, 0);
      sum_planes<kLanes, T>(a, tiles, MeanPlanes::of<T>(a, tiles, tile, copy.data_of(a, tile)),
                            cells, wide_cells, order, mine);
      const float* const results = reinterpret_cast<const float*>(mine);
      float* const to = sums + static_cast<int>(tile.first) * a.cells;
      const int count = tile.planes * a.cells;
      index += tiles.cluster * a.warps;
      if (index < end) {
        tile = mean_tile<T>(a, tiles, data, index);
        copy.start(a, tile, loader);
      }
      if (alone) {
#pragma unroll 1
        for (int i = lane; i < count; i += kWarp) to[i] = results[i];
      } else {
        const int bits = __popc(tiles.cluster - 1);
#pragma unroll 1
        for (int i = lane; i < count << bits; i += kWarp) {
          const int cell = i >> bits;
          send_to_cluster(to + cell, all_sums, i & (tiles.cluster - 1), results[cell]);
        }
      }
      __syncwarp();
    }
  }
  __syncthreads();
  if (!alone) wait_for_bytes<true>(all_sums, 0);
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
  T* const to = y + (n_begin + row) * static_cast<int>(p.c_out) + o;
  const float2 sum = warps_sum<Tile>(parts, row, threadIdx.x % kPairs);
  if (!isfinite(sum.x) || !isfinite(sum.y)) {
    put_rare_means<T>(p, sum, bias[0], bias[1], o, outs, sums + row * depth, to);
    return;
  }
  const T values[2] = {result<T>(p, sum.x, bias[0]), result<T>(p, sum.y, bias[1])};
  put_pair(values, outs, p.group_out % 2 == 0, to);
}

}  // namespace convt_reduce::cuda
