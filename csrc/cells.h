// Runs, bands and cells: which inputs each tap sends inside the output.
//
// Everything follows from one inequality. Input position h, through tap i of an axis, lands on
// output position h*stride - padding + i*dilation, and counts only if that is in [0, output).
// Solved for h it gives a tap's run; solved for i it gives the taps that cover a position. A band
// is a longest piece of an axis on which the covering taps stay the same, and a cell is a product
// of bands. docs/math.md has the derivation. The same header serves the host and the device.
#pragma once

#include <vector>

#include "problem.h"

#ifdef __CUDACC__
#define CONVT_HD __host__ __device__
#else
#define CONVT_HD
#endif

namespace convt_reduce {

// a / b for a >= 0 and b > 0. GPUs divide 64-bit numbers slowly, and these are rarely that long.
CONVT_HD inline int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

struct Range {
  int64_t begin;
  int64_t end;  // one past the last
  CONVT_HD bool empty() const { return begin >= end; }
};

// All j in [0, count) with 0 <= j*step + offset - padding < output.
CONVT_HD inline Range landing_inside(int64_t step, int64_t count, int64_t offset, int64_t padding,
                                     int64_t output) {
  const int64_t first = padding - offset;              // j*step must reach this,
  const int64_t last = output - 1 + padding - offset;  // and not pass this
  Range range;
  range.begin = first <= 0 ? 0 : (first - 1) / step + 1;
  range.end = last < 0 ? 0 : last / step + 1;
  if (range.begin > count) range.begin = count;
  if (range.end > count) range.end = count;
  return range;
}

// The inputs that tap sends inside the output.
CONVT_HD inline Range run_of_tap(const Axis& axis, int64_t tap) {
  return landing_inside(axis.stride, axis.size, tap * axis.dilation, axis.padding, axis.output);
}

// The taps that send position inside the output. Empty, with begin >= end, where none does.
CONVT_HD inline Range taps_at(const Axis& axis, int64_t position) {
  return landing_inside(axis.dilation, axis.kernel, position * axis.stride, axis.padding,
                        axis.output);
}

// The first position after `position` that other taps cover, or axis.size. As positions grow, taps
// join at the low end of the covering range and leave at its high end, so two runs tell it.
CONVT_HD inline int64_t next_cut(const Axis& axis, int64_t position) {
  const Range taps = taps_at(axis, position);
  int64_t cut = axis.size;
  if (taps.begin > 0) {
    const int64_t joins = run_of_tap(axis, taps.begin - 1).begin;
    if (joins < cut) cut = joins;
  }
  if (!taps.empty()) {
    const int64_t leaves = run_of_tap(axis, taps.end - 1).end;
    if (leaves < cut) cut = leaves;
  }
  return cut;
}

struct Band {
  int64_t begin = 0;  // first position; the next band's begin ends it
  int64_t tap_begin = 0;
  int64_t tap_end = 0;  // tap_begin >= tap_end: no tap covers the band
};

CONVT_HD inline Band band_at(const Axis& axis, int64_t position) {
  const Range taps = taps_at(axis, position);
  Band band;
  band.begin = position;
  band.tap_begin = taps.begin;
  band.tap_end = taps.end;
  return band;
}

// How many bands of an axis travel inside a kernel's arguments. Ordinary layers have one to four;
// a wide kernel with a wide padding has up to 2*kernel + 1 and uses a table in memory instead.
constexpr int kInlineBands = 12;

// The bands of one axis. `table` is null while they fit inline.
struct AxisCells {
  Axis axis;
  int64_t bands = 0;
  Band inline_bands[kInlineBands];
  const Band* table = nullptr;

  CONVT_HD const Band& band(int64_t b) const {
    return table != nullptr ? table[b] : inline_bands[b];
  }
  CONVT_HD int64_t end(int64_t b) const { return b + 1 < bands ? band(b + 1).begin : axis.size; }
  CONVT_HD bool covered(int64_t b) const { return band(b).tap_begin < band(b).tap_end; }

  // The band that holds `position`.
  CONVT_HD int64_t band_of(int64_t position) const {
    int64_t low = 0;
    int64_t high = bands;
    while (high - low > 1) {
      const int64_t middle = (low + high) >> 1;
      if (band(middle).begin <= position) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

struct Cells {
  AxisCells axis[kAxes];

  CONVT_HD int64_t count() const { return axis[0].bands * axis[1].bands * axis[2].bands; }
  CONVT_HD int64_t index(int64_t b0, int64_t b1, int64_t b2) const {
    return (b0 * axis[1].bands + b1) * axis[2].bands + b2;
  }
};

// A cell's three bands.
struct CellBands {
  int64_t b[kAxes];
};

CONVT_HD inline CellBands bands_of(const Cells& cells, int64_t cell) {
  CellBands bands;
  const int64_t rest = quotient(cell, cells.axis[2].bands);
  bands.b[2] = cell - rest * cells.axis[2].bands;
  bands.b[0] = quotient(rest, cells.axis[1].bands);
  bands.b[1] = rest - bands.b[0] * cells.axis[1].bands;
  return bands;
}

CONVT_HD inline bool covered(const Cells& cells, const CellBands& bands) {
  return cells.axis[0].covered(bands.b[0]) && cells.axis[1].covered(bands.b[1]) &&
         cells.axis[2].covered(bands.b[2]);
}

// Counts the bands and fills the inline table as far as it goes. Where bands > kInlineBands the
// caller must point `table` at memory filled by fill_bands before it uses band().
inline AxisCells make_axis_cells(const Axis& axis) {
  AxisCells cells;
  cells.axis = axis;
  for (int64_t position = 0; position < axis.size; position = next_cut(axis, position)) {
    if (cells.bands < kInlineBands) cells.inline_bands[cells.bands] = band_at(axis, position);
    ++cells.bands;
  }
  return cells;
}

inline Cells make_cells(const Problem& problem) {
  Cells cells;
  for (int a = 0; a < kAxes; ++a) cells.axis[a] = make_axis_cells(problem.axis[a]);
  return cells;
}

CONVT_HD inline void fill_bands(const Axis& axis, Band* out) {
  for (int64_t position = 0; position < axis.size; position = next_cut(axis, position)) {
    *out++ = band_at(axis, position);
  }
}

inline bool needs_table(const AxisCells& cells) { return cells.bands > kInlineBands; }
inline bool needs_table(const Cells& cells) {
  return needs_table(cells.axis[0]) || needs_table(cells.axis[1]) || needs_table(cells.axis[2]);
}

// Cells whose tables live on the host, for code that runs there.
class HostCells {
 public:
  explicit HostCells(const Problem& problem) : cells_(make_cells(problem)) {
    for (int a = 0; a < kAxes; ++a) {
      AxisCells& axis = cells_.axis[a];
      if (!needs_table(axis)) continue;
      tables_[a].resize(axis.bands);
      fill_bands(axis.axis, tables_[a].data());
      axis.table = tables_[a].data();
    }
  }
  HostCells(const HostCells&) = delete;
  HostCells& operator=(const HostCells&) = delete;

  const Cells& get() const { return cells_; }

 private:
  Cells cells_;
  std::vector<Band> tables_[kAxes];
};

}  // namespace convt_reduce
