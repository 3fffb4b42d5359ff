// The checks that several operators share, and how a failed one is told.
//
// Sentences have one form: the operator, the argument, what was expected, what came. They are
// thrown as plain std::runtime_error, since STD_TORCH_CHECK would put a file name and a line number
// first.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "validate.h"

namespace convt_reduce {

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

int32_t dtype_code(const Tensor& tensor);
std::string dtype_text(int32_t code);

// Python's None reaches an operator as an undefined tensor.
void check_given(const char* op, const char* name, const Tensor& tensor);
// That the storage reaches to the last element. It need not: untyped_storage().resize_() is how
// some programs free a tensor that they mean to fill again, and reading it would end the process.
void check_memory(const char* op, const char* name, const Tensor& tensor);

Dtype check_floating(const char* op, const char* name, const Tensor& tensor);
// As `first`, the argument called `of`, has.
void check_same_dtype(const char* op, const char* name, const Tensor& tensor, const Tensor& first,
                      const char* of = "input");
void check_same_device(const char* op, const char* name, const Tensor& tensor, const Tensor& first,
                       const char* of = "input");

// Checks the four lists against the sizes and the kernel of `spatial` axes, all at least 1, and
// fills the last `spatial` of the three axes.
void check_axes(const char* op, int spatial, const int64_t* sizes, const int64_t* kernel,
                const IntList& stride, const IntList& padding, const IntList& output_padding,
                const IntList& dilation, Axis (&axes)[kAxes]);

}  // namespace convt_reduce
