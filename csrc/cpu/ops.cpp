// The CPU implementations: the shared data flow with the CPU kernels, registered for the CPU key.
#include <torch/csrc/stable/ops.h>

#include "cpu/kernels.h"
#include "flow.h"
#include "registration.h"

namespace convt_reduce {
namespace {

class CpuBackend {
 public:
  explicit CpuBackend(const Call& call) : call_(call), cells_(call.problem) {}

  const Cells& cells() const { return cells_.get(); }
  int64_t chunks() const { return 1; }

  void stats(void* cell_sums, bool /*whole*/, void* /*scratch*/) const {
    cpu::stats(call_.problem, cells(), call_.input, call_.dtype, parallel_for, cell_sums);
  }

  int64_t combine_scratch() const { return 0; }

  void combine(const void* cell_sums, void* /*scratch*/, void* y) const {
    cpu::combine(call_.problem, cells(), call_.weight, call_.bias, call_.dtype, parallel_for,
                 cell_sums, y);
  }

  std::optional<int64_t> mean_scratch() const { return std::nullopt; }

  void mean(void* /*scratch*/, void* /*y*/) const {}  // not called

  void combine_backward(const CombineBackward& tensors) const {
    cpu::combine_backward(call_.problem, tensors, call_.dtype);
  }

  void tap_sums(const void* cell_sums, void* out) const {
    cpu::tap_sums(call_.problem, cells(), call_.dtype, parallel_for, cell_sums, out);
  }

  int64_t spread_scratch() const { return 0; }

  void spread(void* /*scratch*/, void* grad) const {
    cpu::spread(call_.problem, cells(), call_.input, call_.dtype, parallel_for, grad);
  }

 private:
  static void parallel_for(int64_t count, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& body) {
    if (count > 0) torch::stable::parallel_for(0, count, grain, body);
  }

  const Call& call_;
  HostCells cells_;
};

}  // namespace
}  // namespace convt_reduce

// What STABLE_TORCH_LIBRARY_IMPL does, unless another copy of this library is there already.
static const bool implemented = [] {
  using torch::stable::detail::StableLibrary;
  if (!convt_reduce::define_operators()) return false;
  static const torch::stable::detail::StableTorchLibraryInit kernels(
      StableLibrary::Kind::IMPL, &convt_reduce::Flow<convt_reduce::CpuBackend>::implement,
      "convt_reduce", "CPU", __FILE__, __LINE__);
  return true;
}();
