// The problem in plain numbers: what the kernels know of a call.
//
// A call arrives as tensors and argument lists; validate.cpp turns it into these structs once, and
// from then on no room needs torch. Absent spatial axes become axes of one element in front, so a
// 1-D, a 2-D and a 3-D call run through the same three-axis code.
#pragma once

#include <cstdint>

namespace convt_reduce {

constexpr int kAxes = 3;

// One spatial axis. output = (size - 1)*stride - 2*padding + dilation*(kernel - 1)
//                            + output_padding + 1; output_padding shows nowhere else.
struct Axis {
  int64_t size = 1;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;
  int64_t output = 1;
};

struct Problem {
  int64_t batch = 0;
  int64_t c_in = 0;
  int64_t c_out = 0;
  int64_t groups = 1;
  Axis axis[kAxes];
  double multiplier = 1.0;

  int64_t planes() const { return batch * c_in; }
  int64_t positions() const { return axis[0].size * axis[1].size * axis[2].size; }
  int64_t taps() const { return axis[0].kernel * axis[1].kernel * axis[2].kernel; }
  // 1 / (positions of the output), kept in double: their product can pass 2**63.
  double mean_scale() const {
    return 1.0 / (static_cast<double>(axis[0].output) * static_cast<double>(axis[1].output) *
                  static_cast<double>(axis[2].output));
  }
};

enum class Dtype { kFloat32, kFloat64, kFloat16, kBFloat16 };

inline int element_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

// Strides are in elements, as in torch; an absent axis has stride 0.
struct Input {
  const void* data = nullptr;
  int64_t stride_n = 0;
  int64_t stride_c = 0;
  int64_t stride[kAxes] = {0, 0, 0};
};

struct Weight {
  const void* data = nullptr;
  int64_t stride_c_in = 0;
  int64_t stride_c_out = 0;  // over the c_out / groups channels of one group
  int64_t stride[kAxes] = {0, 0, 0};
};

struct Bias {
  const void* data = nullptr;  // null: no bias
  int64_t stride = 0;
};

// Combine's derivative: what comes in, and what is wanted. tap_sums, tap_grads [N][C_in][taps] are
// in the accumulate type, grad_weight lies as [C_in][C_out/groups][taps] or, channels last, as
// [C_in][taps][C_out/groups].
struct CombineBackward {
  const void* grad = nullptr;  // of the result
  int64_t grad_stride_n = 0;
  int64_t grad_stride_c = 0;
  double scale = 1.0;  // multiplier / (positions of the output)
  Weight weight;
  const void* tap_sums = nullptr;
  void* tap_grads = nullptr;    // null: not wanted
  void* grad_weight = nullptr;  // the same
  void* grad_bias = nullptr;    // the same
  bool channels_last = false;
};

}  // namespace convt_reduce
