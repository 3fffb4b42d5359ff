#include "checks.h"

#include <initializer_list>

namespace convt_reduce {
namespace {

// Sizes and positions of one axis stay below this, so that sums of a few of them fit in an int64.
constexpr __int128 kMaxExtent = static_cast<__int128>(1) << 62;

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

}  // namespace

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

void check_given(const char* op, const char* name, const Tensor& tensor) {
  if (!tensor.defined()) fail(op, name, " must be a tensor, got None");
}

void check_memory(const char* op, const char* name, const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t offset = 0;
  int64_t bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  int64_t elements = offset + 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return;
    elements += (sizes[i] - 1) * strides[i];
  }
  const int64_t needed = elements * static_cast<int64_t>(tensor.element_size());
  if (needed <= bytes) return;
  fail(op, name, " must have memory for all of its elements, got a storage of ", bytes,
       " bytes where ", needed, " are needed");
}

Dtype check_floating(const char* op, const char* name, const Tensor& tensor) {
  const int32_t code = dtype_code(tensor);
  if (code == aoti_torch_dtype_float32()) return Dtype::kFloat32;
  if (code == aoti_torch_dtype_float64()) return Dtype::kFloat64;
  if (code == aoti_torch_dtype_float16()) return Dtype::kFloat16;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBFloat16;
  fail(op, name, " must be float32, float64, float16 or bfloat16, got ", dtype_text(code));
}

void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& first,
                      const char* of) {
  if (dtype_code(tensor) == dtype_code(first)) return;
  fail(op, name, " must have ", of, "'s dtype ", dtype_text(dtype_code(first)), ", got ",
       dtype_text(dtype_code(tensor)));
}

void check_same_device(const char* op, const char* name, const Tensor& tensor, const Tensor& first,
                       const char* of) {
  int32_t type = 0;
  int32_t first_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(first.get(), &first_type));
  if (type == first_type && tensor.get_device_index() == first.get_device_index()) return;
  fail(op, name, " must be on ", of, "'s device ", device_text(first), ", got ",
       device_text(tensor));
}

void check_axes(const char* op, int spatial, const int64_t* sizes, const int64_t* kernel,
                const IntList& stride, const IntList& padding, const IntList& output_padding,
                const IntList& dilation, Axis (&axes)[kAxes]) {
  const AxisArgument strides{"stride", &stride, 1};
  const AxisArgument paddings{"padding", &padding, 0};
  const AxisArgument output_paddings{"output_padding", &output_padding, 0};
  const AxisArgument dilations{"dilation", &dilation, 1};
  check_axis_arguments(op, {strides, paddings, output_paddings, dilations}, spatial);

  for (int i = 0; i < spatial; ++i) {
    if (output_paddings.at(i) < strides.at(i) || output_paddings.at(i) < dilations.at(i)) continue;
    fail(op, "output_padding must be smaller than stride or dilation on every axis, got ",
         "output_padding ", output_paddings.at(i), " with stride ", strides.at(i), " and dilation ",
         dilations.at(i), " on spatial axis ", i);
  }
  for (int i = 0; i < spatial; ++i) {
    Axis& axis = axes[kAxes - spatial + i];
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

}  // namespace convt_reduce
