// Stats for small planes: stats_small_tile.cuh.
#pragma once

#include "cuda/stats_small_tile.cuh"

namespace convt_reduce::cuda {

// What the blocks of a turn do: of the tiles that are left to each warp, three eighths. So blocks
// are few, since each makes a list, and the last ones are short, since processors run empty
// meanwhile.
struct SmallTurn {
  int64_t block;  // of the turn
  int64_t done;   // tiles of a warp of each turn before
  int64_t tiles;  // of a warp

  CONVT_HD SmallTurn(int64_t at, int64_t turn_blocks, int64_t warp_tiles) : block(at), done(0) {
    for (; block >= turn_blocks; block -= turn_blocks) {
      done += share_of(warp_tiles - done);
    }
    tiles = share_of(warp_tiles - done);
  }
  CONVT_HD static int64_t share_of(int64_t tiles) { return (tiles * 3 + 7) / 8; }
};

// Shared memory: cells [cells], order [positions], and for each warp results [planes][cells] and
// the tile.
template <int kLanes, int kTogether, typename T>
__global__ void __launch_bounds__(kSmallWarps* kWarp)
    stats_small_kernel(const __grid_constant__ SmallArguments p, AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int kGroups = kWarp / kLanes;
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  __shared__ uint64_t barriers[kSmallWarps];
  __shared__ int wide_cells;
  ListedCell* cells = reinterpret_cast<ListedCell*>(shared);
  unsigned short* order = reinterpret_cast<unsigned short*>(shared + p.order_at);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  unsigned char* mine = shared + p.warps_at + warp * p.warp_bytes;
  Acc* results = reinterpret_cast<Acc*>(mine);
  Loader loader(barriers + warp, 1, p.gap == 0 ? 1 : kGroups);
  const SmallLoad copy(p, sizeof(T), mine + p.tile_at);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const SmallTurn turn(blockIdx.x, p.turn_blocks, p.warp_tiles);
  const int64_t step = p.turn_blocks * p.warps;
  int64_t index = turn.done * step + turn.block * p.warps + warp;
  const int64_t end = warp < p.warps ? min(index + turn.tiles * step, p.all_tiles) : index;
  SmallTile tile = {};
  if (index < end) {
    tile = SmallTile::at<T>(p, address_of(p.data), index);
    copy.start(p, tile, loader);
  }
  // The list is made while the first tiles are on their way. The last warp lists the cells, and the
  // elements only if it has tiles too.
  const int last = blockDim.x / kWarp - 1;
  if (warp == last) {
    const int wide = list_cells(p.plane, kNarrow, cells);
    if (lane == 0) wide_cells = wide;
  }
  const int list_warps = max(p.warps, last);
  if (warp < list_warps) list_elements(p.plane, sizeof(T), warp, list_warps, order);
  __syncthreads();
  const int wide = wide_cells;
  while (index < end) {
    loader.wait(0, 0);
    sum_tile<kLanes, kTogether, T>(p, copy.data_of(p, tile), cells, wide, order, results);
    Acc* to = cell_sums + tile.first * p.cells;
    const int count = tile.planes * p.cells;
    index += step;
    if (index < end) {
      tile = SmallTile::at<T>(p, address_of(p.data), index);
      copy.start(p, tile, loader);
    } else {
      __syncwarp();
    }
#pragma unroll 1
    for (int i = lane; i < count; i += kWarp) to[i] = results[i];
  }
}

}  // namespace convt_reduce::cuda
