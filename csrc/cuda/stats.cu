// Stats, the kernel that reads the input: which of its two forms a call gets, and the launches.
#include <algorithm>
#include <numeric>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_planes.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int64_t kSharedBytes = 48 * 1024;  // what every GPU gives without asking

int64_t element_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

int64_t accumulate_bytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

bool planes_are_contiguous(const Problem& problem, const Input& input) {
  int64_t stride = 1;
  for (int a = kAxes - 1; a >= 0; --a) {
    if (problem.axis[a].size > 1 && input.stride[a] != stride) return false;
    stride *= problem.axis[a].size;
  }
  return true;
}

// The alignment in bytes, at most a vector's, that every plane of the input has.
int64_t alignment_of(const Input& input, int64_t bytes) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(input.data));
  int64_t common = std::gcd(address, int64_t{kVectorBytes});
  common = std::gcd(common, input.stride_n * bytes);
  return std::gcd(common, input.stride_c * bytes);
}

template <int kAlignment, typename T>
cudaError_t launch_aligned(const Problem& problem, const Cells& cells, const Input& input,
                           const PlanesPlan& plan, cudaStream_t stream, void* cell_sums) {
  const size_t shared = cells.count() * plan.threads * sizeof(AccumulateOf<T>);
  const int reduce_width = static_cast<int>(largest_power_of_two(std::min(plan.lanes, kWarp)));
  return with_planes_form(plan, [&](auto columns, auto index) {
    using Index = decltype(index);
    const PlanesShape<Index> shape = shape_planes<Index>(problem, cells, plan);
    return launch(&stats_planes_kernel<kAlignment, decltype(columns)::value, T, Index>,
                  shape.blocks, plan.threads, shared, stream, false, shape, input, problem.c_in,
                  reduce_width, static_cast<AccumulateOf<T>*>(cell_sums));
  });
}

template <typename T>
cudaError_t launch_planes(const Problem& problem, const Cells& cells, const Input& input,
                          const PlanesPlan& plan, cudaStream_t stream, void* cell_sums) {
  const int64_t alignment = alignment_of(input, sizeof(T));
  if (alignment == kVectorBytes) {
    return launch_aligned<kVectorBytes, T>(problem, cells, input, plan, stream, cell_sums);
  }
  if constexpr (sizeof(T) < 4) {
    if (alignment >= 4) {
      return launch_aligned<4, T>(problem, cells, input, plan, stream, cell_sums);
    }
  }
  return launch_aligned<sizeof(T), T>(problem, cells, input, plan, stream, cell_sums);
}

template <typename T>
cudaError_t launch_boxes(const Problem& problem, const Cells& cells, const Input& input,
                         const BoxesPlan& plan, cudaStream_t stream, void* cell_sums) {
  BoxesArguments p;
  p.input = input;
  p.cells = cells;
  p.batch = problem.batch;
  p.channels = problem.c_in;
  p.channel_tiles = ceil_div(problem.c_in, plan.lanes);
  p.chunks = plan.chunks;
  p.blocks = p.batch * p.channel_tiles * cells.count() * p.chunks;
  p.lanes = plan.lanes;
  const size_t shared = plan.threads * sizeof(AccumulateOf<T>);
  return launch(&stats_boxes_kernel<T>, p.blocks, plan.threads, shared, stream, false, p,
                static_cast<AccumulateOf<T>*>(cell_sums));
}

__global__ void fill_bands_kernel(const __grid_constant__ Cells cells) {
  const AxisCells& axis = cells.axis[threadIdx.x];
  if (axis.table != nullptr) fill_bands(axis.axis, const_cast<Band*>(axis.table));
}

BoxesPlan plan_boxes(const Problem& problem, const Cells& cells, const Input& input) {
  constexpr int64_t kPositionsPerWalker = 64;
  constexpr int64_t kMostBoxChunks = 64;
  BoxesPlan plan;
  const bool neighbours = input.stride_c == 1 && input.stride[2] != 1;
  plan.lanes =
      neighbours
          ? static_cast<int>(std::min<int64_t>(kWarp, largest_power_of_two(2 * problem.c_in - 1)))
          : 1;
  const int64_t positions_per_cell = problem.positions() / cells.count();
  plan.threads = static_cast<int>(largest_power_of_two(
      std::clamp<int64_t>(positions_per_cell * plan.lanes / kBoxLoads, kWarp, 256)));
  const int64_t walkers = plan.threads / plan.lanes;
  plan.chunks =
      std::clamp<int64_t>(positions_per_cell / (walkers * kPositionsPerWalker), 1, kMostBoxChunks);
  return plan;
}

}  // namespace

StatsPlan plan_stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype) {
  StatsPlan plan;
  if (planes_are_contiguous(problem, input)) {
    const int vector = static_cast<int>(kVectorBytes / element_bytes(dtype));
    plan.planes = plan_planes(problem, cells, vector, 0);
    const int64_t places = plan.planes.threads * accumulate_bytes(dtype);
    plan.by_planes = cells.count() <= kSharedBytes / places;
  }
  if (!plan.by_planes) plan.boxes = plan_boxes(problem, cells, input);
  return plan;
}

cudaError_t launch_fill_bands(const Cells& cells, const Queue& queue) {
  return launch(&fill_bands_kernel, 1, kAxes, 0, queue.stream, false, cells);
}

cudaError_t launch_stats(const Problem& problem, const Cells& cells, const Input& input,
                         Dtype dtype, const StatsPlan& plan, const Queue& queue, void* cell_sums) {
  if (problem.planes() == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    return plan.by_planes
               ? launch_planes<T>(problem, cells, input, plan.planes, queue.stream, cell_sums)
               : launch_boxes<T>(problem, cells, input, plan.boxes, queue.stream, cell_sums);
  });
}

}  // namespace convt_reduce::cuda
