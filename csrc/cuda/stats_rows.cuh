// What both forms of rows share: how warps read contiguous planes, for stats_planes.cuh.
//
// A span is rows that share their bands on the outer axes: a warp keeps sums per lane until a span
// ends, then adds them over its lanes into its own places, one per cell. Neighbouring lanes read
// neighbouring elements. Two forms hold those sums.
//
// stats_short_rows.cuh: each of a lane's sums belongs to one column band, and tiles pass through
// shared memory; stats_long_rows.cuh: there is a sum per column band, and many loads are on their
// way before the first is used. There elements of 16 bits are read in pairs where rows have an even
// number of them, and pairs are words unless the plane begins between two.
#pragma once

#include <type_traits>

#include "cuda/axis_bands.cuh"
#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kPlaneWarps = 4;   // of a block
constexpr int kPlaneLoads = 16;  // on their way together, per lane
// A position and some steps more fit in an int32.
constexpr int64_t kNarrowPositions = int64_t{1} << 30;
constexpr int kLongRows = 1;  // in place of a number of slots
constexpr int kSlotForms[] = {4, 8, 16};
constexpr int kMostSlots = 16;

// Room in shared memory for a tile of short rows, and behind it for lanes that read on.
CONVT_HD inline int64_t room_bytes(int64_t positions, int slots, int64_t element_bytes) {
  return round_up((positions + slots * kWarp) * element_bytes, kVectorBytes) + kVectorBytes;
}

// Long rows: what a lane reads at a time: kSize elements, one or, of 16 bits, two.
template <typename T, int kSize>
struct Load {
  using Raw = std::conditional_t<sizeof(T) == 2, unsigned, T>;
  static constexpr int kStep = kWarp * kSize;  // what a warp reads at a time

  // All of it.
  template <bool kWords>
  __device__ static Raw whole(const T* from) {
    if constexpr (sizeof(T) != 2) {
      return __ldg(from);
    } else {
      const auto* halves = reinterpret_cast<const unsigned short*>(from);
      if constexpr (kSize == 1) return __ldg(halves);
      if constexpr (kWords) return __ldg(reinterpret_cast<const unsigned*>(from));
      return __ldg(halves) | unsigned{__ldg(halves + 1)} << 16;
    }
  }

  // The first `count` elements, and then zeros.
  template <bool kWords>
  __device__ static Raw part(const T* from, int count) {
    if (count >= kSize) return whole<kWords>(from);
    if constexpr (kSize == 2) {
      if (count == 1) return __ldg(reinterpret_cast<const unsigned short*>(from));
    }
    return 0;
  }

  __device__ static AccumulateOf<T> element(Raw raw, int j) {
    if constexpr (sizeof(T) != 2) {
      return raw;
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(j == 0 ? raw << 16 : raw & 0xffff0000u);
    } else {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(j == 0 ? raw : raw >> 16)));
    }
  }
};

// Index holds a position in a plane.
template <typename Index>
struct PlanesArguments {
  Input input;
  AxisBands<Index> depths;
  AxisBands<Index> rows;
  AxisBands<Index> columns;
  Index positions;  // of a plane
  int step;         // short rows: positions of the rows that the lanes' slots hold
  int step_rows;    // and those rows
  int tile;  // short rows: rows; long rows: columns, of which the last of a row may have less
  Index row_tiles;  // long rows: tiles of a row
  int worker_bits;  // log2 of the warps on a plane
  int cells;
  Index tiles;       // of a plane
  Index chunk;       // tiles
  int rooms;         // short rows: tiles that a warp loads together
  int rooms_at;      // where in shared memory they begin
  int room_bytes;    // of each
  bool adjacent;     // planes of a stretch lie one behind the other
  int64_t channels;  // of a stretch in which planes are stride_c apart
  int64_t planes;
  int64_t chunks;  // of a plane
  int64_t blocks;
};

template <typename Acc>
__device__ inline Acc warp_sum(Acc sum) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
  return sum;
}

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
    const Found<Index> band = p.rows.locate(row - depth * p.rows.size);
    place = (p.depths.locate(depth).band * p.rows.bands + band.band) * p.columns.bands;
    end = depth * p.rows.size + band.end;
  }
};

}  // namespace convt_reduce::cuda
