// The elements of a plane, cell by cell, as a list in shared memory: whoever walks it need not know
// the plane's shape. For planes of less than 64 KiB.
#pragma once

#include "cuda/axis_bands.cuh"

namespace convt_reduce::cuda {

// A cell's elements in `order`; none where it is not covered.
struct alignas(8) ListedCell {
  unsigned short begin;
  unsigned short end;
  unsigned short cell;
};

// order[cell.begin ...]: where the cell's elements lie in a plane, in bytes, as they lie in memory.
// Channels that are neighbours there are one plane, with cells for each. By all threads of a block.
__device__ inline void list_elements(const AxisBands<int>& depths, const AxisBands<int>& rows,
                                     const AxisBands<int>& columns, int channels, int element_bytes,
                                     ListedCell* cells, unsigned short* order) {
  const int warps = blockDim.x / kWarp;
  const int all_rows = depths.size * rows.size;
  // Warps share the rows, or the columns where rows are few.
  const bool by_rows = columns.size <= kWarp || all_rows >= warps;
  const int first_row = by_rows ? threadIdx.x / kWarp : 0;
  const int row_step = by_rows ? warps : 1;
  const int column_step = by_rows ? kWarp : blockDim.x;
  for (int column = threadIdx.x % column_step; column < columns.size; column += column_step) {
    const Found<int> b2 = columns.locate(column);
    for (int row = first_row; row < all_rows; row += row_step) {
      const int depth = depths.size == 1 ? 0 : row / rows.size;
      const Found<int> b0 = depths.locate(depth);
      const Found<int> b1 = rows.locate(row - depth * rows.size);
      // The cells before this one: whole slabs, then rows of this slab, then columns of these rows.
      const int begin = b0.begin * rows.size * columns.size +
                        b0.length() * (b1.begin * columns.size + b1.length() * b2.begin);
      const int d = depth - b0.begin;
      const int h = row - depth * rows.size - b1.begin;
      const int in_cell = (d * b1.length() + h) * b2.length() + column - b2.begin;
      for (int channel = 0; channel < channels; ++channel) {
        order[channel * all_rows * columns.size + begin + in_cell] = static_cast<unsigned short>(
            ((row * columns.size + column) * channels + channel) * element_bytes);
      }
      if (in_cell > 0) continue;
      const bool covered =
          depths.is_covered(b0.band) && rows.is_covered(b1.band) && columns.is_covered(b2.band);
      const int size = covered ? b0.length() * b1.length() * b2.length() : 0;
      const int cell = (b0.band * rows.bands + b1.band) * columns.bands + b2.band;
      for (int channel = 0; channel < channels; ++channel) {
        const int first = channel * all_rows * columns.size + begin;
        const int number = channel * depths.bands * rows.bands * columns.bands + cell;
        cells[number] = {static_cast<unsigned short>(first),
                         static_cast<unsigned short>(first + size),
                         static_cast<unsigned short>(number)};
      }
    }
  }
}

// Copies the cells, first those of more than `narrow` elements, and returns how many of these there
// are. For one warp.
__device__ inline int sort_cells(const ListedCell* cells, int count, int narrow,
                                 ListedCell* sorted) {
  const int lane = threadIdx.x % kWarp;
  int at = 0;
  int wide = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int base = 0; base < count; base += kWarp) {
      const bool exists = base + lane < count;
      const ListedCell cell = cells[exists ? base + lane : 0];
      const bool is_wide = cell.end - cell.begin > narrow;
      const bool here = exists && is_wide == (pass == 0);
      const unsigned lanes = __ballot_sync(0xffffffffu, here);
      if (here) sorted[at + __popc(lanes & ((1u << lane) - 1))] = cell;
      at += __popc(lanes);
    }
    if (pass == 0) wide = at;
  }
  return wide;
}

}  // namespace convt_reduce::cuda
