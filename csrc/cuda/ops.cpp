// The CUDA implementations: the shared data flow with the CUDA kernels, registered for the CUDA
// key. This room knows devices and streams; the kernels get a Queue.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#include "flow.h"

#ifndef CONVT_REDUCE_ARCHS
#error "the build passes the compiled architectures as CONVT_REDUCE_ARCHS"
#endif

namespace convt_reduce {
namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int kMostDevices = 64;  // whose attributes are remembered; others are asked each time

// What launches depend on.
struct Device {
  int code = 0;  // what the code that it runs was compiled for, 90 for 9.0; 0 where it has none
  int processors = 1;
  int shared_kib = 48;  // of a block, at most
  bool warpgroup_products = false;
};

// 90 for 9.0.
int capability_of(int device) {
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

// Of the current device.
Device ask_device(int device) {
  Device answer;
  int shared_bytes = 0;
  if (cudaDeviceGetAttribute(&answer.processors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess ||
      cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    cudaGetLastError();
    return Device();  // the launch itself will report what is wrong
  }
  answer.shared_kib = shared_bytes / 1024;
  answer.code = cuda::compiled_for();
  answer.warpgroup_products = cuda::compiled_for_warpgroups();
  return answer;
}

Device device_of(int device) {
  static std::atomic<int64_t> known[kMostDevices];  // all numbers in one, so that they agree
  constexpr int64_t kBase = 1 << 16;
  const bool remembered = device >= 0 && device < kMostDevices;
  if (remembered) {
    const int64_t value = known[device].load(std::memory_order_relaxed);
    if (value != 0) {
      const int code = static_cast<int>(value / kBase / kBase);
      return {code / 2, static_cast<int>(value / kBase % kBase), static_cast<int>(value % kBase),
              code % 2 != 0};
    }
  }
  Device answer = ask_device(device);
  if (answer.code == 0) {
    // Something is wrong, and the launch will say what, if it is still wrong then.
    answer.code = capability_of(device);
  } else if (remembered) {
    const int64_t code = answer.code * 2 + (answer.warpgroup_products ? 1 : 0);
    known[device].store((code * kBase + answer.processors) * kBase + answer.shared_kib,
                        std::memory_order_relaxed);
  }
  return answer;
}

void check_launch(cudaError_t error, int device) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch, which may be right, would report it again
  std::string text = "convt_reduce: a kernel could not be launched on cuda:";
  text += std::to_string(device) + ", got " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    const int capability = capability_of(device);
    text = "convt_reduce: the GPU must be covered by this build, which has code for " +
           std::string(CONVT_REDUCE_ARCHS) + ", got cuda:" + std::to_string(device) +
           " of compute capability " + std::to_string(capability / 10) + "." +
           std::to_string(capability % 10) + " (" + cudaGetErrorString(error) +
           "); build from source with TORCH_CUDA_ARCH_LIST set to include it";
  }
  if (error == cudaErrorInsufficientDriver) {
    text = "convt_reduce: the driver must be made for CUDA " +
           std::to_string(CUDART_VERSION / 1000) +
           " or later, as this build is, got an older one (" + cudaGetErrorString(error) +
           "); update the driver, or install the wheel for an older CUDA";
  }
  throw std::runtime_error(text);
}

class CudaBackend {
 public:
  // The guard comes first: everything here happens on the tensors' device, current or not.
  explicit CudaBackend(const Call& call)
      : call_(call), guard_(call.device_index), cells_(make_cells(call.problem)) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(call.device_index, &stream));
    queue_.stream = static_cast<cudaStream_t>(stream);
    const Device device = device_of(call.device_index);
    queue_.overlaps = device.code >= 90;  // the waits that an overlapping launch relies on
    queue_.tensor_cores = device.code >= 80;
    queue_.warpgroup_products = device.warpgroup_products;
    queue_.processors = device.processors;
    queue_.shared_kib = device.shared_kib;
    make_band_tables();
  }

  const Cells& cells() const { return cells_; }

  int64_t chunks() { return plan().chunks(); }

  void stats(void* cell_sums, bool whole, void* scratch) {
    const cuda::BesideFold fold = cuda::plan_beside(call_.problem, cells_, call_.weight,
                                                    call_.dtype, plan(), queue_, scratch);
    folded_ = fold.blocks > 0;
    check(cuda::launch_stats(call_.problem, cells_, call_.input, call_.dtype, plan(), queue_, fold,
                             cell_sums));
    chunks_ = chunks();
    if (chunks_ == 1 ||
        (!whole && cuda::combine_merges(call_.problem, cells_, call_.dtype, queue_, chunks_))) {
      return;
    }
    check(cuda::launch_merge(call_.problem, cells_, call_.dtype, chunks_, queue_, cell_sums));
    chunks_ = 1;
  }

  int64_t combine_scratch() const {
    return cuda::combine_scratch(call_.problem, cells_, call_.dtype, queue_);
  }

  void combine(const void* cell_sums, void* scratch, void* y) const {
    check(cuda::launch_combine(call_.problem, cells_, call_.weight, call_.bias, call_.dtype, queue_,
                               cell_sums, chunks_, folded_, scratch, y));
  }

  std::optional<int64_t> mean_scratch() {
    if (cuda::mean_small_serves(call_.problem, cells_, call_.dtype, plan(), queue_)) return 0;
    const int64_t elements = cuda::stats_combine_scratch(call_.problem, cells_, call_.input,
                                                         call_.dtype, plan(), queue_);
    return elements > 0 ? std::optional(elements) : std::nullopt;
  }

  // With no scratch, the kernel that wants none.
  void mean(void* scratch, void* y) {
    check(scratch == nullptr
              ? cuda::launch_mean_small(call_.problem, cells_, call_.input, call_.weight,
                                        call_.bias, call_.dtype, plan(), queue_, y)
              : cuda::launch_stats_combine(call_.problem, cells_, call_.input, call_.weight,
                                           call_.bias, call_.dtype, queue_, scratch, y));
  }

  void combine_backward(const CombineBackward& tensors) const {
    check(cuda::launch_combine_backward(call_.problem, tensors, call_.dtype, queue_));
  }

  void tap_sums(const void* cell_sums, void* out) const {
    check(cuda::launch_tap_sums(call_.problem, cells_, call_.dtype, queue_, cell_sums, out));
  }

  int64_t spread_scratch() const {
    return cuda::spread_scratch(call_.problem, cells_, call_.dtype);
  }

  void spread(void* scratch, void* grad) const {
    check(cuda::launch_spread(call_.problem, cells_, call_.input, call_.dtype, queue_, scratch,
                              grad));
  }

 private:
  // Made when it is first asked for: spread reads no input.
  const cuda::StatsPlan& plan() {
    if (!plan_.has_value()) {
      plan_ = cuda::plan_stats(call_.problem, cells_, call_.input, call_.dtype);
    }
    return *plan_;
  }

  void check(cudaError_t error) const { check_launch(error, call_.device_index); }

  // Axes with more bands than fit in a kernel's arguments get a table in device memory, which a
  // kernel writes: a copy from host memory would not outlive the call inside a captured graph.
  void make_band_tables() {
    int64_t bytes = 0;
    for (const AxisCells& axis : cells_.axis) {
      if (needs_table(axis)) bytes += axis.bands * static_cast<int64_t>(sizeof(Band));
    }
    if (bytes == 0) return;
    tables_ = empty(call_, {bytes / static_cast<int64_t>(sizeof(double))}, Dtype::kFloat64);
    Band* next = static_cast<Band*>(tables_->mutable_data_ptr());
    for (AxisCells& axis : cells_.axis) {
      if (!needs_table(axis)) continue;
      axis.table = next;
      next += axis.bands;
    }
    check(cuda::launch_fill_bands(cells_, queue_));
  }

  const Call& call_;
  DeviceGuard guard_;
  Cells cells_;
  cuda::Queue queue_;
  std::optional<cuda::StatsPlan> plan_;
  int64_t chunks_ = 1;   // of the cell sums, after stats
  bool folded_ = false;  // whether stats has folded the weights
  std::optional<Tensor> tables_;
};

static_assert(sizeof(Band) % sizeof(double) == 0, "band tables are counted in doubles");

}  // namespace
}  // namespace convt_reduce

STABLE_TORCH_LIBRARY_IMPL(convt_reduce, CUDA, library) {
  convt_reduce::Flow<convt_reduce::CudaBackend>::implement(library);
}
