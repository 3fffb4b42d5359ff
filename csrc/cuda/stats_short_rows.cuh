// Sums of short rows: a tile is whole rows, and a lane stays on its own columns, so that each of
// its sums belongs to one column band. Width 7, what lanes 0 to 27 read first:
//
//       0  1  2  3  4  5  6
//       7  8  9 10 11 12 13
//      14 15 ...
//
// A warp copies tiles to shared memory and reads them there, element by element at any alignment,
// while other warps wait for theirs.
#pragma once

#include "cuda/staging.cuh"
#include "cuda/stats_rows.cuh"

namespace convt_reduce::cuda {

// A warp's sums of rows that lanes share by columns. kSlots elements of each lane hold at least a
// row: a step.
template <int kSlots, typename T>
class ShortRows {
 public:
  using Acc = AccumulateOf<T>;

  // Tiles come to `rooms`, one behind the other.
  __device__ ShortRows(const PlanesArguments<int>& p, const T* plane, unsigned char* rooms)
      : p_(p), plane_(plane), rooms_(rooms), first_(threadIdx.x % kWarp), sums_{} {}

  // Where the i-th of the tiles that are loaded together is, counted from `tile`, and goes.
  __device__ Stretch tile_at(int tile, int i) const {
    const int row = first_row(tile, i);
    return {address_of(plane_ + row * p_.columns.size),
            address_of(plane_ + last_row(row) * p_.columns.size), rooms_ + i * p_.room_bytes};
  }

  // Adds that tile, which has arrived.
  __device__ void add_tile(int tile, int i, Acc* places) {
    const Stretch at = tile_at(tile, i);
    const T* from = reinterpret_cast<const T*>(at.to + phase_of(at.begin)) + first_;
    int row = first_row(tile, i);
    const int last = last_row(row);
    while (row < last) {
      if (row >= span_.end) {
        const RowSpan<int> next(p_, row);
        if (next.place != span_.place) put_down(places);
        span_ = next;
      }
      const int stop = min(span_.end, last);
      add_rows(from, stop - row);
      from += (stop - row) * p_.columns.size;
      row = stop;
    }
  }

  // Moves all sums to their places.
  __device__ void finish(Acc* places) {
    put_down(places);
    span_ = RowSpan<int>();
  }

 private:
  static constexpr int kSteps = 32 / kSlots;  // at a time, at most

  __device__ int first_row(int tile, int i) const {
    return (tile + (i << p_.worker_bits)) * p_.tile;
  }
  __device__ int last_row(int row) const {
    return min(row + p_.tile, p_.depths.size * p_.rows.size);
  }

  // Rows of one span. Lanes behind the rows of a step read what comes next; their sums are dropped.
  __device__ void add_rows(const T* from, int rows) {
    add_steps<kSteps>(from, rows);
    if (rows == 0) return;
    const int left = rows * p_.columns.size - first_;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const Acc value = widen(from[k * kWarp]);
      sums_[k] += k * kWarp < left ? value : Acc(0);
    }
  }

  // Whole steps, kCount at a time and then fewer.
  template <int kCount>
  __device__ __forceinline__ void add_steps(const T*& from, int& rows) {
#pragma unroll 1
    for (; rows >= kCount * p_.step_rows; rows -= kCount * p_.step_rows) {
      Acc values[kSlots][kCount];
#pragma unroll
      for (int s = 0; s < kCount; ++s, from += p_.step) {
#pragma unroll
        for (int k = 0; k < kSlots; ++k) values[k][s] = widen(from[k * kWarp]);
      }
#pragma unroll
      for (int k = 0; k < kSlots; ++k) sums_[k] += halves_sum(values[k]);
    }
    if constexpr (kCount > 1) add_steps<kCount / 2>(from, rows);
  }

  // Moves sums_ to the span's place, and leaves zeros.
  __device__ void put_down(Acc* places) {
    if (span_.place < 0) return;
    const int width = p_.columns.size;
    const int advance = kWarp % width;
    const int column = first_ % width;  // of the first slot
    for (int band = 0; band < p_.columns.bands; ++band) {
      const int begin = p_.columns.begin[band];
      const int size = p_.columns.end(band) - begin;
      Acc sum = 0;
      int at = column;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const bool here = static_cast<unsigned>(at - begin) < static_cast<unsigned>(size);
        const bool real = first_ + k * kWarp < p_.step;
        sum += here && real ? sums_[k] : Acc(0);
        at += advance;
        if (at >= width) at -= width;
      }
      sum = warp_sum(sum);
      if (first_ == 0) places[span_.place + band] += sum;
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) sums_[k] = 0;
  }

  const PlanesArguments<int>& p_;
  const T* plane_;
  unsigned char* rooms_;
  int first_;  // this lane's first element of a step
  RowSpan<int> span_;
  Acc sums_[kSlots];  // of the span's place
};

}  // namespace convt_reduce::cuda
