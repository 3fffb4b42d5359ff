// Small planes whose channels lie one behind the other: a few lanes per plane. Where
// channels are neighbours in memory instead, those of an image are one plane with more cells.
//
// Every warp works by itself: it copies a tile of planes to shared memory and adds it up, while
// other warps wait for theirs. Which element belongs to which cell is found out once per block:
// `order` lists the elements of a plane, cell by cell, and the plane's shape no longer matters. A
// wide cell is walked by a group of kLanes lanes, for kTogether planes at the same time, and then
// for the group's next planes; a narrow one by a lane for each plane.
#pragma once

#include <type_traits>

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

// A tile of planes: where it lies.
struct SmallTile {
  uintptr_t begin;
  uintptr_t limit_begin;
  uintptr_t limit_end;
  int64_t first;  // plane, of all
  int planes;

  // Of the planes at `data`.
  template <typename T>
  __device__ static SmallTile at(const SmallArguments& p, uintptr_t data, int64_t index) {
    const int plane_bytes = p.positions * static_cast<int>(sizeof(T));
    const int64_t stretch = index < p.tiles ? 0 : quotient(index, p.tiles);
    const int64_t first = (index - stretch * p.tiles) * p.per_tile;
    SmallTile tile;
    tile.limit_begin = data + stretch * p.stretch_bytes;
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
template <int kLanes, int kTogether, typename T, int kUnroll = 1>
__device__ __forceinline__ void sum_wide(const unsigned char* const (&from)[kTogether],
                                         const unsigned short* order, int count, int lane,
                                         AccumulateOf<T> (&sums)[kTogether]) {
  using Acc = AccumulateOf<T>;
  constexpr int kFull = 8;
  constexpr int kRest = 4;
  order += lane;
#pragma unroll
  for (int i = 0; i < kTogether; ++i) sums[i] = 0;
#pragma unroll kUnroll
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

// Copies tiles of a plan to one place. All groups' planes are one stretch where nothing is between
// them.
class SmallLoad {
 public:
  __device__ SmallLoad(const SmallArguments& p, int element_bytes, unsigned char* to)
      : plane_bytes_(p.positions * element_bytes), group_planes_(1 << p.group_bits), to_(to) {}

  __device__ __forceinline__ void start(const SmallArguments& p, const SmallTile& tile,
                                        Loader& loader) const {
    loader.start(0, stretches(p, tile), tile.limit_begin, tile.limit_end,
                 [&](int number) { return stretch(p, tile, number); });
  }

  __device__ __forceinline__ int stretches(const SmallArguments& p, const SmallTile& tile) const {
    return p.gap == 0 ? 1 : (tile.planes + group_planes_ - 1) >> p.group_bits;
  }
  __device__ __forceinline__ Stretch stretch(const SmallArguments& p, const SmallTile& tile,
                                             int number) const {
    const int together = p.gap == 0 ? tile.planes : group_planes_;
    const int first = number << p.group_bits;
    const uintptr_t begin = tile.begin + first * plane_bytes_;
    unsigned char* const to = to_ + number * (group_planes_ * plane_bytes_ + p.gap);
    return Stretch{begin, begin + min(together, tile.planes - first) * plane_bytes_,
                   p.gap == 0 ? in_lines(to, begin) : to};
  }

  // Where the tile's first plane begins in its copy.
  __device__ const unsigned char* data_of(const SmallArguments& p, const SmallTile& tile) const {
    return to_ + (p.gap == 0 ? line_phase_of(tile.begin) : phase_of(tile.begin));
  }

 private:
  int plane_bytes_;
  int group_planes_;
  unsigned char* to_;
};

// Calls run(lanes) with a plan's lanes as a constant.
template <typename Run>
cudaError_t with_small_lanes(int lanes, const Run& run) {
  if (lanes == 2) return run(std::integral_constant<int, 2>{});
  if (lanes == 4) return run(std::integral_constant<int, 4>{});
  if (lanes == 8) return run(std::integral_constant<int, 8>{});
  if (lanes == 16) return run(std::integral_constant<int, 16>{});
  return run(std::integral_constant<int, kWarp>{});
}

// Planes of a group in tiles that may have `share` planes. The sums do not depend on it.
template <int kLanes, int kTogether, typename T>
int64_t small_group(const SmallArguments& p, int64_t share) {
  constexpr int64_t kGroups = kWarp / kLanes;
  int64_t group = kTogether;
  while (2 * kGroups * group * p.positions * static_cast<int64_t>(sizeof(T)) <= kSmallTileBytes &&
         2 * kGroups * group * p.cells <= kSmallTileCells && 2 * kGroups * group <= share) {
    group *= 2;
  }
  return group;
}

// Where everything lies in shared memory from `begin` on, with groups of so many planes and room
// for so many planes in a tile.
template <int kLanes, typename T>
void lay_out_small(int64_t group, int64_t planes, int64_t begin, SmallArguments& p) {
  constexpr int64_t kBankBytes = 128;  // of all banks
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  const int64_t plane = p.positions * kBytes;
  while ((1 << p.group_bits) < group) ++p.group_bits;
  // Where groups would meet in the same banks, the next begins behind the lanes of this one.
  if (kLanes < kWarp && group * plane % kVectorBytes == 0) {
    const int64_t lanes = round_up(kLanes * kBytes, kVectorBytes);
    p.gap = static_cast<int>((lanes + kBankBytes - group * plane % kBankBytes) % kBankBytes);
  }
  p.order_at = static_cast<int>(begin + p.cells * sizeof(ListedCell));
  p.warps_at = static_cast<int>(
      round_up(p.order_at + p.positions * static_cast<int64_t>(sizeof(short)), kLineBytes));
  p.tile_at = static_cast<int>(
      round_up(planes * p.cells * static_cast<int64_t>(sizeof(AccumulateOf<T>)), kLineBytes));
  p.warp_bytes = static_cast<int>(
      p.tile_at + line_place_bytes(ceil_div(planes, group) * (group * plane + p.gap)));
}

}  // namespace convt_reduce::cuda
