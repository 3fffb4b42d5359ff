// Sums of short rows: a tile is whole rows, and a lane stays on its own columns, so that each of
// its sums belongs to one column band. Width 7, what lanes 0 to 27 read first:
//
//       0  1  2  3  4  5  6
//       7  8  9 10 11 12 13
//      14 15 ...
#pragma once

#include "cuda/stats_rows.cuh"

namespace convt_reduce::cuda {

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
      if (row >= span_.end) move_to(RowSpan<Index>(p_, row), places);
      const Index stop = span_.end < last ? span_.end : last;
      add_rows(plane, row, static_cast<int>(stop - row));
      row = stop;
    }
  }

  // Moves all sums to their places.
  __device__ void finish(Acc* places) {
    put_down(places, span_.place);
    span_ = RowSpan<Index>();
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
  // In three dimensions spans alternate between two places, slice by slice. Where registers are
  // many already, fewer warps at a time would cost more than that.
  static constexpr bool kKeepsTwo = kSlots == 4 && kSize == 1;

  __device__ void move_to(const RowSpan<Index>& next, Acc* places) {
    if (next.place != span_.place) {
      int place = span_.place;
      if constexpr (kKeepsTwo) {
        swap_sums();
        place = other_place_;
        other_place_ = span_.place;
      }
      if (place != next.place) put_down(places, place);
    }
    span_ = next;
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

  // Up to a tile of rows of one span.
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
  RowSpan<Index> span_;
  int other_place_ = -1;
  Acc sums_[kSlots][kSize];                   // of the span's place
  Acc other_[kKeepsTwo ? kSlots : 1][kSize];  // of the place before it
};

}  // namespace convt_reduce::cuda
