// What spread_periods.cuh knows of planes: periods, chunks, lines, and the tables of where cells
// lie.
#pragma once

#include "cuda/axis_bands.cuh"
#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kPeriodThreads = 256;
constexpr int kPeriodSlots = 4;   // vectors of a chunk for one thread
constexpr int kPeriodBlocks = 4;  // of a multiprocessor at a time
constexpr int kPeriodWarps = kPeriodThreads / kWarp;

struct PeriodsArguments {
  AxisBands<int> depths;
  AxisBands<int> rows;
  AxisBands<int> columns;
  int positions;  // of a plane
  int cells;
  int taps;
  int tap_step;  // from plane to plane in shared memory: odd, so that planes lie in different banks
  int kernel[kAxes];
  // A line is a row, or, where rows are short, a slab, a plane or several planes.
  int line;          // elements
  int lines;         // of a plane
  int line_planes;   // of a line, 1 unless it is several
  int line_step;     // from one slot of a thread to its next, in lines
  int column_step;   // and elements
  int columns_held;  // of a line, in the table; none where lines are long
  int lines_held;    // the most that a chunk touches, and two more
  int period;        // planes
  int all_slots;     // of a period
  int slots;         // of a chunk
  int chunks;        // of a period
  int chunk_planes;  // the most that a chunk touches
  int turn;          // periods
  int stage_bytes;   // tap gradients of one period
  bool dense;        // whether tap gradients lie without gaps
  int64_t groups;
  int64_t planes;
  int64_t periods;
};

// The taps that cover a cell.
struct alignas(16) TapBox {
  short begin[kAxes];
  short end[kAxes];
};

// Shared memory: tap gradients [2][turn][stage_bytes], gradients [2][turn][chunk planes][cells],
// boxes [cells], phases [2][turn], of_column, of_line. Where they begin, and the bytes of all.
template <typename T>
struct PeriodsLayout {
  int grads_size;  // elements of a turn, whole vectors
  int grads;
  int boxes;
  int phases;
  int of_column;
  int of_line;
  int bytes;

  CONVT_HD explicit PeriodsLayout(const PeriodsArguments& p) {
    constexpr int kSize = Vector<T>::kSize;
    constexpr int kIndex = sizeof(unsigned short);
    grads_size = (p.turn * p.chunk_planes * p.cells + kSize - 1) / kSize * kSize;
    grads = 2 * p.turn * p.stage_bytes;
    boxes = grads + 2 * grads_size * static_cast<int>(sizeof(T));
    phases = boxes + p.cells * static_cast<int>(sizeof(TapBox));
    of_column = phases + 2 * p.turn * static_cast<int>(sizeof(int));
    of_line = of_column + (p.columns_held + kSize) * kIndex;
    bytes = of_line + p.lines_held * kIndex;
  }
};

template <typename T>
struct PeriodsShared {
  int grads_size;
  unsigned char* stages;
  T* grads;
  TapBox* boxes;
  int* phases;  // where a period's tap gradients begin in its stage
  // The byte offset of an element's gradient is the sum of the two, mod 2^16.
  unsigned short* of_column;
  unsigned short* of_line;

  __device__ PeriodsShared(const PeriodsLayout<T>& at, unsigned char* memory)
      : grads_size(at.grads_size),
        stages(memory),
        grads(reinterpret_cast<T*>(memory + at.grads)),
        boxes(reinterpret_cast<TapBox*>(memory + at.boxes)),
        phases(reinterpret_cast<int*>(memory + at.phases)),
        of_column(reinterpret_cast<unsigned short*>(memory + at.of_column)),
        of_line(reinterpret_cast<unsigned short*>(memory + at.of_line)) {}
};

// What a block writes in each period of its group.
struct PeriodsChunk {
  int64_t group;
  int first;  // element
  int slots;
  int first_line;
  int first_plane;
  int planes;  // that it touches

  __device__ PeriodsChunk(const PeriodsArguments& p, int size) {
    const int chunk = static_cast<int>(blockIdx.x) % p.chunks;
    group = static_cast<int>(blockIdx.x) / p.chunks;
    const int first_slot = chunk * p.slots;
    slots = min(p.slots, p.all_slots - first_slot);
    first = first_slot * size;
    first_line = first / p.line;
    first_plane = first_line / p.lines * p.line_planes;
    planes = (first + slots * size - 1) / p.positions - first_plane + 1;
  }

  // The `index`-th period of a turn. Those at or after p.periods do not exist.
  __device__ int64_t period(const PeriodsArguments& p, int turn, int index) const {
    return group + (static_cast<int64_t>(turn) * p.turn + index) * p.groups;
  }
  __device__ bool exists(const PeriodsArguments& p, int turn) const {
    return period(p, turn, 0) < p.periods;
  }
};

// number / divisor for numbers below 2^20: a half more than a whole number is never rounded across
// the next.
struct Divider {
  float inverse;
  __device__ explicit Divider(int divisor) : inverse(1.0f / static_cast<float>(divisor)) {}
  __device__ int operator()(int number) const {
    return static_cast<int>((static_cast<float>(number) + 0.5f) * inverse);
  }
};

// The band of a position, in fewer instructions than locate() takes. Bands are not in a table.
__device__ inline int band_of(const AxisBands<int>& axis, int position) {
  int band = 0;
#pragma unroll 1
  for (int b = 1; b < axis.bands; ++b) band += position >= axis.begin[b];
  return band;
}

// What a row of a plane and the axes outside of it add to the index of a cell.
__device__ inline int outer_cells(const PeriodsArguments& p, int depth, int row) {
  return (band_of(p.depths, depth) * p.rows.bands + band_of(p.rows, row)) * p.columns.bands;
}

template <typename T>
__device__ inline void fill_tables(const PeriodsArguments& p, const Cells& cells,
                                   const PeriodsChunk& chunk, const PeriodsShared<T>& shared) {
  const bool rows_are_lines = p.line == p.columns.size;
  if (p.columns_held > 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < p.columns_held + Vector<T>::kSize; i += kPeriodThreads) {
      int column = i % p.line;
      int row = 0;
      int depth = 0;
      int plane = 0;
      if (!rows_are_lines) {
        row = column / p.columns.size;
        column -= row * p.columns.size;
        depth = row / p.rows.size;
        row -= depth * p.rows.size;
        plane = depth / p.depths.size;
        depth -= plane * p.depths.size;
      }
      const int cell = plane * p.cells + outer_cells(p, depth, row) + band_of(p.columns, column);
      shared.of_column[i] = static_cast<unsigned short>(cell * sizeof(T));
    }
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < p.lines_held; i += kPeriodThreads) {
    const int line = chunk.first_line + i;
    const int plane = line / p.lines;
    int row = line - plane * p.lines;
    int depth = row;
    if (rows_are_lines) {
      depth = row / p.rows.size;
      row -= depth * p.rows.size;
    } else {
      row = 0;
    }
    const int cell =
        (plane * p.line_planes - chunk.first_plane) * p.cells + outer_cells(p, depth, row);
    shared.of_line[i] = static_cast<unsigned short>(cell * sizeof(T));
  }
  for (int i = threadIdx.x; i < p.cells; i += kPeriodThreads) {
    const int outer = i / p.columns.bands;
    const int depth = outer / p.rows.bands;
    const int bands[kAxes] = {depth, outer - depth * p.rows.bands, i - outer * p.columns.bands};
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      const Band& band = cells.axis[a].inline_bands[bands[a]];
      shared.boxes[i].begin[a] = static_cast<short>(band.tap_begin);
      shared.boxes[i].end[a] = static_cast<short>(band.tap_end);
    }
  }
}

}  // namespace convt_reduce::cuda
