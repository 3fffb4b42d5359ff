// Sums of rows, column by column: what stats adds up first where a run has many rows.
//
// Rows are added to each other, which is vector code as it stands, and a row's own sum is taken
// once per run and not once per row.
#pragma once

#include <type_traits>
#include <vector>

#include "cpu/element.h"

namespace convt_reduce::cpu {

constexpr int64_t kCacheLine = 64;  // bytes

// Asks for a line of memory, into the second-level cache: what is not yet due would displace in the
// first what is.
inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 2); }

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
//
// Columns are read across rows, an order in which processors foresee little. Where rows are
// neighbours in memory, what comes behind them is therefore asked for in the order in which it
// lies, as much as is read. Asking for memory that is not ours, at the end, does nothing.
template <int kRows, typename T, typename Acc>
CONVT_WIDE static void add_rows_together(const T* __restrict__ x, int64_t stride, int64_t width,
                                         Acc* __restrict__ sum, Acc* __restrict__ lost) {
  constexpr int64_t kLine = kCacheLine / sizeof(T);
  const char* ahead = reinterpret_cast<const char*>(x + kRows * width);
  int64_t w = 0;
  for (; w + kLine <= width; w += kLine) {
    if (stride == width) {
      for (int line = 0; line < kRows; ++line, ahead += kCacheLine) prefetch(ahead);
    }
    for (int64_t j = w; j < w + kLine; ++j) {
      add_exactly(sum[j], lost[j], halves_sum<kRows, T, Acc>(x + j, stride));
    }
  }
  for (; w < width; ++w) add_exactly(sum[w], lost[w], halves_sum<kRows, T, Acc>(x + w, stride));
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
