// The bands of one axis as kernels over contiguous planes ask for them.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

template <typename Index>
struct Found {
  int band;
  Index begin;
  Index end;
  __device__ Index length() const { return end - begin; }
};

// The bands of one axis, as narrow as they come: what a kernel asks of them must cost few
// instructions, since a small plane is only a few loads.
template <typename Index>
struct AxisBands {
  Index size;
  int bands;
  unsigned covered = 0;       // a bit per band: whether some tap covers it
  Index begin[kInlineBands];  // those that do not exist begin at the end
  const Band* table;          // instead, where there are more

  explicit AxisBands(const AxisCells& cells)
      : size(static_cast<Index>(cells.axis.size)),
        bands(static_cast<int>(cells.bands)),
        table(cells.table) {
    for (int b = 0; b < kInlineBands; ++b) {
      const bool exists = b < bands && table == nullptr;
      begin[b] = exists ? static_cast<Index>(cells.inline_bands[b].begin) : size;
      if (exists && cells.covered(b)) covered |= 1u << b;
    }
  }

  // For bands that are not in a table.
  CONVT_HD Index end(int band) const { return band + 1 < bands ? begin[band + 1] : size; }
  CONVT_HD bool is_covered(int band) const { return (covered >> band) & 1; }

  // The band of a position. Comparisons with constants, and no search, for the numbers of bands
  // that layers have: reads of kernel arguments at computed places are slow.
  __device__ Found<Index> locate(Index position) const {
    if (table != nullptr) return search(position);
    return locate_inline(position);
  }

  __device__ Found<Index> locate_inline(Index position) const {
    constexpr int kUsual = 4;
    Found<Index> found{0, 0, size};
    const auto look = [&](int b) {
      if (position >= begin[b]) {
        found.begin = found.band == 0 ? begin[b] : found.begin;
        ++found.band;
      } else {
        found.end = begin[b];
      }
    };
#pragma unroll
    for (int b = kUsual - 1; b > 0; --b) look(b);
    if (bands > kUsual && found.band == kUsual - 1) {
      found.band = 0;
#pragma unroll
      for (int b = kInlineBands - 1; b >= kUsual; --b) look(b);
      found.begin = found.band == 0 ? begin[kUsual - 1] : found.begin;
      found.band += kUsual - 1;
    }
    return found;
  }

  __device__ Found<Index> search(Index position) const {
    int low = 0;
    int high = bands;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (table[middle].begin <= position ? low : high) = middle;
    }
    return {low, static_cast<Index>(table[low].begin),
            high < bands ? static_cast<Index>(table[high].begin) : size};
  }
};

// Where a chunk lies: [begin, end) on every axis, of which there are count[a] of size[a].
__device__ __forceinline__ void locate_chunk(unsigned chunk, const int (&count)[kAxes],
                                             const int (&size)[kAxes],
                                             const AxisBands<int> (&axis)[kAxes],
                                             int (&begin)[kAxes], int (&end)[kAxes]) {
#pragma unroll
  for (int a = kAxes - 1; a >= 0; --a) {
    const unsigned up = count[a] == 1 ? chunk : chunk / static_cast<unsigned>(count[a]);
    begin[a] = static_cast<int>(chunk - up * count[a]) * size[a];
    end[a] = min(begin[a] + size[a], axis[a].size);
    chunk = up;
  }
}

}  // namespace convt_reduce::cuda
