// Stats, the kernel that reads the input: which of its two forms a call gets, and the launches.
#include <algorithm>
#include <numeric>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_planes.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostLanes = 256;
constexpr size_t kSharedBytes = 48 * 1024;  // what every GPU gives without asking
constexpr int64_t kChunkVectors = 4096;     // 64 KiB of a plane for one block, about
constexpr int64_t kMostChunks = 1024;       // combine adds them, so there should not be too many
constexpr int64_t kVectorsPerThread = 4;    // below this, fewer threads on a plane are enough

int element_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

int accumulate_bytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

bool planes_are_contiguous(const Problem& problem, const Input& input) {
  int64_t stride = 1;
  for (int a = kAxes - 1; a >= 0; --a) {
    if (problem.axis[a].size > 1 && input.stride[a] != stride) return false;
    stride *= problem.axis[a].size;
  }
  return true;
}

bool planes_are_aligned(const Input& input, int vector) {
  return reinterpret_cast<uintptr_t>(input.data) % kVectorBytes == 0 &&
         input.stride_n % vector == 0 && input.stride_c % vector == 0;
}

int64_t largest_power_of_two(int64_t most) {
  int64_t power = 1;
  while (power * 2 <= most) power *= 2;
  return power;
}

// How many threads share a plane: a multiple of `base`, about one per kVectorsPerThread vectors,
// that leaves the fewest threads of a block's warps without work.
int choose_lanes(int64_t base, int64_t vectors) {
  const int64_t most =
      std::clamp<int64_t>(vectors / kVectorsPerThread, base, std::max<int64_t>(base, kThreads));
  int best = static_cast<int>(base);
  double best_share = 0;
  for (int64_t lanes = base; lanes <= most; lanes += base) {
    const int64_t used = std::max<int64_t>(1, kThreads / lanes) * lanes;
    const double share = static_cast<double>(used) / round_up(used, kWarp);
    if (share >= best_share) {
      best_share = share;
      best = static_cast<int>(lanes);
    }
  }
  return best;
}

StatsPlan plan_planes(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype) {
  const int vector = kVectorBytes / element_bytes(dtype);
  const int64_t width = problem.axis[2].size;
  const int64_t slack = planes_are_aligned(input, vector) ? 0 : vector - 1;
  const int64_t vectors = ceil_div(problem.positions() + slack, vector);
  // Threads keep their columns when lanes * vector is a multiple of the width.
  int64_t base = cells.axis[2].bands == 1 ? 1 : width / std::gcd(width, int64_t{vector});
  StatsPlan plan;
  plan.kind = StatsPlan::Kind::kPlanes;
  plan.columns = base <= kMostLanes;
  if (!plan.columns) base = 1;
  plan.lanes = choose_lanes(base, vectors);
  plan.groups = std::max(1, kThreads / plan.lanes);
  plan.threads = static_cast<int>(round_up(int64_t{plan.groups} * plan.lanes, kWarp));
  const int64_t wanted =
      std::clamp<int64_t>((vectors + kChunkVectors / 2) / kChunkVectors, 1, kMostChunks);
  plan.chunk = round_up(ceil_div(vectors, wanted), plan.lanes);
  plan.chunks = ceil_div(vectors, plan.chunk);
  return plan;
}

StatsPlan plan_boxes(const Problem& problem, const Cells& cells, const Input& input) {
  constexpr int64_t kPositionsPerWalker = 64;
  constexpr int64_t kMostBoxChunks = 16;
  StatsPlan plan;
  plan.kind = StatsPlan::Kind::kBoxes;
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

template <typename T>
cudaError_t launch_planes(const Problem& problem, const Cells& cells, const Input& input,
                          const StatsPlan& plan, cudaStream_t stream, void* cell_sums) {
  PlanesArguments p;
  p.input = input;
  p.cells = cells;
  p.channels = problem.c_in;
  p.planes = problem.planes();
  p.positions = problem.positions();
  p.chunk = plan.chunk;
  p.chunks = plan.chunks;
  p.lanes = plan.lanes;
  p.groups = plan.groups;
  p.blocks = ceil_div(p.planes * p.chunks, p.groups);
  p.reduce_width = static_cast<int>(largest_power_of_two(std::min(plan.lanes, kWarp)));
  const size_t shared = cells.count() * plan.threads * sizeof(AccumulateOf<T>);
  auto* out = static_cast<AccumulateOf<T>*>(cell_sums);
  return plan.columns ? launch(&stats_planes_kernel<true, T>, p.blocks, plan.threads, shared,
                               stream, false, p, out)
                      : launch(&stats_planes_kernel<false, T>, p.blocks, plan.threads, shared,
                               stream, false, p, out);
}

template <typename T>
cudaError_t launch_boxes(const Problem& problem, const Cells& cells, const Input& input,
                         const StatsPlan& plan, cudaStream_t stream, void* cell_sums) {
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

}  // namespace

StatsPlan plan_stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype) {
  if (planes_are_contiguous(problem, input)) {
    const StatsPlan plan = plan_planes(problem, cells, input, dtype);
    const size_t places = static_cast<size_t>(plan.threads) * accumulate_bytes(dtype);
    if (static_cast<size_t>(cells.count()) <= kSharedBytes / places) return plan;
  }
  return plan_boxes(problem, cells, input);
}

cudaError_t launch_fill_bands(const Cells& cells, const Queue& queue) {
  return launch(&fill_bands_kernel, 1, kAxes, 0, queue.stream, false, cells);
}

cudaError_t launch_stats(const Problem& problem, const Cells& cells, const Input& input,
                         Dtype dtype, const StatsPlan& plan, const Queue& queue, void* cell_sums) {
  if (problem.planes() == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    return plan.kind == StatsPlan::Kind::kPlanes
               ? launch_planes<T>(problem, cells, input, plan, queue.stream, cell_sums)
               : launch_boxes<T>(problem, cells, input, plan, queue.stream, cell_sums);
  });
}

}  // namespace convt_reduce::cuda
