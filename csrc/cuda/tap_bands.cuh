// The bands of an axis that a tap covers.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

__device__ inline Range bands_of_tap(const AxisCells& axis, int64_t tap) {
  const Range run = run_of_tap(axis.axis, tap);
  if (run.empty()) return {0, 0};
  return {axis.band_of(run.begin), axis.band_of(run.end - 1) + 1};
}

}  // namespace convt_reduce::cuda
