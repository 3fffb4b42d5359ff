// The operators' schemas, and nothing else. Implementations are registered by cpu/ops.cpp here and
// by cuda/ops.cpp in a library of its own; fake kernels, autograd and the like are Python.
//
// Argument order is that of torch.nn.functional.conv_transposeNd, then multiplier. What crosses an
// operator boundary is indexed by tap, a shape that anyone can compute from the arguments.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <cstdio>
#include <exception>

#include "registration.h"

#define FUSED_MEAN_ARGUMENTS                                               \
  "(Tensor input, Tensor weight, Tensor? bias=None, SymInt[] stride=[1], " \
  "SymInt[] padding=[0], SymInt[] output_padding=[0], SymInt groups=1, "   \
  "SymInt[] dilation=[1], float multiplier=1.0)"

#define TAP_ARGUMENTS                                                        \
  "SymInt[] stride=[1], SymInt[] padding=[0], SymInt[] output_padding=[0], " \
  "SymInt[] dilation=[1])"

namespace convt_reduce {
namespace {

using torch::stable::detail::StableLibrary;

void define(StableLibrary& library) {
  library.def("fused_mean" FUSED_MEAN_ARGUMENTS " -> Tensor");
  // The same result with the tap sums [N, C_in, *kernel_size] that its backward needs.
  library.def("_fused_mean_with_sums" FUSED_MEAN_ARGUMENTS " -> (Tensor, Tensor)");
  // The input summed over each tap's run, and its adjoint.
  library.def("_tap_sums(Tensor input, SymInt[] kernel_size, " TAP_ARGUMENTS " -> Tensor");
  library.def("_tap_spread(Tensor tap_grads, SymInt[] size, ScalarType dtype, " TAP_ARGUMENTS
              " -> Tensor");
  // Combine's derivative: (tap_grads, grad_weight, grad_bias), without elements where not wanted.
  library.def(
      "_combine_backward(Tensor grad, Tensor? weight, Tensor? tap_sums, SymInt[] kernel_size, "
      "SymInt groups, float scale, float multiplier, bool bias, bool channels_last) "
      "-> (Tensor, Tensor, Tensor)");
}

// A fragment, and not STABLE_TORCH_LIBRARY: that one's failure on a second load ends the process,
// since nothing can catch an exception that leaves a static initialiser inside dlopen.
bool try_to_define() {
  try {
    static const torch::stable::detail::StableTorchLibraryInit schemas(
        StableLibrary::Kind::FRAGMENT, &define, "convt_reduce", nullptr, __FILE__, __LINE__);
    return true;
  } catch (const std::exception&) {
    Dl_info here = {};
    dladdr(reinterpret_cast<const void*>(&try_to_define), &here);
    std::fprintf(stderr,
                 "convt_reduce: the operators must be registered by one library, and "
                 "another has them already; ignoring %s\n",
                 here.dli_fname != nullptr ? here.dli_fname : "this copy");
    return false;
  }
}

}  // namespace

bool define_operators() {
  static const bool defined = try_to_define();
  return defined;
}

}  // namespace convt_reduce
