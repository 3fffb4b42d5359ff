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
template <int kSlots, typename T, typename Index>
class ShortRows {
 public:
  using Acc = AccumulateOf<T>;

  __device__ ShortRows(const PlanesArguments<Index>& p, const T* plane)
      : p_(p), plane_(plane), first_(threadIdx.x % kWarp), sums_{} {}

  // Where a tile is, and the room it goes to.
  __device__ Stretch tile_at(int tile, unsigned char* room) const {
    const int row = tile * p_.tile;
    const uintptr_t begin = address_of(plane_ + row * p_.columns.size);
    return {begin, address_of(plane_ + last_row(row) * p_.columns.size), in_lines(room, begin)};
  }

  // Finds out what belongs where, while the first tiles are on their way.
  __device__ void prepare(int tile) {
    span_ = RowSpan<Index>(p_, tile * p_.tile);
    const int width = p_.columns.size;
    const int advance = kWarp % width;
    int column = first_ % width;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int band = p_.columns.locate_inline(column).band;
      const bool real = first_ + k * kWarp < p_.step;
      bands_[k / kCodes] |= (real ? band : kNoBand) << (k % kCodes * kCodeBits);
      column += advance;
      if (column >= width) column -= width;
    }
  }

  // Adds a tile that has arrived.
  __device__ void add_tile(int tile, const unsigned char* room, Acc* places) {
    int row = tile * p_.tile;
    const int phase = line_phase_of(address_of(plane_ + row * p_.columns.size));
    const T* from = reinterpret_cast<const T*>(room + phase) + first_;
    const int last = last_row(row);
    while (row < last) {
      if (row >= span_.end) {
        const RowSpan<Index> next(p_, row);
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
    span_ = RowSpan<Index>();
  }

 private:
  static constexpr int kSteps = 32 / kSlots;  // at a time, at most

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
    for (int first = 0; first < p_.columns.bands; first += kSumsTogether) {
      Acc sums[kSumsTogether] = {};
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const unsigned code = bands_[k / kCodes] >> (k % kCodes * kCodeBits) & kNoBand;
#pragma unroll
        for (int i = 0; i < kSumsTogether; ++i) {
          sums[i] += code == first + i ? sums_[k] : Acc(0);
        }
      }
      const Acc sum = warp_sums(sums, first_);
      const int band = first + owned_sum(first_);
      if (owns_sum(first_) && band < p_.columns.bands) places[span_.place + band] += sum;
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) sums_[k] = 0;
  }

  static constexpr int kCodeBits = 4;
  static constexpr int kCodes = 32 / kCodeBits;  // of a word
  static constexpr unsigned kNoBand = (1u << kCodeBits) - 1;
  static_assert(kInlineBands < kNoBand, "a code is a band, or none");

  const PlanesArguments<Index>& p_;
  const T* plane_;
  int first_;  // this lane's first element of a step
  RowSpan<Index> span_;
  unsigned bands_[(kSlots + kCodes - 1) / kCodes] = {};  // of each slot's column
  Acc sums_[kSlots];                                     // of the span's place
};

}  // namespace convt_reduce::cuda
