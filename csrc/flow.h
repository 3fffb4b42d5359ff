// The data flow of the operators, written once for both backends.
//
//   fused_mean            validate -> stats -> combine, or both at once
//   _fused_mean_with_sums the same, and cell sums -> tap sums
//   _tap_sums             validate -> stats -> tap sums
//   _tap_spread           validate -> spread
//   _combine_backward     validate -> combine's derivative
//
// A Backend is a class that is made for one call. It knows pointers, sizes and where to run:
//   Backend(const Call&)
//   int64_t chunks()                                  times cell_sums' size that stats wants
//   void stats(void* cell_sums, bool whole, void* scratch)
//                                                     [planes][cells], accumulate type; else maybe
//                                                     [chunks][planes][cells], for combine alone;
//                                                     scratch: combine's, if that follows
//   int64_t combine_scratch()                         elements of that type that combine wants
//   void combine(const void* cell_sums, void* scratch, void* y)       y [batch][c_out]
//   void combine_backward(const CombineBackward&)
//   std::optional<int64_t> mean_scratch()             the same for mean; none: it does not serve
//   void mean(void* scratch, void* y)                 stats and combine without cell sums
//   void tap_sums(const void* cell_sums, void* out)   [planes][taps], accumulate type
//   int64_t spread_scratch()                          elements of that type that spread wants
//   void spread(void* scratch, void* grad)            [planes][positions]
// Memory comes from torch's allocator through the C shim, which is several microseconds cheaper per
// call than asking the dispatcher for new_empty.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cells.h"
#include "validate.h"

namespace convt_reduce {

inline int32_t dtype_code(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return aoti_torch_dtype_float32();
    case Dtype::kFloat64:
      return aoti_torch_dtype_float64();
    case Dtype::kFloat16:
      return aoti_torch_dtype_float16();
    case Dtype::kBFloat16:
      return aoti_torch_dtype_bfloat16();
  }
  throw std::logic_error("convt_reduce: unknown dtype");
}

// Sums of float16 and bfloat16 are held in float32.
inline Dtype accumulate_dtype(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
}

// An uninitialised tensor on the call's device: contiguous, or with dimension 1 innermost.
inline Tensor empty(const Call& call, const IntList& sizes, Dtype dtype,
                    bool channels_last = false) {
  IntList strides(sizes.size());
  int64_t stride = 1;
  const auto add = [&](size_t i) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  };
  if (channels_last) add(1);
  for (size_t i = sizes.size(); i-- > 0;) {
    if (!channels_last || i != 1) add(i);
  }
  AtenTensorHandle handle = nullptr;
  const auto code =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               dtype_code(dtype), call.device_type, call.device_index, &handle);
  if (code != 0) {
    // The C interface gives a code and no text; torch itself has written the text to stderr.
    std::string text = "convt_reduce: memory for a tensor of sizes [";
    for (size_t i = 0; i < sizes.size(); ++i)
      text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
    text += "] must be free, got none: torch is out of memory, or an earlier error stopped it";
    throw std::runtime_error(text + " (its own words are on stderr)");
  }
  return Tensor(handle);
}

// [N, channels, *last] or, unbatched, [channels, *last].
inline IntList shape(const Call& call, int64_t channels, const int64_t (&last)[kAxes]) {
  IntList sizes;
  sizes.reserve(2 + kAxes);
  if (call.batched) sizes.push_back(call.problem.batch);
  sizes.push_back(channels);
  for (int a = kAxes - call.spatial; a < kAxes; ++a) sizes.push_back(last[a]);
  return sizes;
}

// Memory of the accumulate type for the length of a call; none for 0 elements.
class Scratch {
 public:
  Scratch(const Call& call, int64_t elements) {
    if (elements > 0) tensor_ = empty(call, {elements}, accumulate_dtype(call.dtype));
  }
  void* data() const { return tensor_.has_value() ? tensor_->mutable_data_ptr() : nullptr; }

 private:
  std::optional<Tensor> tensor_;
};

template <typename Backend>
struct Flow {
  // `scratch` is for a combine that follows.
  static Tensor cell_sums(const Call& call, Backend& backend, bool whole, void* scratch) {
    const Problem& problem = call.problem;
    Tensor sums = empty(call, {backend.chunks() * problem.planes() * backend.cells().count()},
                        accumulate_dtype(call.dtype));
    backend.stats(sums.mutable_data_ptr(), whole, scratch);
    return sums;
  }

  static Tensor result(const Call& call) {
    const int64_t ones[kAxes] = {1, 1, 1};
    return empty(call, shape(call, call.problem.c_out, ones), call.dtype);
  }

  // The result, and the cell sums that it came from, which are `whole` for others. All memory is
  // taken before anything is launched: a kernel behind stats may write its own before stats is
  // done, and memory that another thread frees in between may still be in use by kernels that stats
  // does not wait for.
  static std::tuple<Tensor, Tensor> combined(const Call& call, Backend& backend, bool whole) {
    Tensor y = result(call);
    const Scratch scratch(call, backend.combine_scratch());
    Tensor sums = cell_sums(call, backend, whole, scratch.data());
    backend.combine(sums.const_data_ptr(), scratch.data(), y.mutable_data_ptr());
    return {y, sums};
  }

  static Tensor tap_summed(const Call& call, Backend& backend, const Tensor& sums) {
    const Axis* axis = call.problem.axis;
    const int64_t kernel[kAxes] = {axis[0].kernel, axis[1].kernel, axis[2].kernel};
    Tensor out = empty(call, shape(call, call.problem.c_in, kernel), accumulate_dtype(call.dtype));
    backend.tap_sums(sums.const_data_ptr(), out.mutable_data_ptr());
    return out;
  }

  static Tensor fused_mean(const Tensor& input, const Tensor& weight,
                           const std::optional<Tensor>& bias, const IntList& stride,
                           const IntList& padding, const IntList& output_padding, int64_t groups,
                           const IntList& dilation, double multiplier) {
    const Call call = validate_fused_mean("fused_mean", input, weight, bias, stride, padding,
                                          output_padding, groups, dilation, multiplier);
    Backend backend(call);
    const std::optional<int64_t> elements = backend.mean_scratch();
    if (!elements.has_value()) return std::get<0>(combined(call, backend, false));
    Tensor y = result(call);
    const Scratch scratch(call, *elements);
    backend.mean(scratch.data(), y.mutable_data_ptr());
    return y;
  }

  static std::tuple<Tensor, Tensor> fused_mean_with_sums(
      const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
      const IntList& stride, const IntList& padding, const IntList& output_padding, int64_t groups,
      const IntList& dilation, double multiplier) {
    // The user called fused_mean; autograd came here for him, so errors keep that name.
    const Call call = validate_fused_mean("fused_mean", input, weight, bias, stride, padding,
                                          output_padding, groups, dilation, multiplier);
    Backend backend(call);
    const auto [y, sums] = combined(call, backend, true);
    Tensor taps = tap_summed(call, backend, sums);
    return {y, taps};
  }

  static Tensor tap_sums(const Tensor& input, const IntList& kernel_size, const IntList& stride,
                         const IntList& padding, const IntList& output_padding,
                         const IntList& dilation) {
    const Call call =
        validate_tap_sums(input, kernel_size, stride, padding, output_padding, dilation);
    Backend backend(call);
    return tap_summed(call, backend, cell_sums(call, backend, true, nullptr));
  }

  static Tensor tap_spread(const Tensor& tap_grads, const IntList& size,
                           torch::headeronly::ScalarType dtype, const IntList& stride,
                           const IntList& padding, const IntList& output_padding,
                           const IntList& dilation) {
    const Call call =
        validate_tap_spread(tap_grads, size, dtype, stride, padding, output_padding, dilation);
    Backend backend(call);
    const Axis* axis = call.problem.axis;
    const int64_t sizes[kAxes] = {axis[0].size, axis[1].size, axis[2].size};
    Tensor grad = empty(call, shape(call, call.problem.c_in, sizes), call.dtype);
    const Scratch scratch(call, backend.spread_scratch());
    backend.spread(scratch.data(), grad.mutable_data_ptr());
    return grad;
  }

  static std::tuple<Tensor, Tensor, Tensor> combine_backward(
      const Tensor& grad, const std::optional<Tensor>& weight,
      const std::optional<Tensor>& tap_sums, const IntList& kernel_size, int64_t groups,
      double scale, double multiplier, bool bias, bool channels_last) {
    Call call = validate_combine_backward(grad, weight, tap_sums, kernel_size, groups);
    call.problem.multiplier = multiplier;
    const Problem& problem = call.problem;
    CombineBackward tensors;
    tensors.grad = call.input.data;
    tensors.grad_stride_n = call.input.stride_n;
    tensors.grad_stride_c = call.input.stride_c;
    tensors.scale = scale;
    tensors.weight = call.weight;
    tensors.channels_last = channels_last;
    if (tap_sums.has_value()) tensors.tap_sums = tap_sums->const_data_ptr();
    Backend backend(call);
    const int64_t group_out = problem.c_out / problem.groups;
    const int64_t kernel[kAxes] = {problem.axis[0].kernel, problem.axis[1].kernel,
                                   problem.axis[2].kernel};
    const auto wanted = [&](bool is, const IntList& sizes, Dtype dtype, bool last, void*& data) {
      Tensor tensor = is ? empty(call, sizes, dtype, last) : empty(call, {0}, dtype);
      if (is) data = tensor.mutable_data_ptr();
      return tensor;
    };
    IntList weight_sizes{problem.c_in, group_out};
    weight_sizes.insert(weight_sizes.end(), kernel_size.begin(), kernel_size.end());
    Tensor tap_grads = wanted(weight.has_value(), shape(call, problem.c_in, kernel),
                              accumulate_dtype(call.dtype), false, tensors.tap_grads);
    Tensor grad_weight =
        wanted(tap_sums.has_value(), weight_sizes, call.dtype, channels_last, tensors.grad_weight);
    Tensor grad_bias = wanted(bias, {problem.c_out}, call.dtype, false, tensors.grad_bias);
    backend.combine_backward(tensors);
    return {tap_grads, grad_weight, grad_bias};
  }

  static void implement(torch::stable::detail::StableLibrary& library) {
    library.impl("fused_mean", TORCH_BOX(&fused_mean));
    library.impl("_fused_mean_with_sums", TORCH_BOX(&fused_mean_with_sums));
    library.impl("_tap_sums", TORCH_BOX(&tap_sums));
    library.impl("_tap_spread", TORCH_BOX(&tap_spread));
    library.impl("_combine_backward", TORCH_BOX(&combine_backward));
  }
};

}  // namespace convt_reduce
