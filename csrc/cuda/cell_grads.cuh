// A cell's gradient: the tap gradients of the taps that cover it.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

struct CellGradsArguments {
  Input tap_grads;
  Cells cells;
  int64_t channels;
  int64_t total;  // planes * cells
};

template <typename Acc>
__device__ inline Acc cell_grad(const CellGradsArguments& p, int64_t plane, int64_t cell) {
  const int64_t n = quotient(plane, p.channels);
  const Acc* from = static_cast<const Acc*>(p.tap_grads.data) + n * p.tap_grads.stride_n +
                    (plane - n * p.channels) * p.tap_grads.stride_c;
  const CellBands bands = bands_of(p.cells, cell);
  const Band& band0 = p.cells.axis[0].band(bands.b[0]);
  const Band& band1 = p.cells.axis[1].band(bands.b[1]);
  const Band& band2 = p.cells.axis[2].band(bands.b[2]);
  Acc sum = 0;
  for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
    for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
      for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
        sum += from[t0 * p.tap_grads.stride[0] + t1 * p.tap_grads.stride[1] +
                    t2 * p.tap_grads.stride[2]];
      }
    }
  }
  return sum;
}

}  // namespace convt_reduce::cuda
