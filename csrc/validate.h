// Tensors and arguments in, a Problem out, or one sentence that says what is wrong.
//
// Every backend calls these first: a check that only the autograd layer made would be skipped under
// inference_mode. convt_reduce/_validation.py says the same sentences for fake tensors, whose sizes
// may be symbols; the tests hold the two together.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "problem.h"

namespace convt_reduce {

using torch::stable::Tensor;
using IntList = std::vector<int64_t>;

// What every operator's implementation needs besides the Problem.
struct Call {
  Problem problem;
  Input input;
  Weight weight;
  Bias bias;
  Dtype dtype = Dtype::kFloat32;
  int spatial = 0;      // spatial axes of the call, 1 to 3
  bool batched = true;  // false: the tensors have no batch dimension
  int32_t device_type = 0;
  int32_t device_index = 0;
};

Call validate_fused_mean(const char* op, const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, const IntList& stride,
                         const IntList& padding, const IntList& output_padding, int64_t groups,
                         const IntList& dilation, double multiplier);

Call validate_tap_sums(const Tensor& input, const IntList& kernel_size, const IntList& stride,
                       const IntList& padding, const IntList& output_padding,
                       const IntList& dilation);

// Call::dtype is that of the result; the tap gradients are float64 for float64, else float32.
Call validate_tap_spread(const Tensor& tap_grads, const IntList& size,
                         torch::headeronly::ScalarType dtype, const IntList& stride,
                         const IntList& padding, const IntList& output_padding,
                         const IntList& dilation);

// Call::input is the result's gradient and has no spatial axes; weight and tap_sums may be absent.
Call validate_combine_backward(const Tensor& grad, const std::optional<Tensor>& weight,
                               const std::optional<Tensor>& tap_sums, const IntList& kernel_size,
                               int64_t groups);

}  // namespace convt_reduce
