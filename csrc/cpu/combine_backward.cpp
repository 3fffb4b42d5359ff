// Combine's derivative for small problems, whose products take less time than the calls around a
// matrix product would.
#include <algorithm>
#include <vector>

#include "cpu/element.h"
#include "cpu/kernels.h"

namespace convt_reduce::cpu {
namespace {

template <typename T>
void combine_backward_of(const Problem& problem, const CombineBackward& tensors) {
  using Acc = AccumulateOf<T>;
  const int64_t group_in = problem.c_in / problem.groups;
  const int64_t group_out = problem.c_out / problem.groups;
  const int64_t taps = problem.taps();
  const auto grad_at = [&](int64_t n, int64_t o) {
    return static_cast<Acc>(
        static_cast<const T*>(tensors.grad)[n * tensors.grad_stride_n + o * tensors.grad_stride_c]);
  };

  if (tensors.grad_bias != nullptr) {
    for (int64_t o = 0; o < problem.c_out; ++o) {
      Acc sum = 0;
      Acc lost = 0;
      for (int64_t n = 0; n < problem.batch; ++n) add_exactly(sum, lost, grad_at(n, o));
      static_cast<T*>(tensors.grad_bias)[o] =
          static_cast<T>(static_cast<Acc>(problem.multiplier) * settled(sum, lost));
    }
  }
  if (tensors.tap_grads == nullptr && tensors.grad_weight == nullptr) return;

  std::vector<Acc> scaled(problem.batch * problem.c_out);  // [batch][c_out]
  for (int64_t n = 0; n < problem.batch; ++n) {
    for (int64_t o = 0; o < problem.c_out; ++o) {
      scaled[n * problem.c_out + o] = static_cast<Acc>(tensors.scale) * grad_at(n, o);
    }
  }
  Acc* tap_grads = static_cast<Acc*>(tensors.tap_grads);
  if (tap_grads != nullptr) std::fill_n(tap_grads, problem.planes() * taps, Acc(0));
  std::vector<Acc> of_weight(taps);  // one pair of channels' weights or their gradients
  for (int64_t c = 0; c < problem.c_in; ++c) {
    for (int64_t of_group = 0; of_group < group_out; ++of_group) {
      const int64_t o = c / group_in * group_out + of_group;
      if (tap_grads != nullptr) {
        const Weight& weight = tensors.weight;
        const T* from = static_cast<const T*>(weight.data) + c * weight.stride_c_in +
                        of_group * weight.stride_c_out;
        copy_taps(problem.axis, from, weight.stride, of_weight.data());
        for (int64_t n = 0; n < problem.batch; ++n) {
          const Acc g = scaled[n * problem.c_out + o];
          Acc* out = tap_grads + (n * problem.c_in + c) * taps;
          for (int64_t t = 0; t < taps; ++t) out[t] += g * of_weight[t];
        }
      }
      if (tensors.grad_weight != nullptr) {
        std::fill(of_weight.begin(), of_weight.end(), Acc(0));
        for (int64_t n = 0; n < problem.batch; ++n) {
          const Acc g = scaled[n * problem.c_out + o];
          const Acc* sums =
              static_cast<const Acc*>(tensors.tap_sums) + (n * problem.c_in + c) * taps;
          for (int64_t t = 0; t < taps; ++t) of_weight[t] += g * sums[t];
        }
        const int64_t step = tensors.channels_last ? group_out : 1;
        T* out = static_cast<T*>(tensors.grad_weight) + (tensors.channels_last
                                                             ? c * taps * group_out + of_group
                                                             : (c * group_out + of_group) * taps);
        for (int64_t t = 0; t < taps; ++t) out[t * step] = static_cast<T>(of_weight[t]);
      }
    }
  }
}

}  // namespace

void combine_backward(const Problem& problem, const CombineBackward& tensors, Dtype dtype) {
  dispatch(dtype, [&](auto element) { combine_backward_of<decltype(element)>(problem, tensors); });
}

}  // namespace convt_reduce::cpu
