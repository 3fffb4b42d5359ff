// The bands of one axis as kernels over contiguous planes ask for them.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

// The bands of one axis, as narrow as they come: what a kernel asks of them must cost few
// instructions, since a small plane is only a few loads.
template <typename Index>
struct AxisBands {
  Index size;
  int bands;
  Index begin[kInlineBands];  // those that do not exist begin at the end
  const Band* table;          // instead, where there are more

  explicit AxisBands(const AxisCells& cells)
      : size(static_cast<Index>(cells.axis.size)),
        bands(static_cast<int>(cells.bands)),
        table(cells.table) {
    for (int b = 0; b < kInlineBands; ++b) {
      begin[b] =
          b < bands && table == nullptr ? static_cast<Index>(cells.inline_bands[b].begin) : size;
    }
  }

  __device__ Index end(int band) const { return band + 1 < bands ? begin[band + 1] : size; }

  // The band of a position and where it ends. Comparisons with constants, and no search, for the
  // numbers of bands that layers have.
  __device__ int locate(Index position, Index& end) const {
    constexpr int kUsual = 4;
    if (table != nullptr) return search(position, end);
    int band = 0;
    end = size;
#pragma unroll
    for (int b = kUsual - 1; b > 0; --b) {
      band += position >= begin[b];
      if (position < begin[b]) end = begin[b];
    }
    if (bands > kUsual && band == kUsual - 1) {
#pragma unroll
      for (int b = kInlineBands - 1; b >= kUsual; --b) {
        band += position >= begin[b];
        if (position < begin[b]) end = begin[b];
      }
    }
    return band;
  }

  __device__ int search(Index position, Index& end) const {
    int low = 0;
    int high = bands;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (table[middle].begin <= position ? low : high) = middle;
    }
    end = high < bands ? static_cast<Index>(table[high].begin) : size;
    return low;
  }
};

}  // namespace convt_reduce::cuda
