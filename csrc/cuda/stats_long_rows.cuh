// Sums of long rows: a tile is a piece of a row, or a few rows, and there is a sum per column band.
#pragma once

#include "cuda/staging.cuh"
#include "cuda/stats_rows.cuh"

namespace convt_reduce::cuda {

// A warp's sums of long rows, one per column band. Tiles pass through shared memory.
template <typename T, typename Index>
class LongRows {
 public:
  using Acc = AccumulateOf<T>;

  __device__ LongRows(const PlanesArguments<Index>& p, const T* plane)
      : p_(p), plane_(plane), lane_(threadIdx.x % kWarp), sums_{}, lost_{} {}

  // Where a tile is, and the room it goes to.
  __device__ Stretch tile_at(Index tile, unsigned char* room) const {
    const Piece piece(p_, tile);
    const T* from = plane_ + (piece.row * p_.columns.size + piece.begin);
    const int count =
        p_.row_tiles == 1 ? piece.rows * static_cast<int>(p_.columns.size) : piece.size;
    const uintptr_t begin = address_of(from);
    return {begin, address_of(from + count), in_lines(room, begin)};
  }

  __device__ void prepare(Index) {}

  // Adds a tile that has arrived.
  __device__ void add_tile(Index tile, const unsigned char* room, Acc* places) {
    const Piece piece(p_, tile);
    const T* origin = plane_ + (piece.row * p_.columns.size + piece.begin);
    const T* from = reinterpret_cast<const T*>(room + line_phase_of(address_of(origin)));
    for (int i = 0; i < piece.rows; ++i, from += piece.size) {
      if (piece.row + i >= span_.end) {
        const RowSpan<Index> next(p_, piece.row + i);
        if (next.place != span_.place) put_down(places);
        span_ = next;
      }
      add_row(from, piece.begin, piece.size, places);
    }
  }

  // Moves all sums to their places.
  __device__ void finish(Acc* places) {
    put_down(places);
    span_ = RowSpan<Index>();
  }

 private:
  static constexpr int kKept = kSumsTogether;  // bands that have a sum per lane
  static_assert(kKept < kInlineBands, "a kept band's end is the next one's begin");

  struct Piece {
    Index row;
    int rows;
    Index begin;  // column
    int size;     // columns
    __device__ Piece(const PlanesArguments<Index>& p, Index tile) {
      using Unsigned = std::make_unsigned_t<Index>;
      const Index all_rows = p.depths.size * p.rows.size;
      const Index run = p.row_tiles == 1
                            ? tile
                            : static_cast<Unsigned>(tile) / static_cast<Unsigned>(p.row_tiles);
      row = run * p.tile;
      rows = static_cast<int>(min(Index{p.tile}, all_rows - row));
      begin = (tile - run * p.row_tiles) * p.columns_tile;
      size = static_cast<int>(min(Index{p.columns_tile}, p.columns.size - begin));
    }
  };

  // Columns [begin, begin + size) of a row.
  __device__ void add_row(const T* from, Index begin, int size, Acc* places) {
    const Index end = begin + size;
#pragma unroll
    for (int band = 0; band < kKept; ++band) {
      if (band >= p_.columns.bands) break;
      const Index first = max(p_.columns.begin[band], begin);
      const Index last = min(p_.columns.begin[band + 1], end);
      if (first < last) {
        add_range(from + (first - begin), static_cast<int>(last - first), sums_[band], lost_[band]);
      }
    }
    for (int band = kKept; band < p_.columns.bands; band += kSumsTogether) {
      Acc sums[kSumsTogether] = {};
#pragma unroll
      for (int i = 0; i < kSumsTogether; ++i) {
        if (band + i >= p_.columns.bands) break;
        const Index first = max(p_.columns.begin[band + i], begin);
        const Index last = min(p_.columns.end(band + i), end);
        Acc lost = 0;
        if (first < last) {
          add_range(from + (first - begin), static_cast<int>(last - first), sums[i], lost);
        }
        sums[i] = settled(sums[i], lost);
      }
      put_sums(sums, band, places);
    }
  }

  // The lane's part of `count` elements.
  __device__ __forceinline__ void add_range(const T* from, int count, Acc& sum, Acc& lost) const {
    constexpr int kRest = 4;
    from += lane_;
#pragma unroll 1
    for (; count >= kPlaneLoads * kWarp;
         count -= kPlaneLoads * kWarp, from += kPlaneLoads * kWarp) {
      Acc values[kPlaneLoads];
#pragma unroll
      for (int k = 0; k < kPlaneLoads; ++k) values[k] = widen(from[k * kWarp]);
      add_exactly(sum, lost, halves_sum(values));
    }
#pragma unroll 1
    for (; count > 0; count -= kRest * kWarp, from += kRest * kWarp) {
      Acc values[kRest];
#pragma unroll
      for (int k = 0; k < kRest; ++k) {
        values[k] = k * kWarp + lane_ < count ? widen(from[k * kWarp]) : Acc(0);
      }
      add_exactly(sum, lost, halves_sum(values));
    }
  }

  __device__ __forceinline__ void put_sums(const Acc (&sums)[kSumsTogether], int first,
                                           Acc* places) {
    const Acc sum = warp_sums(sums, lane_);
    const int band = first + owned_sum(lane_);
    if (owns_sum(lane_) && band < p_.columns.bands) places[span_.place + band] += sum;
  }

  __device__ void put_down(Acc* places) {
    if (span_.place < 0) return;
    Acc sums[kKept];
#pragma unroll
    for (int band = 0; band < kKept; ++band) {
      sums[band] = settled(sums_[band], lost_[band]);
      sums_[band] = lost_[band] = 0;
    }
    put_sums(sums, 0, places);
  }

  const PlanesArguments<Index>& p_;
  const T* plane_;
  int lane_;
  RowSpan<Index> span_;
  Acc sums_[kKept];
  Acc lost_[kKept];  // what the additions to them lost to rounding
};

}  // namespace convt_reduce::cuda
