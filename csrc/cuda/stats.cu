// Stats, the kernel that reads the input: which of its three forms a call gets, and the launches.
#include <algorithm>
#include <numeric>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_planes.cuh"
#include "cuda/stats_small.cuh"

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

// The alignment in bytes, at most a vector's, that every plane of the input has; or every batch
// element, which is what matters where channels are neighbours.
int64_t alignment_of(const Input& input, int64_t bytes, bool of_planes) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(input.data));
  int64_t common = std::gcd(address, int64_t{kVectorBytes});
  common = std::gcd(common, input.stride_n * bytes);
  return of_planes ? std::gcd(common, input.stride_c * bytes) : common;
}

constexpr int64_t kMaskBits = 64;

// A bit per cell: whether some tap covers it. Planes have no more cells than that.
uint64_t covered_mask(const Cells& cells) {
  uint64_t mask = 0;
  for (int64_t cell = 0; cell < cells.count(); ++cell) {
    mask |= uint64_t{covered(cells, bands_of(cells, cell))} << cell;
  }
  return mask;
}

template <int kAlignment, typename T>
cudaError_t launch_aligned(const Problem& problem, const Cells& cells, const Input& input,
                           const PlanesPlan& plan, cudaStream_t stream, void* cell_sums) {
  const size_t shared = cells.count() * plan.threads * sizeof(AccumulateOf<T>);
  const int reduce_width = static_cast<int>(largest_power_of_two(std::min(plan.lanes, kWarp)));
  return with_planes_form(plan, [&](auto columns, auto index) {
    using Index = decltype(index);
    const PlanesShape<Index> shape(problem, cells, plan);
    return launch(&stats_planes_kernel<kAlignment, decltype(columns)::value, T, Index>,
                  shape.blocks, plan.threads, shared, stream, false, shape, input, problem.c_in,
                  reduce_width, covered_mask(cells), static_cast<AccumulateOf<T>*>(cell_sums));
  });
}

template <typename T>
cudaError_t launch_planes(const Problem& problem, const Cells& cells, const Input& input,
                          const PlanesPlan& plan, cudaStream_t stream, void* cell_sums) {
  const int64_t alignment = alignment_of(input, sizeof(T), true);
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

constexpr int64_t kSmallPlaneBytes = 1024;
constexpr int64_t kSmallSharedBytes = 32 * 1024;  // of a block, so that several fit on a processor

// Whether the channels of a batch element lie one behind the other.
bool channels_are_adjacent(const Problem& problem, const Input& input) {
  return problem.c_in == 1 || input.stride_c == problem.positions();
}

SmallPlan plan_small(const Problem& problem, int64_t bytes) {
  constexpr int64_t kWord = 4;
  const int64_t word = std::max(bytes, kWord);  // a bank's, but a double takes two
  const int64_t plane = problem.positions() * bytes;
  SmallPlan plan;
  // A plane of half a word more than whole ones, of 16-bit elements, is odd enough.
  plan.padded = plane % word == 0 && plane / word % 2 == 0;
  plan.plane_bytes = static_cast<int>(plan.padded ? plane + word : plane);
  const int64_t fit = kSmallSharedBytes / plan.plane_bytes / kWarp * kWarp;
  plan.per_block = static_cast<int>(std::clamp<int64_t>(fit, kWarp, kSmallThreads));
  return plan;
}

template <typename T>
cudaError_t launch_small(const Problem& problem, const Cells& cells, const Input& input,
                         const SmallPlan& plan, cudaStream_t stream, void* cell_sums) {
  const int positions = static_cast<int>(problem.positions());
  const int bytes = positions * static_cast<int>(sizeof(T));
  // One stretch of planes where batch elements are adjacent too, else one per batch element. The
  // sums are the same: each is one thread's.
  const bool one = problem.batch == 1 || input.stride_n == problem.c_in * problem.positions();
  const int64_t stretches = one ? 1 : problem.batch;
  const int64_t planes = problem.planes() / stretches;
  const int64_t blocks = ceil_div(planes, plan.per_block);
  SmallArguments p{input.data,
                   one ? 0 : input.stride_n * static_cast<int64_t>(sizeof(T)),
                   AxisBands<int>(cells.axis[0]),
                   AxisBands<int>(cells.axis[1]),
                   AxisBands<int>(cells.axis[2]),
                   positions,
                   static_cast<int>(cells.count()),
                   plan.per_block,
                   plan.padded ? bytes : bytes * plan.per_block,
                   plan.plane_bytes,
                   planes,
                   blocks,
                   stretches * blocks,
                   covered_mask(cells)};
  const auto run = [&](auto unit) {
    return launch(&stats_small_kernel<decltype(unit)::value, T>, p.all_blocks, kSmallThreads,
                  static_cast<size_t>(plan.per_block) * plan.plane_bytes, stream, false, p,
                  static_cast<AccumulateOf<T>*>(cell_sums));
  };
  const int64_t alignment = std::gcd(alignment_of(input, 0, false), p.stretch_bytes);
  constexpr int kWordUnit = sizeof(T) < 4 ? 4 : sizeof(T);
  if (!plan.padded && alignment == kVectorBytes) {
    return run(std::integral_constant<int, kVectorBytes>{});
  }
  if (alignment % kWordUnit == 0) return run(std::integral_constant<int, kWordUnit>{});
  return run(std::integral_constant<int, sizeof(T)>{});
}

template <typename T>
cudaError_t launch_boxes(const Problem& problem, const Cells& cells, const Input& input,
                         const BoxesPlan& plan, cudaStream_t stream, void* cell_sums) {
  BoxesArguments p;
  p.input = input;
  p.cells = cells;
  p.batch = problem.batch;
  p.channels = problem.c_in;
  p.channel_tiles = ceil_div(problem.c_in, plan.lanes * plan.channels);
  p.chunks = plan.chunks;
  p.blocks = p.batch * p.channel_tiles * cells.count() * p.chunks;
  p.lanes = plan.lanes;
  const auto run = [&](auto aligned, auto channels, auto index) {
    constexpr int kChannels = decltype(channels)::value;
    const size_t shared = plan.threads * kChannels * sizeof(AccumulateOf<T>);
    return launch(&stats_boxes_kernel<decltype(aligned)::value, kChannels, T, decltype(index)>,
                  p.blocks, plan.threads, shared, stream, false, p,
                  static_cast<AccumulateOf<T>*>(cell_sums));
  };
  using One = std::integral_constant<int, 1>;
  using Several = std::integral_constant<int, Vector<T>::kSize>;
  if (problem.positions() > INT32_MAX) return run(std::true_type{}, One{}, int64_t{});
  if (plan.channels == 1) return run(std::true_type{}, One{}, int32_t{});
  int64_t common = alignment_of(input, sizeof(T), false);
  for (const int64_t stride : input.stride) {
    common = std::gcd(common, stride * static_cast<int64_t>(sizeof(T)));
  }
  return common == kVectorBytes ? run(std::true_type{}, Several{}, int32_t{})
                                : run(std::false_type{}, Several{}, int32_t{});
}

// cell_sums [chunks][entries] -> their sums, into the first row. `lanes` threads share an entry.
template <typename Acc>
__global__ void merge_kernel(Acc* cell_sums, int64_t entries, int64_t chunks, int lanes) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int lane = threadIdx.x % lanes;
  // Whole warps take every turn together, since the shuffles need them.
  const int64_t turns = ceil_div(entries * lanes, threads);
  int64_t entry = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / lanes;
  for (int64_t turn = 0; turn < turns; ++turn, entry += threads / lanes) {
    Acc sum = 0;
    if (entry < entries) {
#pragma unroll 4
      for (int64_t chunk = lane; chunk < chunks; chunk += lanes) {
        sum += cell_sums[chunk * entries + entry];
      }
    }
    for (int half = lanes / 2; half > 0; half /= 2) {
      sum += __shfl_down_sync(0xffffffffu, sum, half, lanes);
    }
    if (lane == 0 && entry < entries) cell_sums[entry] = sum;
  }
}

template <typename Acc>
cudaError_t launch_merge(int64_t entries, int64_t chunks, const Queue& queue, void* cell_sums) {
  const int lanes = static_cast<int>(largest_power_of_two(std::min<int64_t>(chunks, kWarp)));
  return launch(&merge_kernel<Acc>, ceil_div(entries * lanes, kSmallThreads), kSmallThreads, 0,
                queue.stream, queue.overlaps, static_cast<Acc*>(cell_sums), entries, chunks, lanes);
}

__global__ void fill_bands_kernel(const __grid_constant__ Cells cells) {
  const AxisCells& axis = cells.axis[threadIdx.x];
  if (axis.table != nullptr) fill_bands(axis.axis, const_cast<Band*>(axis.table));
}

BoxesPlan plan_boxes(const Problem& problem, const Cells& cells, const Input& input,
                     int64_t bytes) {
  constexpr int64_t kPositionsPerWalker = 64;
  constexpr int64_t kMostBoxChunks = 16;  // a second kernel adds them
  constexpr int64_t kMostThreads = 256;
  BoxesPlan plan;
  if (input.stride_c == 1 && input.stride[2] != 1) {
    const int vector = static_cast<int>(kVectorBytes / bytes);
    const bool several = problem.c_in % vector == 0 && problem.positions() <= INT32_MAX;
    plan.channels = several ? vector : 1;
    const int64_t wanted = ceil_div(problem.c_in, plan.channels);
    plan.lanes = static_cast<int>(std::min<int64_t>(kWarp, largest_power_of_two(2 * wanted - 1)));
  }
  const int64_t positions_per_cell = problem.positions() / cells.count();
  plan.threads = static_cast<int>(largest_power_of_two(
      std::clamp<int64_t>(positions_per_cell * plan.lanes / kBoxLoads, kWarp, kMostThreads)));
  const int64_t walkers = plan.threads / plan.lanes;
  plan.chunks =
      std::clamp<int64_t>(positions_per_cell / (walkers * kPositionsPerWalker), 1, kMostBoxChunks);
  return plan;
}

}  // namespace

StatsPlan plan_stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype) {
  StatsPlan plan;
  const int64_t bytes = element_bytes(dtype);
  bool inline_bands = true;  // covered_mask is made on the host, where tables cannot be read
  for (const AxisCells& axis : cells.axis) inline_bands = inline_bands && !needs_table(axis);
  if (inline_bands && cells.count() <= kMaskBits && planes_are_contiguous(problem, input)) {
    if (problem.positions() * bytes <= kSmallPlaneBytes &&
        cells.axis[2].bands <= kMostColumnBands && channels_are_adjacent(problem, input)) {
      plan.kind = StatsPlan::Kind::kSmall;
      plan.small = plan_small(problem, bytes);
      return plan;
    }
    plan.planes = plan_planes(problem, cells, static_cast<int>(kVectorBytes / bytes), 0);
    if (cells.count() <= kSharedBytes / (plan.planes.threads * accumulate_bytes(dtype))) {
      plan.kind = StatsPlan::Kind::kPlanes;
      return plan;
    }
  }
  plan.boxes = plan_boxes(problem, cells, input, bytes);
  return plan;
}

cudaError_t launch_fill_bands(const Cells& cells, const Queue& queue) {
  return launch(&fill_bands_kernel, 1, kAxes, 0, queue.stream, false, cells);
}

cudaError_t launch_stats(const Problem& problem, const Cells& cells, const Input& input,
                         Dtype dtype, const StatsPlan& plan, const Queue& queue, void* cell_sums) {
  if (problem.planes() == 0) return cudaSuccess;
  const cudaError_t error = dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (plan.kind) {
      case StatsPlan::Kind::kSmall:
        return launch_small<T>(problem, cells, input, plan.small, queue.stream, cell_sums);
      case StatsPlan::Kind::kPlanes:
        return launch_planes<T>(problem, cells, input, plan.planes, queue.stream, cell_sums);
      case StatsPlan::Kind::kBoxes:
        return launch_boxes<T>(problem, cells, input, plan.boxes, queue.stream, cell_sums);
    }
    return cudaErrorInvalidValue;
  });
  if (error != cudaSuccess || plan.chunks() == 1) return error;
  const int64_t entries = problem.planes() * cells.count();
  return dtype == Dtype::kFloat64 ? launch_merge<double>(entries, plan.chunks(), queue, cell_sums)
                                  : launch_merge<float>(entries, plan.chunks(), queue, cell_sums);
}

}  // namespace convt_reduce::cuda
