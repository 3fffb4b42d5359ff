// Between cells and taps: the tap sums that backward keeps, and spread, the adjoint of stats, which
// gives the input's gradient: one number per cell, written out over the cell's positions.
#include <algorithm>
#include <vector>

#include "cpu/element.h"
#include "cpu/fold.h"
#include "cpu/kernels.h"

namespace convt_reduce::cpu {
namespace {

template <typename Acc>
void tap_sums_of(const Problem& problem, const Cells& cells, const ParallelFor& parallel_for,
                 const void* cell_sums, void* out) {
  const int64_t grain = std::max<int64_t>(1, kPiece / (problem.taps() + cells.count()));
  parallel_for(problem.planes(), grain, [&](int64_t first, int64_t last) {
    Folder<Acc> folder(cells);
    for (int64_t plane = first; plane < last; ++plane) {
      folder.cells_to_taps(static_cast<const Acc*>(cell_sums) + plane * cells.count(),
                           static_cast<Acc*>(out) + plane * problem.taps());
    }
  });
}

template <typename T>
void spread_of(const Problem& problem, const Cells& cells, const Input& tap_grads,
               const ParallelFor& parallel_for, void* out) {
  using Acc = AccumulateOf<T>;
  const Axis* axis = problem.axis;
  const int64_t positions = problem.positions();
  parallel_for(problem.planes(), std::max<int64_t>(1, kPiece / positions),
               [&](int64_t first, int64_t last) {
                 Folder<Acc> folder(cells);
                 std::vector<Acc> taps(problem.taps());
                 std::vector<Acc> values(cells.count());
                 for (int64_t plane = first; plane < last; ++plane) {
                   const Acc* g = static_cast<const Acc*>(tap_grads.data) +
                                  plane / problem.c_in * tap_grads.stride_n +
                                  plane % problem.c_in * tap_grads.stride_c;
                   copy_taps(problem.axis, g, tap_grads.stride, taps.data());
                   folder.taps_to_cells(taps.data(), values.data());
                   T* row = static_cast<T*>(out) + plane * positions;
                   for (int64_t b0 = 0, d = 0; d < axis[0].size; ++d) {
                     if (d == cells.axis[0].end(b0)) ++b0;
                     for (int64_t b1 = 0, h = 0; h < axis[1].size; ++h, row += axis[2].size) {
                       if (h == cells.axis[1].end(b1)) ++b1;
                       for (int64_t b2 = 0; b2 < cells.axis[2].bands; ++b2) {
                         std::fill(row + cells.axis[2].band(b2).begin, row + cells.axis[2].end(b2),
                                   static_cast<T>(values[cells.index(b0, b1, b2)]));
                       }
                     }
                   }
                 }
               });
}

}  // namespace

void tap_sums(const Problem& problem, const Cells& cells, Dtype dtype,
              const ParallelFor& parallel_for, const void* cell_sums, void* tap_sums) {
  dispatch(dtype, [&](auto element) {
    tap_sums_of<AccumulateOf<decltype(element)>>(problem, cells, parallel_for, cell_sums, tap_sums);
  });
}

void spread(const Problem& problem, const Cells& cells, const Input& tap_grads, Dtype dtype,
            const ParallelFor& parallel_for, void* grad) {
  dispatch(dtype, [&](auto element) {
    spread_of<decltype(element)>(problem, cells, tap_grads, parallel_for, grad);
  });
}

}  // namespace convt_reduce::cpu
