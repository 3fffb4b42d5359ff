// The elements of a plane, cell by cell, as a list in shared memory: whoever walks it need not know
// the plane's shape. For planes of less than 64 KiB.
#pragma once

#include <algorithm>

#include "cuda/axis_bands.cuh"

namespace convt_reduce::cuda {

// A cell's elements in `order`; none where it is not covered.
struct alignas(8) ListedCell {
  unsigned short begin;
  unsigned short end;
  unsigned short cell;
};

// What the elements of a plane are listed by. Channels that are neighbours in memory are one plane,
// with cells for each.
struct ListedPlane {
  AxisBands<int> depths;
  AxisBands<int> rows;
  AxisBands<int> columns;
  int channels;
  int row_bits = 0;  // log2 of the lanes that list a row

  ListedPlane(const Cells& of, int of_channels)
      : depths(of.axis[0]), rows(of.axis[1]), columns(of.axis[2]), channels(of_channels) {
    while ((1 << row_bits) < std::min(columns.size, kWarp)) ++row_bits;
  }

  __device__ int positions() const { return depths.size * rows.size * columns.size; }
  __device__ int cells() const { return depths.bands * rows.bands * columns.bands; }
};

// A cell of one channel: where its elements begin in the list, and how many they are.
struct ListedBox {
  int first;
  int size;

  CONVT_HD ListedBox(const ListedPlane& plane, int b0, int b1, int b2) {
    const int depths = plane.depths.end(b0) - plane.depths.begin[b0];
    const int rows = plane.rows.end(b1) - plane.rows.begin[b1];
    const int columns = plane.columns.end(b2) - plane.columns.begin[b2];
    first = plane.depths.begin[b0] * plane.rows.size * plane.columns.size +
            depths * (plane.rows.begin[b1] * plane.columns.size + rows * plane.columns.begin[b2]);
    const bool covered =
        plane.depths.is_covered(b0) && plane.rows.is_covered(b1) && plane.columns.is_covered(b2);
    size = covered ? depths * rows * columns : 0;
  }
};

// order[cell.begin ...]: where the cell's elements lie in a plane, in bytes, as they lie in memory.
// By `warps` warps, of which the caller's is number `warp`.
__device__ inline void list_elements(const ListedPlane& plane, int element_bytes, int warp,
                                     int warps, unsigned short* order) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kSteps = 4;  // at a time
  const int columns = plane.columns.size;
  const int all_rows = plane.depths.size * plane.rows.size;
  const int lane = threadIdx.x % kWarp;
  // Warps share the rows, or the columns where rows are few.
  const bool by_rows = columns <= kWarp || all_rows >= warps;
  const int first_column = by_rows ? 0 : warp * kWarp;
  const int column_step = by_rows ? 1 << plane.row_bits : warps * kWarp;
  const int together = kWarp >> plane.row_bits;  // rows of a warp's step
  const int row_step = by_rows ? warps * together : 1;
  const int of_step = lane >> plane.row_bits;  // the lane's row
#pragma unroll 1
  for (int begin = by_rows ? warp * together : 0; begin < all_rows;
       begin += row_step << plane.row_bits) {
    // Each lane finds out about a row of the next steps: how many elements the cells before those
    // of this row have, how many in a column of these, and how many of those lie in earlier rows.
    const int own = min(begin + lane / together * row_step + lane % together, all_rows - 1);
    const int depth = plane.depths.size == 1 ? 0 : own / static_cast<unsigned>(plane.rows.size);
    const int height = own - depth * plane.rows.size;
    const Found<int> b0 = plane.depths.locate_inline(depth);
    const Found<int> b1 = plane.rows.locate_inline(height);
    const unsigned own_before = (b0.begin * plane.rows.size + b0.length() * b1.begin) * columns;
    const unsigned own_cells = static_cast<unsigned>(b0.length() * b1.length()) << 16 | own_before;
    const int own_rows = (depth - b0.begin) * b1.length() + height - b1.begin;
    const int end = min(all_rows, begin + (row_step << plane.row_bits));
#pragma unroll 1
    for (int base = first_column; base < columns; base += column_step) {
      const int column = base + (lane & ((1 << plane.row_bits) - 1));
      const Found<int> b2 = plane.columns.locate_inline(column);
      const int stop = column < columns ? end : 0;
#pragma unroll 1
      for (int channel = 0; channel < plane.channels; ++channel) {
        unsigned short* const to = order + channel * all_rows * columns + column - b2.begin;
        int source = of_step;
        int row = begin + of_step;
#pragma unroll 1
        while (row - of_step < end) {
          int index[kSteps];
#pragma unroll
          for (int k = 0; k < kSteps; ++k, source += together) {
            const unsigned of_row = __shfl_sync(kAll, own_cells, source);
            const int rows = __shfl_sync(kAll, own_rows, source);
            index[k] = (of_row & 0xffff) + (of_row >> 16) * b2.begin + rows * b2.length();
          }
#pragma unroll
          for (int k = 0; k < kSteps; ++k, row += row_step) {
            const int at = (row * columns + column) * plane.channels + channel;
            if (row < stop) to[index[k]] = static_cast<unsigned short>(at * element_bytes);
          }
        }
      }
    }
  }
}

// The cells: those of more than `narrow` elements, and from the end on the others. Returns how many
// of the former there are. For one warp.
__device__ inline int list_cells(const ListedPlane& plane, int narrow, ListedCell* cells) {
  const unsigned lane = threadIdx.x % kWarp;
  const int of_channel = plane.cells();
  const int count = of_channel * plane.channels;
  int wide = 0;
  int others = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += kWarp) {
    const unsigned number = base + lane;
    const bool exists = number < static_cast<unsigned>(count);
    const unsigned channel = plane.channels == 1 ? 0 : number / static_cast<unsigned>(of_channel);
    const unsigned cell = exists ? number - channel * of_channel : 0;
    const unsigned b01 = cell / static_cast<unsigned>(plane.columns.bands);
    const int b2 = static_cast<int>(cell - b01 * plane.columns.bands);
    const int b0 = plane.depths.bands == 1 ? 0 : b01 / static_cast<unsigned>(plane.rows.bands);
    const int b1 = static_cast<int>(b01) - b0 * plane.rows.bands;
    const ListedBox box(plane, b0, b1, b2);
    const int first = static_cast<int>(channel) * plane.positions() + box.first;
    const int size = box.size;
    const unsigned wide_lanes = __ballot_sync(0xffffffffu, exists && size > narrow);
    const unsigned other_lanes = __ballot_sync(0xffffffffu, exists && size <= narrow);
    const unsigned before = (1u << lane) - 1;
    const int at = size > narrow ? wide + __popc(wide_lanes & before)
                                 : count - 1 - others - __popc(other_lanes & before);
    if (exists) {
      cells[at] = {static_cast<unsigned short>(first), static_cast<unsigned short>(first + size),
                   static_cast<unsigned short>(number)};
    }
    wide += __popc(wide_lanes);
    others += __popc(other_lanes);
  }
  return wide;
}

}  // namespace convt_reduce::cuda
