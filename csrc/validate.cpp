// Every check and every error text of the native side. Sentences have one form: the operator, the
// argument, what was expected, what came. Texts are thrown as plain std::runtime_error, since
// STD_TORCH_CHECK would put a file name and a line number in front of the sentence.
#include "validate.h"

#include <sstream>
#include <stdexcept>
#include <string>

namespace convt_reduce {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;

// Sizes, strides and positions of one axis stay below this, so that sums of a few of them fit.
constexpr __int128 kMaxExtent = static_cast<__int128>(1) << 62;

// ---- texts -------------------------------------------------------------------------------------

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <typename Ints>
std::string list_text(const Ints& values) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  text << ']';
  return text.str();
}

int32_t dtype_code(const Tensor& tensor) {
  int32_t code = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

std::string dtype_text(int32_t code) {
  struct Name {
    int32_t code;
    const char* text;
  };
  const Name names[] = {
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
  };
  for (const Name& name : names) {
    if (name.code == code) return name.text;
  }
  return "an unsupported dtype";
}

std::string device_text(const Tensor& tensor) {
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  const std::string index = std::to_string(tensor.get_device_index());
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + index;
  if (type == aoti_torch_device_type_xpu()) return "xpu:" + index;
  if (type == aoti_torch_device_type_mps()) return "mps:" + index;
  return "another device";
}

// ---- pieces that several operators share
// ----------------------------------------------------------

Dtype floating_dtype(const char* op, const char* name, const Tensor& tensor) {
  const int32_t code = dtype_code(tensor);
  if (code == aoti_torch_dtype_float32()) return Dtype::kFloat32;
  if (code == aoti_torch_dtype_float64()) return Dtype::kFloat64;
  if (code == aoti_torch_dtype_float16()) return Dtype::kFloat16;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBFloat16;
  fail(op, name, " must be float32, float64, float16 or bfloat16, got ", dtype_text(code));
}

void same_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  if (dtype_code(tensor) == dtype_code(input)) return;
  fail(op, name, " must have input's dtype ", dtype_text(dtype_code(input)), ", got ",
       dtype_text(dtype_code(tensor)));
}

void same_device(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  int32_t type = 0;
  int32_t input_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(input.get(), &input_type));
  if (type == input_type && tensor.get_device_index() == input.get_device_index()) return;
  fail(op, name, " must be on input's device ", device_text(input), ", got ", device_text(tensor));
}

struct AxisArgument {
  const char* name;
  const IntList* values;
  int64_t minimum;

  int64_t at(int axis) const { return values->size() == 1 ? (*values)[0] : (*values)[axis]; }
};

void check_axis_arguments(const char* op, std::initializer_list<AxisArgument> arguments,
                          int spatial) {
  for (const AxisArgument& argument : arguments) {
    const size_t entries = argument.values->size();
    if (entries == 1 || entries == static_cast<size_t>(spatial)) continue;
    fail(op, argument.name, " must have ",
         spatial == 1 ? "1 entry" : "1 or " + std::to_string(spatial) + " entries", ", got ",
         entries, entries == 1 ? " entry" : " entries");
  }
  for (const AxisArgument& argument : arguments) {
    for (int64_t value : *argument.values) {
      if (value >= argument.minimum) continue;
      fail(op, argument.name, " must be at least ", argument.minimum, " on every axis, got ",
           list_text(*argument.values));
    }
  }
}

// Fills the last `spatial` axes of the problem from the lists. Sizes and kernels are at least 1.
void fill_axes(const char* op, Call& call, const int64_t* sizes, const int64_t* kernel,
               const IntList& stride, const IntList& padding, const IntList& output_padding,
               const IntList& dilation) {
  const AxisArgument strides{"stride", &stride, 1};
  const AxisArgument paddings{"padding", &padding, 0};
  const AxisArgument output_paddings{"output_padding", &output_padding, 0};
  const AxisArgument dilations{"dilation", &dilation, 1};
  check_axis_arguments(op, {strides, paddings, output_paddings, dilations}, call.spatial);

  for (int i = 0; i < call.spatial; ++i) {
    if (output_paddings.at(i) < strides.at(i) || output_paddings.at(i) < dilations.at(i)) continue;
    fail(op, "output_padding must be smaller than stride or dilation on every axis, got ",
         "output_padding ", output_paddings.at(i), " with stride ", strides.at(i), " and dilation ",
         dilations.at(i), " on spatial axis ", i);
  }
  for (int i = 0; i < call.spatial; ++i) {
    Axis& axis = call.problem.axis[kAxes - call.spatial + i];
    axis.size = sizes[i];
    axis.kernel = kernel[i];
    axis.stride = strides.at(i);
    axis.padding = paddings.at(i);
    axis.dilation = dilations.at(i);
    const __int128 extent = static_cast<__int128>(axis.size - 1) * axis.stride +
                            static_cast<__int128>(axis.dilation) * (axis.kernel - 1) +
                            output_paddings.at(i) + 1;
    if (extent >= kMaxExtent) {
      fail(op, "stride, dilation and output_padding must give an output size below 2**62, ",
           "got a larger one on spatial axis ", i);
    }
    const __int128 output = extent - 2 * static_cast<__int128>(axis.padding);
    if (output < 1) {
      // No less than -2**64: padding is an int64. Printed in the same way as Python does.
      const bool fits = output >= INT64_MIN;
      fail(op, "padding must leave an output of at least 1 on every axis, got output size ",
           fits ? std::to_string(static_cast<int64_t>(output)) : std::string("below -2**63"),
           " on spatial axis ", i);
    }
    axis.output = static_cast<int64_t>(output);
  }
}

void fill_device(Call& call, const Tensor& tensor) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &call.device_type));
  call.device_index = tensor.get_device_index();
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
  call.dtype = floating_dtype(op, "input", input);
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
  same_dtype(op, "weight", weight, input);
  same_device(op, "weight", weight, input);
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
    same_dtype(op, "bias", *bias, input);
    same_device(op, "bias", *bias, input);
  }
  fill_axes(op, call, sizes.data() + (call.batched ? 2 : 1), kernel.data() + 2, stride, padding,
            output_padding, dilation);

  fill_device(call, input);
  fill_input(call, input);
  const IntHeaderOnlyArrayRef weight_strides = weight.strides();
  call.weight.data = weight.const_data_ptr();
  call.weight.stride_c_in = weight_strides[0];
  call.weight.stride_c_out = weight_strides[1];
  for (int i = 0; i < call.spatial; ++i) {
    call.weight.stride[kAxes - call.spatial + i] = weight_strides[2 + i];
  }
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
  call.dtype = floating_dtype(op, "input", input);
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
  fill_axes(op, call, input.sizes().data() + (call.batched ? 2 : 1), kernel_size.data(), stride,
            padding, output_padding, dilation);
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
  fill_axes(op, call, size.data(), shape.data() + lead, stride, padding, output_padding, dilation);
  fill_device(call, tap_grads);
  fill_input(call, tap_grads);  // its strides are over taps here
  return call;
}

}  // namespace convt_reduce
