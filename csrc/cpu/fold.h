// Folding between taps and cells, one axis at a time.
//
// A cell is covered by a box of taps and a tap's run is a box of cells, so both sums separate: with
// K taps and B bands on an axis the work is K*B per axis instead of the product over all axes,
// which keeps wide kernels affordable.
#pragma once

#include <algorithm>
#include <vector>

#include "cells.h"
#include "cpu/element.h"

namespace convt_reduce::cpu {

template <typename Acc>
class Folder {
 public:
  explicit Folder(const Cells& cells, int64_t width = 1) : cells_(cells), width_(width) {
    for (int a = 0; a < kAxes; ++a) {
      const AxisCells& axis = cells.axis[a];
      bands_of_tap_[a].resize(axis.axis.kernel);
      for (int64_t tap = 0; tap < axis.axis.kernel; ++tap) {
        const Range run = run_of_tap(axis.axis, tap);
        Range& bands = bands_of_tap_[a][tap];
        bands = run.empty() ? Range{0, 0}
                            : Range{axis.band_of(run.begin), axis.band_of(run.end - 1) + 1};
      }
    }
  }

  // taps [k0][k1][k2][width] -> cells [b0][b1][b2][width]: each cell gets the taps that cover it
  // added.
  void taps_to_cells(const Acc* taps, Acc* cells) {
    run(
        taps, cells, [&](int a) { return cells_.axis[a].axis.kernel; },
        [&](int a) { return cells_.axis[a].bands; },
        [&](int a, int64_t b) {
          const Band& band = cells_.axis[a].band(b);
          return Range{band.tap_begin, band.tap_end};
        });
  }

  // cells [b0][b1][b2][width] -> taps [k0][k1][k2][width]: each tap gets the cells of its run
  // added.
  void cells_to_taps(const Acc* cells, Acc* taps) {
    run(
        cells, taps, [&](int a) { return cells_.axis[a].bands; },
        [&](int a) { return cells_.axis[a].axis.kernel; },
        [&](int a, int64_t tap) { return bands_of_tap_[a][tap]; });
  }

 private:
  // out[.., j, ..] = the sum of in[.., i, ..] over i in range(j), along axis 2, then 1, then 0.
  template <typename InSize, typename OutSize, typename RangeOf>
  void run(const Acc* in, Acc* out, InSize in_size, OutSize out_size, RangeOf range_of) {
    int64_t size[kAxes] = {in_size(0), in_size(1), in_size(2)};
    const Acc* from = in;
    for (int a = kAxes - 1; a >= 0; --a) {
      const int64_t outer = a == 2 ? size[0] * size[1] : a == 1 ? size[0] : 1;
      const int64_t inner = width_ * (a == 2 ? 1 : a == 1 ? size[2] : size[1] * size[2]);
      const int64_t count = out_size(a);
      Acc* to = out;
      if (a != 0) {
        scratch_[a - 1].resize(outer * count * inner);
        to = scratch_[a - 1].data();
      }
      for (int64_t o = 0; o < outer; ++o) {
        for (int64_t j = 0; j < count; ++j) {
          const Range range = range_of(a, j);
          add_rows(from + (o * size[a] + range.begin) * inner, range.end - range.begin, inner,
                   to + (o * count + j) * inner);
        }
      }
      size[a] = count;
      from = to;
    }
  }

  // row = the sum of `count` rows of `inner` elements that lie one behind the other.
  void add_rows(const Acc* source, int64_t count, int64_t inner, Acc* row) {
    const auto add_run = [&](int64_t rows, Acc* to) {
      std::fill(to, to + inner, Acc(0));
      for (int64_t i = 0; i < rows; ++i, source += inner) {
        for (int64_t k = 0; k < inner; ++k) to[k] += source[k];
      }
    };
    add_run(std::min(count, kRun), row);
    if (count <= kRun) return;
    run_.resize(inner);
    lost_.assign(inner, Acc(0));
    for (int64_t left = count - kRun; left > 0; left -= kRun) {
      add_run(std::min(left, kRun), run_.data());
      for (int64_t k = 0; k < inner; ++k) add_exactly(row[k], lost_[k], run_[k]);
    }
    for (int64_t k = 0; k < inner; ++k) row[k] = settled(row[k], lost_[k]);
  }

  const Cells& cells_;
  int64_t width_;
  std::vector<Range> bands_of_tap_[kAxes];
  std::vector<Acc> scratch_[kAxes - 1];
  std::vector<Acc> run_, lost_;
};

}  // namespace convt_reduce::cpu
