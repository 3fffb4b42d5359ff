// Products of weights with tap sums, side by side along the way weights lie in memory.
#pragma once

#include <type_traits>

#include "cpu/element.h"

namespace convt_reduce::cpu {

constexpr int64_t kVector = 16;  // weights that are multiplied side by side

// w[0] * p[0] + w[w_stride] * p[p_stride] + .., kCount of them, by halves.
template <int kCount, typename T, typename Acc>
inline Acc halves_product(const T* w, int64_t w_stride, const Acc* p, int64_t p_stride) {
  if constexpr (kCount == 1) {
    return static_cast<Acc>(*w) * *p;
  } else {
    constexpr int kHalf = kCount / 2;
    return halves_product<kHalf, T, Acc>(w, w_stride, p, p_stride) +
           halves_product<kHalf, T, Acc>(w + kHalf * w_stride, w_stride, p + kHalf * p_stride,
                                         p_stride);
  }
}

// Adds to sum[j], with the error of that to lost[j], column j of kRows rows of weights times
// p[j % period] of the same rows. Rows of p go on for kVector - 1 elements behind their period, but
// where that is 1.
template <int kRows, bool kOne, typename T, typename Acc>
CONVT_WIDE static void add_products(const T* __restrict__ w, int64_t w_stride, int64_t columns,
                                    const Acc* __restrict__ p, int64_t p_stride, int64_t period,
                                    Acc* __restrict__ sum, Acc* __restrict__ lost) {
  const int64_t step = kOne ? 0 : kVector % period;
  int64_t at = 0;
  for (; columns >= kVector; columns -= kVector, w += kVector, sum += kVector, lost += kVector) {
    for (int64_t j = 0; j < kVector; ++j) {
      add_exactly(
          sum[j], lost[j],
          halves_product<kRows, T, Acc>(w + j, w_stride, p + (kOne ? 0 : at + j), p_stride));
    }
    at += step;
    if (!kOne && at >= period) at -= period;
  }
  for (int64_t j = 0; j < columns; ++j) {
    add_exactly(sum[j], lost[j],
                halves_product<kRows, T, Acc>(w + j, w_stride, p + (kOne ? 0 : at + j), p_stride));
  }
}

// The same for any number of rows.
template <bool kOne, typename T, typename Acc>
void add_rows_of_products(const T* w, int64_t w_stride, int64_t rows, int64_t columns, const Acc* p,
                          int64_t p_stride, int64_t period, Acc* sum, Acc* lost) {
  const auto take = [&](auto number) {
    constexpr int kRows = decltype(number)::value;
    for (; rows >= kRows; rows -= kRows, w += kRows * w_stride, p += kRows * p_stride) {
      add_products<kRows, kOne, T, Acc>(w, w_stride, columns, p, p_stride, period, sum, lost);
    }
  };
  take(std::integral_constant<int, 16>{});
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 1>{});
}

template <typename T, typename Acc>
CONVT_WIDE static void convert(const T* __restrict__ from, int64_t count, Acc* __restrict__ to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Acc>(from[i]);
}

}  // namespace convt_reduce::cpu
