// How a mean becomes an element of the result.
#pragma once

#include <cmath>

#include "cpu/element.h"

namespace convt_reduce::cpu {

// The sum over cells and taps one by one. Cell sums or weights that are added before they meet
// would turn inf*1 + inf*(-1), a NaN in the convolution, into inf*0.5 or the like, or a sum beyond
// the largest number into inf: where a mean is not finite this one decides.
template <typename T, typename Acc>
Acc tap_by_tap(const Problem& problem, const Cells& cells, const Weight& weight, const T* w,
               const Acc* sums) {
  const Acc scale = static_cast<Acc>(problem.mean_scale());
  const int64_t channels = problem.c_in / problem.groups;
  const int64_t count = cells.count();
  for (int64_t cell = 0; cell < count; ++cell) {
    if (!covered(cells, bands_of(cells, cell))) continue;
    for (int64_t c = 0; c < channels; ++c) {
      if (std::isnan(sums[c * count + cell])) return sums[c * count + cell];
    }
  }
  Acc total = 0;
  Acc lost = 0;
  for (int64_t c = 0; c < channels; ++c, w += weight.stride_c_in) {
    for (int64_t cell = 0; cell < count; ++cell, ++sums) {
      const CellBands bands = bands_of(cells, cell);
      const Band& band0 = cells.axis[0].band(bands.b[0]);
      const Band& band1 = cells.axis[1].band(bands.b[1]);
      const Band& band2 = cells.axis[2].band(bands.b[2]);
      for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
        for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
          for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
            const int64_t tap =
                t0 * weight.stride[0] + t1 * weight.stride[1] + t2 * weight.stride[2];
            add_exactly(total, lost, static_cast<Acc>(w[tap]) * scale * *sums);
          }
        }
      }
    }
  }
  return settled(total, lost);
}

template <typename T>
class Results {
 public:
  using Acc = AccumulateOf<T>;

  Results(const Problem& problem, const Cells& cells, const Weight& weight, const Bias& bias,
          const void* cell_sums, void* y)
      : problem_(problem),
        cells_(cells),
        weight_(weight),
        bias_(bias),
        cell_sums_(static_cast<const Acc*>(cell_sums)),
        y_(static_cast<T*>(y)) {}

  // The weights of output channel o.
  const T* weights(int64_t o) const {
    const int64_t group_in = problem_.c_in / problem_.groups;
    const int64_t group_out = problem_.c_out / problem_.groups;
    return static_cast<const T*>(weight_.data) + o % group_out * weight_.stride_c_out +
           o / group_out * group_in * weight_.stride_c_in;
  }

  void put(int64_t n, int64_t o, Acc mean) const {
    if (!std::isfinite(mean)) {
      const int64_t group_in = problem_.c_in / problem_.groups;
      const int64_t c = o / (problem_.c_out / problem_.groups) * group_in;
      mean = tap_by_tap<T, Acc>(problem_, cells_, weight_, weights(o),
                                cell_sums_ + (n * problem_.c_in + c) * cells_.count());
    }
    const Acc multiplier = static_cast<Acc>(problem_.multiplier);
    const Acc b = bias_.data == nullptr
                      ? Acc(0)
                      : static_cast<Acc>(static_cast<const T*>(bias_.data)[o * bias_.stride]);
    y_[n * problem_.c_out + o] = static_cast<T>(multiplier * (mean + b));
  }

 private:
  const Problem& problem_;
  const Cells& cells_;
  const Weight& weight_;
  const Bias& bias_;
  const Acc* cell_sums_;
  T* y_;
};

}  // namespace convt_reduce::cpu
