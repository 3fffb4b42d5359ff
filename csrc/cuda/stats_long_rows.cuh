// Sums of long rows: a tile is a piece of a row, and there is a sum per column band.
#pragma once

#include "cuda/stats_rows.cuh"

namespace convt_reduce::cuda {

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
    if (row >= span_.end) {
      const RowSpan<Index> next(p_, row);
      if (next.place != span_.place) put_down(places);
      span_ = next;
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
      if (first_ == 0) places[span_.place + band] += sum;
    }
  }

  __device__ void finish(Acc* places) {
    put_down(places);
    span_ = RowSpan<Index>();
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
    if (span_.place < 0) return;
#pragma unroll
    for (int band = 0; band < kKept; ++band) {
      if (band >= p_.columns.bands) break;
      const Acc sum = warp_sum(settled(sums_[band], lost_[band]));
      if (first_ == 0) places[span_.place + band] += sum;
      sums_[band] = lost_[band] = 0;
    }
  }

  const PlanesArguments<Index>& p_;
  int first_;
  RowSpan<Index> span_;
  Acc sums_[kKept];
  Acc lost_[kKept];  // what the additions to them lost to rounding
};

}  // namespace convt_reduce::cuda
