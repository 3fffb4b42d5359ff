// How warps add up rows of contiguous planes, for stats_planes.cuh.
//
// Lanes read neighbouring elements, so that a load is a stretch of memory whose cost does not
// depend on alignment, and many loads are on their way before the first is used. A run is rows that
// share their bands on the outer axes: a warp keeps sums per lane until a run ends, then adds them
// over its lanes into its own places, one per cell. Two forms hold those sums:
//
// - short rows: a tile is whole rows. A lane stays on its own columns, so that each of its sums
//   belongs to one column band. Width 7, what lanes 0 to 27 read first:
//
//       0  1  2  3  4  5  6
//       7  8  9 10 11 12 13
//      14 15 ...
//
// - long rows: a tile is a piece of a row. There is a sum per column band.
//
// Elements of 16 bits are read in pairs where rows have an even number of them, and pairs are words
// unless the plane begins between two.
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

// What a lane reads at a time: kSize elements, one or, of 16 bits, two.
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
  int step;         // short rows: positions of the rows that a lane's slots hold
  int tile;  // short rows: rows; long rows: columns, of which the last of a row may have less
  Index row_tiles;  // long rows: tiles of a row
  int worker_bits;  // log2 of the warps on a plane
  int cells;
  Index tiles;       // of a plane
  Index chunk;       // tiles
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

// The run that holds a row of the plane.
template <typename Index>
struct Run {
  Index end = 0;   // row
  int place = -1;  // of its first cell

  __device__ Run() {}
  __device__ Run(const PlanesArguments<Index>& p, Index row) {
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

// A warp's sums of rows that lanes share by columns. kSlots loads hold at least a row.
template <int kSlots, int kSize, bool kWords, typename T, typename Index>
class ShortRows {
 public:
  using Acc = AccumulateOf<T>;

  __device__ ShortRows(const PlanesArguments<Index>& p, int lane)
      : p_(p), first_(lane * kSize), sums_{}, other_{} {}

  __device__ void add_tile(const T* plane, Index tile, Acc* places) {
    Index row = tile * p_.tile;
    const Index left = p_.depths.size * p_.rows.size - row;
    const Index last = row + (left < p_.tile ? left : p_.tile);
    while (row < last) {
      if (row >= run_.end) move_to(Run<Index>(p_, row), places);
      const Index stop = run_.end < last ? run_.end : last;
      add_rows(plane, row, static_cast<int>(stop - row));
      row = stop;
    }
  }

  // Moves all sums to their places.
  __device__ void finish(Acc* places) {
    put_down(places, run_.place);
    run_ = Run<Index>();
    if constexpr (kKeepsTwo) {
      swap_sums();
      put_down(places, other_place_);
      other_place_ = -1;
    }
  }

 private:
  using From = Load<T, kSize>;
  static constexpr int kStep = From::kStep;
  static constexpr int kSteps = kPlaneLoads / kSlots;
  // In three dimensions runs alternate between two places, slice by slice. Where registers are many
  // already, fewer warps at a time would cost more than that.
  static constexpr bool kKeepsTwo = kSlots == 4 && kSize == 1;

  __device__ void move_to(const Run<Index>& next, Acc* places) {
    if (next.place != run_.place) {
      int place = run_.place;
      if constexpr (kKeepsTwo) {
        swap_sums();
        place = other_place_;
        other_place_ = run_.place;
      }
      if (place != next.place) put_down(places, place);
    }
    run_ = next;
  }

  __device__ void swap_sums() {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc sum = sums_[k][j];
        sums_[k][j] = other_[k][j];
        other_[k][j] = sum;
      }
    }
  }

  // Up to a tile of rows of one run.
  __device__ void add_rows(const T* plane, Index row, int rows) {
    const Index position = row * p_.columns.size;
    const T* from = plane + position + first_;
    const int size = rows * static_cast<int>(p_.columns.size);
    typename From::Raw raw[kSteps][kSlots];
    if (size == kSteps * p_.step &&
        p_.positions - position >= (kSteps - 1) * p_.step + kSlots * kStep) {
      // Lanes behind the rows of a step read what comes next; their sums are dropped.
#pragma unroll
      for (int s = 0; s < kSteps; ++s, from += p_.step) {
#pragma unroll
        for (int k = 0; k < kSlots; ++k) raw[s][k] = From::template whole<kWords>(from + k * kStep);
      }
    } else {
      int left = size;
#pragma unroll
      for (int s = 0; s < kSteps; ++s, from += p_.step, left -= p_.step) {
        const int limit = (left < p_.step ? left : p_.step) - first_;
#pragma unroll
        for (int k = 0; k < kSlots; ++k) {
          raw[s][k] = From::template part<kWords>(from + k * kStep, limit - k * kStep);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        Acc values[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) values[s] = From::element(raw[s][k], j);
        sums_[k][j] += halves_sum(values);
      }
    }
  }

  // Moves sums_ to a place, and leaves zeros.
  __device__ void put_down(Acc* places, int place) {
    if (place < 0) return;
    const int width = static_cast<int>(p_.columns.size);
    const int advance = kStep % width;
    const int column = first_ % width;  // of the first slot
    for (int band = 0; band < p_.columns.bands; ++band) {
      const int begin = static_cast<int>(p_.columns.begin[band]);
      const int size = static_cast<int>(p_.columns.end(band)) - begin;
      Acc sum = 0;
      int at = column;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const int of = j == 0 || at + 1 < width ? at + j : 0;
          const bool here = static_cast<unsigned>(of - begin) < static_cast<unsigned>(size);
          const bool real = first_ + k * kStep + j < p_.step;
          sum += here && real ? sums_[k][j] : Acc(0);
        }
        at += advance;
        if (at >= width) at -= width;
      }
      sum = warp_sum(sum);
      if (first_ == 0) places[place + band] += sum;
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) sums_[k][j] = 0;
    }
  }

  const PlanesArguments<Index>& p_;
  int first_;  // this lane's first element of a step
  Run<Index> run_;
  int other_place_ = -1;
  Acc sums_[kSlots][kSize];                   // of the run's place
  Acc other_[kKeepsTwo ? kSlots : 1][kSize];  // of the place before it
};

// A warp's sums of long rows, one per column band.
template <int kSize, bool kWords, typename T, typename Index>
class LongRows {
 public:
  using Acc = AccumulateOf<T>;

  __device__ LongRows(const PlanesArguments<Index>& p, int lane)
      : p_(p), first_(lane * kSize), sums_{}, lost_{} {}

  __device__ void add_tile(const T* plane, Index tile, Acc* places) {
    using Unsigned = std::make_unsigned_t<Index>;
    const Index row = static_cast<Unsigned>(tile) / static_cast<Unsigned>(p_.row_tiles);
    if (row >= run_.end) {
      const Run<Index> next(p_, row);
      if (next.place != run_.place) put_down(places);
      run_ = next;
    }
    const Index begin = (tile - row * p_.row_tiles) * p_.tile;
    const int size = static_cast<int>(min(Index{p_.tile}, p_.columns.size - begin));
    Raw raw[kPlaneLoads];
    load_all(plane + (row * p_.columns.size + begin) + first_, size, raw);
    Index band_begin = p_.columns.begin[0] - begin;  // seen from the tile
#pragma unroll
    for (int band = 0; band < kKept; ++band) {
      if (band >= p_.columns.bands) break;
      const Index band_end = p_.columns.begin[band + 1] - begin;
      add_exactly(sums_[band], lost_[band], sum_of(raw, size, band_begin, band_end));
      band_begin = band_end;
    }
    for (int band = kKept; band < p_.columns.bands; ++band) {
      const Acc sum =
          warp_sum(sum_of(raw, size, p_.columns.begin[band] - begin, p_.columns.end(band) - begin));
      if (first_ == 0) places[run_.place + band] += sum;
    }
  }

  __device__ void finish(Acc* places) {
    put_down(places);
    run_ = Run<Index>();
  }

 private:
  using From = Load<T, kSize>;
  using Raw = typename From::Raw;
  static constexpr int kStep = From::kStep;
  static constexpr int kKept = 4;  // bands that have a sum per lane
  static_assert(kKept < kInlineBands, "a kept band's end is the next one's begin");

  __device__ void load_all(const T* from, int size, Raw (&raw)[kPlaneLoads]) const {
    if (size == kPlaneLoads * kStep) {
#pragma unroll
      for (int k = 0; k < kPlaneLoads; ++k) {
        raw[k] = From::template whole<kWords>(from + k * kStep);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kPlaneLoads; ++k) {
      if (k * kStep + kStep <= size) {
        raw[k] = From::template whole<kWords>(from + k * kStep);
      } else {
        raw[k] = From::template part<kWords>(from + k * kStep, size - first_ - k * kStep);
      }
    }
  }

  // The lane's part of [from, to) of a tile; what lies outside the tile does not count.
  __device__ __forceinline__ Acc sum_of(const Raw (&raw)[kPlaneLoads], int size, Index from,
                                        Index to) const {
    Acc sum = 0;
    if (from >= size || to <= 0) return sum;
    if (from <= 0 && to >= size) {
      Acc values[kPlaneLoads];
#pragma unroll
      for (int k = 0; k < kPlaneLoads; ++k) {
        values[k] = From::element(raw[k], 0);
        if constexpr (kSize == 2) values[k] += From::element(raw[k], 1);
      }
      return halves_sum(values);
    }
    const int begin = from > 0 ? static_cast<int>(from) : 0;
    const int end = to < size ? static_cast<int>(to) : size;
#pragma unroll
    for (int k = 0; k < kPlaneLoads; ++k) {
      if (k * kStep + kStep <= begin || k * kStep >= end) continue;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const int at = k * kStep + first_ + j;
        sum += at >= begin && at < end ? From::element(raw[k], j) : Acc(0);
      }
    }
    return sum;
  }

  __device__ void put_down(Acc* places) {
    if (run_.place < 0) return;
#pragma unroll
    for (int band = 0; band < kKept; ++band) {
      if (band >= p_.columns.bands) break;
      const Acc sum = warp_sum(settled(sums_[band], lost_[band]));
      if (first_ == 0) places[run_.place + band] += sum;
      sums_[band] = lost_[band] = 0;
    }
  }

  const PlanesArguments<Index>& p_;
  int first_;
  Run<Index> run_;
  Acc sums_[kKept];
  Acc lost_[kKept];  // what the additions to them lost to rounding
};

// The tiles of one chunk of a plane that are a warp's, into its places.
template <typename Sums, typename T, typename Index, typename Acc>
__device__ inline void add_tiles(const PlanesArguments<Index>& p, const T* plane, Index tile,
                                 Index end, Acc* places) {
  Sums sums(p, threadIdx.x % kWarp);
  const int step = 1 << p.worker_bits;
  for (; tile < end; tile += step) sums.add_tile(plane, tile, places);
  sums.finish(places);
}

}  // namespace convt_reduce::cuda
