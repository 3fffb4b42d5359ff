// Stats for small planes whose channels lie one behind the other: a few lanes per plane. Where
// channels are neighbours in memory instead, those of an image are one plane with more cells.
//
// Every warp works by itself: it copies a tile of planes to shared memory and adds it up, while
// other warps wait for theirs. Which element belongs to which cell is found out once per block:
// `order` lists the elements of a plane, cell by cell, and the plane's shape no longer matters. A
// wide cell is walked by a group of kLanes lanes, for kTogether planes at the same time, and then
// for the group's next planes; a narrow one by a lane for each plane.
#pragma once

#include "cuda/element_list.cuh"
#include "cuda/staging.cuh"

namespace convt_reduce::cuda {

constexpr int kNarrow = 16;     // elements of a cell that one lane walks alone, at most
constexpr int kSmallWarps = 8;  // of a block, at most
constexpr int64_t kSmallTileBytes = 9 * 1024 + 512;
constexpr int64_t kSmallTileCells = 1024;  // of all planes of a tile

struct SmallArguments {
  const void* data;
  int64_t stretch_bytes;  // from one stretch of adjacent planes to the next
  ListedPlane plane;
  int warps;       // of a block that have tiles
  int positions;   // of a plane, in all its channels,
  int cells;       // and its cells
  int per_tile;    // planes
  int group_bits;  // log2 of the planes of a group, in a tile
  int gap;         // bytes between the planes of two groups in shared memory
  int order_at;    // where in shared memory `order` begins,
  int warps_at;    // what the warps keep there,
  int warp_bytes;  // each of them,
  int tile_at;     // and its tile in that, behind the results
  int64_t planes;  // of a stretch
  int64_t tiles;   // of a stretch
  int64_t all_tiles;
  int64_t turn_blocks;  // that run at the same time, about
  int64_t warp_tiles;   // of a warp of each turn, together
};

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

// A tile of planes: where it lies.
struct SmallTile {
  uintptr_t begin;
  uintptr_t limit_begin;
  uintptr_t limit_end;
  int64_t first;  // plane, of all
  int planes;

  template <typename T>
  __device__ static SmallTile at(const SmallArguments& p, int64_t index) {
    const int plane_bytes = p.positions * static_cast<int>(sizeof(T));
    const int64_t stretch = index < p.tiles ? 0 : quotient(index, p.tiles);
    const int64_t first = (index - stretch * p.tiles) * p.per_tile;
    SmallTile tile;
    tile.limit_begin = address_of(p.data) + stretch * p.stretch_bytes;
    tile.limit_end = tile.limit_begin + p.planes * plane_bytes;
    tile.begin = tile.limit_begin + first * plane_bytes;
    tile.first = stretch * p.planes + first;
    tile.planes = static_cast<int>(min(int64_t{p.per_tile}, p.planes - first));
    return tile;
  }
};

template <typename T>
__device__ inline AccumulateOf<T> element_at(const unsigned char* at) {
  return widen(*reinterpret_cast<const T*>(at));
}

// A lane's share of a wide cell, for the planes at `from`.
template <int kLanes, int kTogether, typename T>
__device__ __forceinline__ void sum_wide(const unsigned char* const (&from)[kTogether],
                                         const unsigned short* order, int count, int lane,
                                         AccumulateOf<T> (&sums)[kTogether]) {
  using Acc = AccumulateOf<T>;
  constexpr int kFull = 8;
  constexpr int kRest = 4;
  order += lane;
#pragma unroll
  for (int i = 0; i < kTogether; ++i) sums[i] = 0;
#pragma unroll 1
  for (; count >= kFull * kLanes; count -= kFull * kLanes, order += kFull * kLanes) {
    int offset[kFull];
#pragma unroll
    for (int k = 0; k < kFull; ++k) offset[k] = order[k * kLanes];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      Acc values[kFull];
#pragma unroll
      for (int k = 0; k < kFull; ++k) values[k] = element_at<T>(from[i] + offset[k]);
      sums[i] += halves_sum(values);
    }
  }
#pragma unroll 1
  for (; count > 0; count -= kRest * kLanes, order += kRest * kLanes) {
    int offset[kRest];
#pragma unroll
    for (int k = 0; k < kRest; ++k) offset[k] = lane + k * kLanes < count ? order[k * kLanes] : 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      Acc values[kRest];
#pragma unroll
      for (int k = 0; k < kRest; ++k) {
        const Acc value = element_at<T>(from[i] + offset[k]);
        values[k] = lane + k * kLanes < count ? value : Acc(0);
      }
      sums[i] += halves_sum(values);
    }
  }
}

// Adds over the lanes of a group. Of two planes, the lower lanes get the first and the upper lanes
// the second, in the same order of additions.
template <int kLanes, int kTogether, typename Acc>
__device__ __forceinline__ Acc group_sum(const Acc (&sums)[kTogether], int lane) {
  static_assert(kTogether <= 2 && kLanes >= kTogether, "a lane keeps the sum of one plane");
  Acc sum = sums[0];
  int half = kLanes / 2;
  if constexpr (kTogether == 2) {
    const bool upper = lane & half;
    sum =
        (upper ? sums[1] : sums[0]) + __shfl_xor_sync(0xffffffffu, upper ? sums[0] : sums[1], half);
    half /= 2;
  }
#pragma unroll
  for (; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
  return sum;
}

// results [planes][cells] of a tile. There is room for all planes of all groups; what lies behind
// the last one of the tile is added up for nothing.
template <int kLanes, int kTogether, typename T>
__device__ inline void sum_tile(const SmallArguments& p, const unsigned char* tile,
                                const ListedCell* cells, int wide, const unsigned short* order,
                                AccumulateOf<T>* results) {
  using Acc = AccumulateOf<T>;
  constexpr int kGroups = kWarp / kLanes;
  constexpr int kOwners = kLanes / kTogether;  // lanes that have a plane's sum
  const int plane_bytes = p.positions * static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % kWarp;
  const int group_planes = 1 << p.group_bits;
  const int group_bytes = group_planes * plane_bytes + p.gap;
  const int group = lane / kLanes;
#pragma unroll 1
  for (int plane = 0; plane < group_planes; plane += kTogether) {
    const unsigned char* from[kTogether];
    from[0] = tile + group * group_bytes + plane * plane_bytes;
    if constexpr (kTogether == 2) from[1] = from[0] + plane_bytes;
    const int own = group * group_planes + plane + lane % kLanes / kOwners;
#pragma unroll 1
    for (int i = 0; i < wide; ++i) {
      const ListedCell cell = cells[i];
      Acc sums[kTogether];
      sum_wide<kLanes, kTogether, T>(from, order + cell.begin, cell.end - cell.begin, lane % kLanes,
                                     sums);
      const Acc sum = group_sum<kLanes>(sums, lane);
      if (lane % kOwners == 0) results[own * p.cells + cell.cell] = sum;
    }
  }
  // Neighbouring lanes take planes of different groups, which meet in no bank.
  const int planes = kGroups * group_planes;
#pragma unroll 1
  for (int i = lane; i < (p.cells - wide) * planes; i += kWarp) {
    const ListedCell cell = cells[wide + (i / kGroups >> p.group_bits)];
    const int of_group = i / kGroups & (group_planes - 1);
    const unsigned char* at = tile + i % kGroups * group_bytes + of_group * plane_bytes;
    Acc sum = 0;
#pragma unroll 4
    for (int e = cell.begin; e < cell.end; ++e) sum += element_at<T>(at + order[e]);
    results[(i % kGroups * group_planes + of_group) * p.cells + cell.cell] = sum;
  }
}

// Shared memory: cells [cells], order [positions], and for each warp results [planes][cells] and
// the tile.
template <int kLanes, int kTogether, typename T>
__global__ void __launch_bounds__(kSmallWarps* kWarp)
    stats_small_kernel(const __grid_constant__ SmallArguments p, AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int kGroups = kWarp / kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t barriers[kSmallWarps];
  __shared__ int wide_cells;
  ListedCell* cells = reinterpret_cast<ListedCell*>(shared);
  unsigned short* order = reinterpret_cast<unsigned short*>(shared + p.order_at);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  unsigned char* mine = shared + p.warps_at + warp * p.warp_bytes;
  Acc* results = reinterpret_cast<Acc*>(mine);
  const int plane_bytes = p.positions * static_cast<int>(sizeof(T));
  Loader loader(barriers + warp, 1, p.gap == 0 ? 1 : kGroups);
  // All groups' planes are one stretch where nothing is between them.
  const int group_planes = 1 << p.group_bits;
  const auto load = [&](const SmallTile& tile) {
    const int together = p.gap == 0 ? tile.planes : group_planes;
    const int stretches = p.gap == 0 ? 1 : (tile.planes + group_planes - 1) >> p.group_bits;
    loader.start(0, stretches, tile.limit_begin, tile.limit_end, [&](int stretch) {
      const int first = stretch << p.group_bits;
      const uintptr_t begin = tile.begin + first * plane_bytes;
      return Stretch{begin, begin + min(together, tile.planes - first) * plane_bytes,
                     mine + p.tile_at + stretch * (group_planes * plane_bytes + p.gap)};
    });
  };
  wait_for_previous_kernel();
  let_next_kernel_start();

  const SmallTurn turn(blockIdx.x, p.turn_blocks, p.warp_tiles);
  const int64_t step = p.turn_blocks * p.warps;
  int64_t index = turn.done * step + turn.block * p.warps + warp;
  const int64_t end = warp < p.warps ? min(index + turn.tiles * step, p.all_tiles) : index;
  SmallTile tile = {};
  if (index < end) {
    tile = SmallTile::at<T>(p, index);
    load(tile);
  }
  // The list is made while the first tiles are on their way. The last warp lists the cells, and the
  // elements only if it has tiles too.
  const int last = blockDim.x / kWarp - 1;
  if (warp == last) {
    const int wide = list_cells(p.plane, kNarrow, cells);
    if (lane == 0) wide_cells = wide;
  }
  const int list_warps = max(p.warps, last);
  if (warp < list_warps) list_elements(p.plane, sizeof(T), list_warps, order);
  __syncthreads();
  const int wide = wide_cells;
  while (index < end) {
    loader.wait(0, 0);
    sum_tile<kLanes, kTogether, T>(p, mine + p.tile_at + phase_of(tile.begin), cells, wide, order,
                                   results);
    Acc* to = cell_sums + tile.first * p.cells;
    const int count = tile.planes * p.cells;
    index += step;
    if (index < end) {
      tile = SmallTile::at<T>(p, index);
      load(tile);
    } else {
      __syncwarp();
    }
#pragma unroll 1
    for (int i = lane; i < count; i += kWarp) to[i] = results[i];
  }
}

}  // namespace convt_reduce::cuda
