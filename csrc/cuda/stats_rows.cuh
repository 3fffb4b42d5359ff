// What both forms of rows share: how warps read contiguous planes, for stats_planes.cuh.
//
// A span is rows that share their bands on the outer axes: a warp keeps sums per lane until a span
// ends, then adds them over its lanes into its own places, one per cell. Neighbouring lanes add
// neighbouring elements, from tiles in shared memory. Two forms hold those sums.
//
// stats_short_rows.cuh: each of a lane's sums belongs to one column band; stats_long_rows.cuh:
// there is a sum per column band.
#pragma once

#include <type_traits>

#include "cuda/axis_bands.cuh"
#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kPlaneWarps = 4;   // of a block
constexpr int kMostRooms = 8;    // of a warp, for tiles
constexpr int kPlaneLoads = 16;  // long rows: elements that a lane adds together
// A position and some steps more fit in an int32.
constexpr int64_t kNarrowPositions = int64_t{1} << 30;
constexpr int kLongRows = 1;  // in place of a number of slots
constexpr int kSlotForms[] = {4, 5, 6, 7, 8, 16};
constexpr int kMostSlots = 16;
constexpr int kMostPlaneCells = 256;

// Positions behind a tile that lanes without columns of their own read: what they read with the
// tile's last row.
CONVT_HD inline int64_t read_behind(int slots, int64_t width) { return slots * kWarp - width; }

// Index holds a position in a plane.
template <typename Index>
struct PlanesArguments {
  Input input;
  AxisBands<Index> depths;
  AxisBands<Index> rows;
  AxisBands<Index> columns;
  Index positions;   // of a plane
  int step;          // short rows: positions of the rows that the lanes' slots hold
  int step_rows;     // and those rows
  int tile;          // rows
  int columns_tile;  // long rows: columns, of which the last of a row may have less
  Index row_tiles;   // long rows: tiles of a row
  int worker_bits;   // log2 of the warps on a plane
  int cells;
  Index tiles;       // of a plane
  Index chunk;       // tiles
  int rooms;         // of a warp, each for a tile
  int rooms_at;      // where in shared memory they begin
  int room_bytes;    // of each
  bool adjacent;     // planes of a stretch lie one behind the other
  bool passing;      // all is so much that it would drive all else out of the cache
  int64_t channels;  // of a stretch in which planes are stride_c apart
  int64_t planes;
  int64_t chunks;  // of a plane
  int64_t blocks;
};

constexpr int kSumsTogether = 4;

// Adds over the lanes of a warp. Each lane gets one of the sums, that of owned_sum(lane), in the
// order of additions that each would have alone.
template <typename Acc>
__device__ __forceinline__ Acc warp_sums(const Acc (&sums)[kSumsTogether], int lane) {
  const auto other = [](Acc value, int half) { return __shfl_xor_sync(0xffffffffu, value, half); };
  const bool upper = lane & 16;
  Acc low = (upper ? sums[2] : sums[0]) + other(upper ? sums[0] : sums[2], 16);
  Acc high = (upper ? sums[3] : sums[1]) + other(upper ? sums[1] : sums[3], 16);
  const bool second = lane & 8;
  Acc sum = (second ? high : low) + other(second ? low : high, 8);
#pragma unroll
  for (int half = 4; half > 0; half /= 2) sum += other(sum, half);
  return sum;
}
__device__ inline int owned_sum(int lane) { return lane / (kWarp / kSumsTogether); }
__device__ inline bool owns_sum(int lane) { return lane % (kWarp / kSumsTogether) == 0; }

// The span that holds a row of the plane.
template <typename Index>
struct RowSpan {
  Index end = 0;   // row
  int place = -1;  // of its first cell

  __device__ RowSpan() {}
  __device__ RowSpan(const PlanesArguments<Index>& p, Index row) {
    using Unsigned = std::make_unsigned_t<Index>;
    Index depth = 0;
    if (p.depths.size > 1) {
      depth = static_cast<Unsigned>(row) / static_cast<Unsigned>(p.rows.size);
    }
    const Found<Index> band = p.rows.locate_inline(row - depth * p.rows.size);
    place = (p.depths.locate_inline(depth).band * p.rows.bands + band.band) * p.columns.bands;
    end = depth * p.rows.size + band.end;
  }
};

}  // namespace convt_reduce::cuda
