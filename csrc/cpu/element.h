// What the CPU kernels share: the dispatch over element types and the type that sums are held in.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <stdexcept>
#include <type_traits>

#include "problem.h"

// Before functions whose loops should be vector code as wide as the machine's. A product that is
// added in there must be rounded first, on machines with fused multiply-adds too, or the versions
// would differ: setup.py says so to the compiler. Not inlined, or compilers forget that the
// arguments do not overlap. Sanitizers start too late for the choice of a version.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CONVT_WIDE __attribute__((noinline, target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define CONVT_WIDE __attribute__((noinline))
#endif

namespace convt_reduce::cpu {

constexpr int kLanes = 16;         // independent sums of a stretch; compilers make vectors of them
constexpr int64_t kPiece = 65536;  // elements that are worth a thread
// The most numbers that are added one after another; then runs are added, and only add_exactly may
// be used more often. Equal numbers err in one direction, by up to a quarter of an eps per
// addition; for a million of them that would be most of the digits of a float32.
constexpr int64_t kRun = 8;

// Loops ask for what they will read kAhead bytes later: a page, behind which processors do not look
// ahead by themselves. Asking for memory that is not ours, at the end, does nothing.
constexpr int64_t kAhead = 4096;
constexpr int64_t kCacheLine = 64;  // bytes

template <typename T>
using AccumulateOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Asks for kCount elements of memory, into the second-level cache: what is not yet due would
// displace in the first what is.
template <int kCount, typename T>
inline void prefetch(const T* from) {
  for (int64_t j = 0; j < kCount; j += kCacheLine / sizeof(T)) __builtin_prefetch(from + j, 0, 2);
}

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

// Adds the lanes in a fixed order.
template <typename Acc>
Acc add_lanes(Acc (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

// sum + value, with the rounding error of the addition collected in `lost` (Knuth's two-sum).
template <typename Acc>
void add_exactly(Acc& sum, Acc& lost, Acc value) {
  const Acc total = sum + value;
  const Acc added = total - sum;
  lost += (sum - (total - added)) + (value - added);
  sum = total;
}

// What add_exactly collected. An infinite or NaN sum has no use for its `lost`, which is NaN then.
template <typename Acc>
Acc settled(Acc sum, Acc lost) {
  const Acc total = sum + lost;
  return total == total ? total : sum;
}

template <typename Body>
void dispatch(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::kFloat32:
      return body(float{});
    case Dtype::kFloat64:
      return body(double{});
    case Dtype::kFloat16:
      return body(c10::Half{});
    case Dtype::kBFloat16:
      return body(c10::BFloat16{});
  }
  throw std::logic_error("convt_reduce: unknown dtype");
}

// What lies at `from` and is strided over the taps, one behind the other, in the type of `to`.
template <typename T, typename Acc>
void copy_taps(const Axis (&axis)[kAxes], const T* from, const int64_t (&stride)[kAxes], Acc* to) {
  for (int64_t t0 = 0; t0 < axis[0].kernel; ++t0) {
    for (int64_t t1 = 0; t1 < axis[1].kernel; ++t1) {
      for (int64_t t2 = 0; t2 < axis[2].kernel; ++t2) {
        *to++ = static_cast<Acc>(from[t0 * stride[0] + t1 * stride[1] + t2 * stride[2]]);
      }
    }
  }
}

}  // namespace convt_reduce::cpu
