// Sums of rows, column by column: what stats adds up first where a run has many rows.
//
// Rows are added to each other, which is vector code as it stands, and a row's own sum is taken
// once per run and not once per row.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/element.h"

namespace convt_reduce::cpu {

// Adds rows of kColumns elements to sum, and the errors of that to lost, kRun rows at a time. Asks
// for what lies `ahead` elements behind each row.
template <int kColumns, typename T, typename Acc>
inline void add_tile(const T* __restrict__ x, int64_t rows, int64_t stride, int64_t ahead,
                     Acc* __restrict__ sum, Acc* __restrict__ lost) {
  for (int64_t first = 0; first < rows; first += kRun) {
    const int64_t count = std::min(kRun, rows - first);
    Acc run[kColumns] = {};
    for (int64_t row = 0; row < count; ++row, x += stride) {
      prefetch<kColumns>(x + ahead);
      for (int64_t j = 0; j < kColumns; ++j) run[j] += static_cast<Acc>(x[j]);
    }
    for (int64_t j = 0; j < kColumns; ++j) add_exactly(sum[j], lost[j], run[j]);
  }
}

// The same for up to kRun rows of any width. Rows are read as far as registers hold their sums:
// processors foresee that better than columns read across rows, and rows of up to 128 elements
// are then read just as they lie. What comes behind is asked for nevertheless, at least the next
// run of rows.
template <typename T, typename Acc>
CONVT_WIDE static void add_rows_together(const T* __restrict__ x, int64_t rows, int64_t stride,
                                         int64_t width, Acc* __restrict__ sum,
                                         Acc* __restrict__ lost) {
  const int64_t row_bytes = std::max<int64_t>(1, stride * sizeof(T));
  const int64_t ahead = std::max(kRun, kAhead / row_bytes) * stride;
  int64_t w = 0;
  const auto take = [&](auto number) {
    constexpr int kColumns = decltype(number)::value;
    for (; w + kColumns <= width; w += kColumns) {
      add_tile<kColumns, T, Acc>(x + w, rows, stride, ahead, sum + w, lost + w);
    }
  };
  take(std::integral_constant<int, 128>{});
  take(std::integral_constant<int, 64>{});
  take(std::integral_constant<int, 16>{});
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 1>{});
}

template <typename Acc>
class ColumnSums {
 public:
  // Adds `rows` rows of `width` neighbouring elements.
  template <typename T>
  void add(const T* x, int64_t rows, int64_t stride, int64_t width) {
    sum_.assign(width, Acc(0));
    lost_.assign(width, Acc(0));
    for (int64_t row = 0; row < rows; row += kRun) {
      add_rows_together<T, Acc>(x + row * stride, std::min(kRun, rows - row), stride, width,
                                sum_.data(), lost_.data());
    }
  }

  const Acc* sums() const { return sum_.data(); }
  // What the sums' additions lost to rounding; NaN beside a sum that is not finite.
  const Acc* lost() const { return lost_.data(); }

 private:
  std::vector<Acc> sum_, lost_;
};

}  // namespace convt_reduce::cpu
