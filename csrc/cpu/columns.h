// Sums of rows, column by column: what stats adds up first where a run has many rows.
//
// Rows are added to each other, which is vector code as it stands, and a row's own sum is taken
// once per run and not once per row.
#pragma once

#include <type_traits>
#include <vector>

#include "cpu/element.h"

namespace convt_reduce::cpu {

// x[0] + x[stride] + .., kCount of them, by halves.
template <int kCount, typename T, typename Acc>
inline Acc halves_sum(const T* x, int64_t stride) {
  if constexpr (kCount == 1) {
    return static_cast<Acc>(*x);
  } else {
    return halves_sum<kCount / 2, T, Acc>(x, stride) +
           halves_sum<kCount / 2, T, Acc>(x + kCount / 2 * stride, stride);
  }
}

// Adds kRows rows of x to sum, and the errors of that to lost.
template <int kRows, typename T, typename Acc>
CONVT_WIDE static void add_rows_together(const T* __restrict__ x, int64_t stride, int64_t width,
                                         Acc* __restrict__ sum, Acc* __restrict__ lost) {
  for (int64_t w = 0; w < width; ++w) {
    const Acc rows = halves_sum<kRows, T, Acc>(x + w, stride);
    add_exactly(sum[w], lost[w], rows);
  }
}

template <typename Acc>
class ColumnSums {
 public:
  // Adds `rows` rows of `width` neighbouring elements.
  template <typename T>
  void add(const T* x, int64_t rows, int64_t stride, int64_t width) {
    sum_.assign(width, Acc(0));
    lost_.assign(width, Acc(0));
    const auto take = [&](auto number) {
      constexpr int kRows = decltype(number)::value;
      for (; rows >= kRows; rows -= kRows, x += kRows * stride) {
        add_rows_together<kRows, T, Acc>(x, stride, width, sum_.data(), lost_.data());
      }
    };
    take(std::integral_constant<int, 16>{});
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 1>{});
  }

  const Acc* sums() const { return sum_.data(); }
  // What the sums' additions lost to rounding; NaN beside a sum that is not finite.
  Acc lost(int64_t begin, int64_t end) const {
    Acc total = 0;
    for (int64_t w = begin; w < end; ++w) total += lost_[w];
    return total;
  }

 private:
  std::vector<Acc> sum_, lost_;
};

}  // namespace convt_reduce::cpu
