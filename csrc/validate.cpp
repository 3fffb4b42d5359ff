// One function per operator: its checks in order, then the Problem.
#include "validate.h"

#include "checks.h"

namespace convt_reduce {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;

void fill_device(Call& call, const Tensor& tensor) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &call.device_type));
  call.device_index = tensor.get_device_index();
}

void fill_weight(Call& call, const Tensor& weight) {
  const IntHeaderOnlyArrayRef strides = weight.strides();
  call.weight.data = weight.const_data_ptr();
  call.weight.stride_c_in = strides[0];
  call.weight.stride_c_out = strides[1];
  for (int i = 0; i < call.spatial; ++i) {
    call.weight.stride[kAxes - call.spatial + i] = strides[2 + i];
  }
}

void fill_input(Call& call, const Tensor& input) {
  const IntHeaderOnlyArrayRef strides = input.strides();
  const int lead = call.batched ? 2 : 1;
  call.input.data = input.const_data_ptr();
  call.input.stride_n = call.batched ? strides[0] : 0;
  call.input.stride_c = strides[lead - 1];
  for (int i = 0; i < call.spatial; ++i) {
    call.input.stride[kAxes - call.spatial + i] = strides[lead + i];
  }
}

// The batch, the channels and the spatial sizes of `input`, for an operator of `spatial` axes.
void check_input_sizes(const char* op, Call& call, const Tensor& input) {
  const IntHeaderOnlyArrayRef sizes = input.sizes();
  bool empty = false;
  for (size_t i = call.batched ? 1 : 0; i < sizes.size(); ++i) empty = empty || sizes[i] == 0;
  if (empty) {
    fail(op, "input must have at least 1 channel and 1 element on every spatial axis, got shape ",
         list_text(sizes));
  }
  call.problem.batch = call.batched ? sizes[0] : 1;
  call.problem.c_in = sizes[call.batched ? 1 : 0];
}

}  // namespace

// ---- the operators ------------------------------------------------------------------------------

Call validate_fused_mean(const char* op, const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, const IntList& stride,
                         const IntList& padding, const IntList& output_padding, int64_t groups,
                         const IntList& dilation, double multiplier) {
  Call call;
  check_given(op, "input", input);
  check_given(op, "weight", weight);
  call.dtype = check_floating(op, "input", input);
  const IntHeaderOnlyArrayRef sizes = input.sizes();
  const IntHeaderOnlyArrayRef kernel = weight.sizes();
  if (kernel.size() < 3 || kernel.size() > 2 + kAxes) {
    fail(op, "weight must have 3, 4 or 5 dimensions [C_in, C_out/groups, *kernel_size], got shape ",
         list_text(kernel));
  }
  call.spatial = static_cast<int>(kernel.size()) - 2;
  call.batched = sizes.size() == kernel.size();
  if (!call.batched && sizes.size() + 1 != kernel.size()) {
    fail(op, "input must have ", kernel.size(), " dimensions [N, C_in, *spatial] or ",
         kernel.size() - 1, " [C_in, *spatial] to go with a weight of ", kernel.size(),
         " dimensions, got shape ", list_text(sizes));
  }
  check_same_dtype(op, "weight", weight, input);
  check_same_device(op, "weight", weight, input);
  check_input_sizes(op, call, input);
  for (size_t i = 0; i < kernel.size(); ++i) {
    if (kernel[i] == 0) {
      fail(op, "weight must have at least 1 element, got shape ", list_text(kernel));
    }
  }
  Problem& problem = call.problem;
  if (kernel[0] != problem.c_in) {
    fail(op, "weight must have input's ", problem.c_in, " channels in dimension 0, got shape ",
         list_text(kernel));
  }
  if (groups < 1) fail(op, "groups must be at least 1, got ", groups);
  if (problem.c_in % groups != 0) {
    fail(op, "groups must divide input's ", problem.c_in, " channels, got ", groups);
  }
  problem.groups = groups;
  problem.c_out = kernel[1] * groups;
  problem.multiplier = multiplier;
  if (bias.has_value()) {
    const IntHeaderOnlyArrayRef shape = bias->sizes();
    if (shape.size() != 1 || shape[0] != problem.c_out) {
      fail(op, "bias must have shape [", problem.c_out, "], got shape ", list_text(shape));
    }
    check_same_dtype(op, "bias", *bias, input);
    check_same_device(op, "bias", *bias, input);
  }
  check_axes(op, call.spatial, sizes.data() + (call.batched ? 2 : 1), kernel.data() + 2, stride,
             padding, output_padding, dilation, call.problem.axis);
  check_memory(op, "input", input);
  check_memory(op, "weight", weight);
  if (bias.has_value()) check_memory(op, "bias", *bias);

  fill_device(call, input);
  fill_input(call, input);
  fill_weight(call, weight);
  if (bias.has_value()) {
    call.bias.data = bias->const_data_ptr();
    call.bias.stride = bias->strides()[0];
  }
  return call;
}

Call validate_tap_sums(const Tensor& input, const IntList& kernel_size, const IntList& stride,
                       const IntList& padding, const IntList& output_padding,
                       const IntList& dilation) {
  const char* op = "_tap_sums";
  Call call;
  call.dtype = check_floating(op, "input", input);
  if (kernel_size.empty() || kernel_size.size() > kAxes) {
    fail(op, "kernel_size must have 1, 2 or 3 entries, got ", kernel_size.size(), " entries");
  }
  call.spatial = static_cast<int>(kernel_size.size());
  const size_t dims = input.sizes().size();
  call.batched = dims == kernel_size.size() + 2;
  if (!call.batched && dims != kernel_size.size() + 1) {
    fail(op, "input must have ", call.spatial + 2, " dimensions [N, C_in, *spatial] or ",
         call.spatial + 1, " [C_in, *spatial] to go with a kernel_size of ", call.spatial,
         call.spatial == 1 ? " entry" : " entries", ", got shape ", list_text(input.sizes()));
  }
  check_input_sizes(op, call, input);
  for (int64_t k : kernel_size) {
    if (k < 1) {
      fail(op, "kernel_size must be at least 1 on every axis, got ", list_text(kernel_size));
    }
  }
  check_axes(op, call.spatial, input.sizes().data() + (call.batched ? 2 : 1), kernel_size.data(),
             stride, padding, output_padding, dilation, call.problem.axis);
  check_memory(op, "input", input);
  fill_device(call, input);
  fill_input(call, input);
  return call;
}

Call validate_tap_spread(const Tensor& tap_grads, const IntList& size, ScalarType dtype,
                         const IntList& stride, const IntList& padding,
                         const IntList& output_padding, const IntList& dilation) {
  const char* op = "_tap_spread";
  Call call;
  const int32_t accumulate = dtype_code(tap_grads);
  if (accumulate != aoti_torch_dtype_float32() && accumulate != aoti_torch_dtype_float64()) {
    fail(op, "tap_grads must be float32 or float64, got ", dtype_text(accumulate));
  }
  const int32_t result = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  if (accumulate == aoti_torch_dtype_float64()) {
    if (result != accumulate) {
      fail(op, "dtype must be float64 for float64 tap_grads, got ", dtype_text(result));
    }
    call.dtype = Dtype::kFloat64;
  } else if (result == aoti_torch_dtype_float32()) {
    call.dtype = Dtype::kFloat32;
  } else if (result == aoti_torch_dtype_float16()) {
    call.dtype = Dtype::kFloat16;
  } else if (result == aoti_torch_dtype_bfloat16()) {
    call.dtype = Dtype::kBFloat16;
  } else {
    fail(op, "dtype must be float32, float16 or bfloat16 for float32 tap_grads, got ",
         dtype_text(result));
  }
  if (size.empty() || size.size() > kAxes) {
    fail(op, "size must have 1, 2 or 3 entries, got ", size.size(), " entries");
  }
  call.spatial = static_cast<int>(size.size());
  const IntHeaderOnlyArrayRef shape = tap_grads.sizes();
  call.batched = shape.size() == size.size() + 2;
  if (!call.batched && shape.size() != size.size() + 1) {
    fail(op, "tap_grads must have ", call.spatial + 2, " dimensions [N, C, *kernel_size] or ",
         call.spatial + 1, " [C, *kernel_size] to go with a size of ", call.spatial,
         call.spatial == 1 ? " entry" : " entries", ", got shape ", list_text(shape));
  }
  const int lead = call.batched ? 2 : 1;
  for (size_t i = lead - 1; i < shape.size(); ++i) {
    if (shape[i] > 0) continue;
    fail(op, "tap_grads must have at least 1 channel and 1 tap on every axis, got shape ",
         list_text(shape));
  }
  for (int64_t n : size) {
    if (n < 1) fail(op, "size must be at least 1 on every axis, got ", list_text(size));
  }
  call.problem.batch = call.batched ? shape[0] : 1;
  call.problem.c_in = shape[lead - 1];
  check_axes(op, call.spatial, size.data(), shape.data() + lead, stride, padding, output_padding,
             dilation, call.problem.axis);
  check_memory(op, "tap_grads", tap_grads);
  fill_device(call, tap_grads);
  fill_input(call, tap_grads);  // its strides are over taps here
  return call;
}

Call validate_combine_backward(const Tensor& grad, const std::optional<Tensor>& weight,
                               const std::optional<Tensor>& tap_sums, const IntList& kernel_size,
                               int64_t groups) {
  const char* op = "_combine_backward";
  Call call;
  check_given(op, "grad", grad);
  call.dtype = check_floating(op, "grad", grad);
  if (kernel_size.empty() || kernel_size.size() > kAxes) {
    fail(op, "kernel_size must have 1, 2 or 3 entries, got ", kernel_size.size(), " entries");
  }
  call.spatial = static_cast<int>(kernel_size.size());
  const IntHeaderOnlyArrayRef shape = grad.sizes();
  call.batched = shape.size() == kernel_size.size() + 2;
  const size_t lead = call.batched ? 2 : 1;
  bool right = call.batched || shape.size() == kernel_size.size() + 1;
  for (size_t i = lead - 1; right && i < shape.size(); ++i) {
    right = i < lead ? shape[i] > 0 : shape[i] == 1;
  }
  if (!right) {
    fail(op, "grad must have shape [N, C_out, 1..] or [C_out, 1..] with ", call.spatial,
         call.spatial == 1 ? " 1" : " 1s", ", got shape ", list_text(shape));
  }
  for (int64_t k : kernel_size) {
    if (k >= 1) continue;
    fail(op, "kernel_size must be at least 1 on every axis, got ", list_text(kernel_size));
  }
  Problem& problem = call.problem;
  problem.batch = call.batched ? shape[0] : 1;
  problem.c_out = shape[lead - 1];
  problem.groups = groups;
  if (groups < 1) fail(op, "groups must be at least 1, got ", groups);
  if (problem.c_out % groups != 0) {
    fail(op, "groups must divide grad's ", problem.c_out, " channels, got ", groups);
  }
  // The input channels, from whichever is given; a shape that has none is refused below.
  const auto channels_of = [&](const Tensor& tensor, int64_t at) {
    return tensor.dim() > at ? tensor.sizes()[at] : 0;
  };
  if (weight.has_value()) {
    problem.c_in = channels_of(*weight, 0);
  } else if (tap_sums.has_value()) {
    problem.c_in = channels_of(*tap_sums, call.batched ? 1 : 0);
  }
  const auto check = [&](const char* name, const Tensor& tensor, IntList wanted) {
    wanted.insert(wanted.end(), kernel_size.begin(), kernel_size.end());
    const IntHeaderOnlyArrayRef sizes = tensor.sizes();
    const bool same = problem.c_in >= 1 && problem.c_in % groups == 0 &&
                      IntList(sizes.begin(), sizes.end()) == wanted;
    if (same) return;
    fail(op, name, " must have shape ", list_text(wanted),
         ", its input channels at least 1 and divided by groups, got shape ", list_text(sizes));
  };
  if (weight.has_value()) {
    check("weight", *weight, {problem.c_in, problem.c_out / groups});
    check_same_dtype(op, "weight", *weight, grad, "grad");
    check_same_device(op, "weight", *weight, grad, "grad");
    check_memory(op, "weight", *weight);
    fill_weight(call, *weight);
  }
  if (tap_sums.has_value()) {
    check("tap_sums", *tap_sums,
          call.batched ? IntList{problem.batch, problem.c_in} : IntList{problem.c_in});
    const bool wide = call.dtype == Dtype::kFloat64;
    const int32_t accumulate = wide ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    if (dtype_code(*tap_sums) != accumulate) {
      fail(op, "tap_sums must be ", dtype_text(accumulate), " for a grad of ",
           dtype_text(dtype_code(grad)), ", got ", dtype_text(dtype_code(*tap_sums)));
    }
    check_same_device(op, "tap_sums", *tap_sums, grad, "grad");
    if (!tap_sums->is_contiguous()) {
      fail(op, "tap_sums must be contiguous, got strides ", list_text(tap_sums->strides()));
    }
    check_memory(op, "tap_sums", *tap_sums);
  }
  check_memory(op, "grad", grad);
  for (int i = 0; i < call.spatial; ++i) {
    Axis& axis = problem.axis[kAxes - call.spatial + i];
    axis.kernel = kernel_size[i];
    axis.output = kernel_size[i];
  }
  fill_device(call, grad);
  fill_input(call, grad);
  return call;
}

}  // namespace convt_reduce
