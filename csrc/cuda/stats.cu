// Stats, the kernel that reads the input: the launches of its three forms, and of what goes with
// them. stats_plan.cu decides which form a call gets.
#include <algorithm>
#include <numeric>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_planes.cuh"
#include "cuda/stats_small.cuh"

namespace convt_reduce::cuda {
namespace {

template <int kValue>
using Number = std::integral_constant<int, kValue>;

// The alignment in bytes, at most a vector's, that every position of the input has.
int64_t alignment_of(const Input& input, int64_t bytes) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(input.data));
  int64_t common = std::gcd(address, int64_t{kVectorBytes});
  common = std::gcd(common, input.stride_n * bytes);
  for (const int64_t stride : input.stride) common = std::gcd(common, stride * bytes);
  return common;
}

// ---- small planes -------------------------------------------------------------------------------

constexpr int64_t kSmallTileBytes = 16 * 1024;
constexpr int64_t kSmallResultBytes = 8 * 1024;
constexpr int64_t kMostBlocksPerProcessor = 8;
constexpr int64_t kSharedPerProcessor = 200 * 1024;  // less on older cards, where fewer blocks run

template <typename T>
cudaError_t launch_small(const Problem& problem, const Cells& cells, const Input& input,
                         const SmallPlan& plan, const Queue& queue, void* cell_sums) {
  using Acc = AccumulateOf<T>;
  // One stretch of planes where batch elements are adjacent too, else one per batch element.
  const bool one = problem.batch == 1 || input.stride_n == problem.c_in * problem.positions();
  const int64_t stretches = one ? 1 : problem.batch;
  SmallArguments p{.data = input.data,
                   .stretch_bytes = one ? 0 : input.stride_n * static_cast<int64_t>(sizeof(T)),
                   .depths = AxisBands<int>(cells.axis[0]),
                   .rows = AxisBands<int>(cells.axis[1]),
                   .columns = AxisBands<int>(cells.axis[2])};
  p.positions = static_cast<int>(problem.positions());
  p.cells = static_cast<int>(cells.count());
  p.lanes = plan.lanes;
  p.gap = plan.gap;
  p.planes = problem.planes() / stretches;

  // Tiles are as large as they may be, unless few planes would leave processors without any. The
  // sums do not depend on it.
  const int64_t plane_step = p.positions * static_cast<int64_t>(sizeof(T)) + p.gap;
  const int64_t round = kSmallThreads / p.lanes * kSmallTogether;
  int64_t most = std::min(kSmallTileBytes / plane_step,
                          kSmallResultBytes / (p.cells * static_cast<int64_t>(sizeof(Acc))));
  if (most > round) most -= most % round;
  p.per_tile = static_cast<int>(std::clamp<int64_t>(ceil_div(problem.planes(), queue.processors), 1,
                                                    std::max<int64_t>(most, 1)));
  p.tiles = ceil_div(p.planes, p.per_tile);
  p.all_tiles = stretches * p.tiles;
  p.order_at = static_cast<int>(p.per_tile * p.cells * sizeof(Acc) + (p.cells + 1) * sizeof(int));
  p.stages_at = static_cast<int>(
      round_up(p.order_at + p.positions * static_cast<int64_t>(sizeof(short)), kVectorBytes));
  p.stage_bytes = static_cast<int>(round_up(p.per_tile * plane_step, kVectorBytes) + kVectorBytes);
  const int64_t shared = p.stages_at + kSmallStages * p.stage_bytes;
  const int64_t blocks_per_processor =
      std::clamp<int64_t>(kSharedPerProcessor / shared, 1, kMostBlocksPerProcessor);
  return launch(&stats_small_kernel<T>,
                std::min(p.all_tiles, queue.processors * blocks_per_processor), kSmallThreads,
                shared, queue.stream, queue.overlaps, p, static_cast<Acc*>(cell_sums));
}

// ---- contiguous planes --------------------------------------------------------------------------

template <typename T>
cudaError_t launch_planes(const Problem& problem, const Cells& cells, const Input& input,
                          const RowsPlan& plan, const Queue& queue, void* cell_sums) {
  using Acc = AccumulateOf<T>;
  const auto run = [&](auto slots, auto load, auto index) {
    using Index = decltype(index);
    PlanesArguments<Index> p{.input = input,
                             .depths = AxisBands<Index>(cells.axis[0]),
                             .rows = AxisBands<Index>(cells.axis[1]),
                             .columns = AxisBands<Index>(cells.axis[2])};
    p.positions = static_cast<Index>(problem.positions());
    p.step = plan.step;
    p.tile = plan.tile;
    p.row_tiles = static_cast<Index>(plan.row_tiles);
    p.worker_bits = plan.worker_bits;
    p.cells = static_cast<int>(cells.count());
    p.tiles = static_cast<Index>(plan.tiles);
    p.chunk = static_cast<Index>(plan.chunk);
    p.channels = input.stride_n == problem.c_in * input.stride_c ? problem.planes() : problem.c_in;
    p.planes = problem.planes();
    p.chunks = plan.chunks;
    p.blocks = ceil_div(p.planes * p.chunks, kPlaneWarps >> p.worker_bits);
    return launch(&stats_planes_kernel<decltype(slots)::value, decltype(load)::value, T, Index>,
                  p.blocks, kPlaneWarps * kWarp, kPlaneWarps * p.cells * sizeof(Acc), queue.stream,
                  queue.overlaps, p, static_cast<Acc*>(cell_sums));
  };
  const auto with_load = [&](auto load) {
    if (problem.positions() > kNarrowPositions) return run(Number<kLongRows>{}, load, int64_t{});
    if (plan.slots == kLongRows) return run(Number<kLongRows>{}, load, int32_t{});
    if (plan.slots == 4) return run(Number<4>{}, load, int32_t{});
    if (plan.slots == 8) return run(Number<8>{}, load, int32_t{});
    return run(Number<16>{}, load, int32_t{});
  };
  if constexpr (sizeof(T) == 2) {
    if (plan.load == 2) return with_load(Number<2>{});
  }
  return with_load(Number<1>{});
}

// ---- any strides --------------------------------------------------------------------------------

template <typename T>
cudaError_t launch_boxes(const Problem& problem, const Cells& cells, const Input& input,
                         const BoxesPlan& plan, const Queue& queue, void* cell_sums) {
  BoxesArguments p;
  p.input = input;
  p.cells = cells;
  p.batch = problem.batch;
  p.channels = problem.c_in;
  p.channel_tiles = ceil_div(problem.c_in, plan.lanes * plan.channels);
  p.chunks = plan.chunks;
  p.piece = plan.piece;
  p.pieces = plan.pieces;
  if (p.pieces != cells.count()) {
    int next = 0;
    for (int64_t cell = 0; cell < cells.count(); ++cell) {
      p.first_piece[cell] = next;
      next += static_cast<int>(pieces_of(positions_of(cells, bands_of(cells, cell)), plan.piece));
    }
    p.first_piece[cells.count()] = next;
  }
  p.blocks = p.batch * p.channel_tiles * p.pieces;
  p.lanes = plan.lanes;
  const auto run = [&](auto aligned, auto channels, auto index) {
    constexpr int kChannels = decltype(channels)::value;
    const size_t shared = plan.threads * kChannels * sizeof(AccumulateOf<T>);
    return launch(&stats_boxes_kernel<decltype(aligned)::value, kChannels, T, decltype(index)>,
                  p.blocks, plan.threads, shared, queue.stream, queue.overlaps, p,
                  static_cast<AccumulateOf<T>*>(cell_sums));
  };
  if (problem.positions() > INT32_MAX) return run(std::true_type{}, Number<1>{}, int64_t{});
  if (plan.channels == 1) return run(std::true_type{}, Number<1>{}, int32_t{});
  const int64_t common = alignment_of(input, sizeof(T));
  const bool aligned = common % (plan.channels * static_cast<int64_t>(sizeof(T))) == 0;
  const auto with_channels = [&](auto channels) {
    return aligned ? run(std::true_type{}, channels, int32_t{})
                   : run(std::false_type{}, channels, int32_t{});
  };
  if (plan.channels == 2) return with_channels(Number<2>{});
  if constexpr (sizeof(T) <= 4) {
    if (plan.channels == 4) return with_channels(Number<4>{});
  }
  if constexpr (sizeof(T) == 2) {
    if (plan.channels == 8) return with_channels(Number<8>{});
  }
  return cudaErrorInvalidValue;
}

// cell_sums [chunks][entries] -> their sums, into the first row. `lanes` threads share an entry.
template <typename Acc>
__global__ void merge_kernel(Acc* cell_sums, int64_t entries, int64_t chunks, int lanes) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int lane = threadIdx.x % lanes;
  // Whole warps take every turn together, since the shuffles need them.
  const int64_t turns = ceil_div(entries * lanes, threads);
  int64_t entry = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / lanes;
  for (int64_t turn = 0; turn < turns; ++turn, entry += threads / lanes) {
    Acc sum = 0;
    Acc lost = 0;
    if (entry < entries) {
#pragma unroll 4
      for (int64_t chunk = lane; chunk < chunks; chunk += lanes) {
        add_exactly(sum, lost, cell_sums[chunk * entries + entry]);
      }
    }
    sum = settled(sum, lost);
    for (int half = lanes / 2; half > 0; half /= 2) {
      sum += __shfl_down_sync(0xffffffffu, sum, half, lanes);
    }
    if (lane == 0 && entry < entries) cell_sums[entry] = sum;
  }
}

constexpr int kMergeThreads = 128;

template <typename Acc>
cudaError_t launch_merge(int64_t entries, int64_t chunks, const Queue& queue, void* cell_sums) {
  const int lanes = static_cast<int>(largest_power_of_two(std::min<int64_t>(chunks, kWarp)));
  return launch(&merge_kernel<Acc>, ceil_div(entries * lanes, kMergeThreads), kMergeThreads, 0,
                queue.stream, queue.overlaps, static_cast<Acc*>(cell_sums), entries, chunks, lanes);
}

__global__ void fill_bands_kernel(const __grid_constant__ Cells cells) {
  const AxisCells& axis = cells.axis[threadIdx.x];
  if (axis.table != nullptr) fill_bands(axis.axis, const_cast<Band*>(axis.table));
}

}  // namespace

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
        return launch_small<T>(problem, cells, input, plan.small, queue, cell_sums);
      case StatsPlan::Kind::kPlanes:
        return launch_planes<T>(problem, cells, input, plan.planes, queue, cell_sums);
      case StatsPlan::Kind::kBoxes:
        return launch_boxes<T>(problem, cells, input, plan.boxes, queue, cell_sums);
    }
    return cudaErrorInvalidValue;
  });
  if (error != cudaSuccess || plan.chunks() == 1) return error;
  const int64_t entries = problem.planes() * cells.count();
  return dtype == Dtype::kFloat64 ? launch_merge<double>(entries, plan.chunks(), queue, cell_sums)
                                  : launch_merge<float>(entries, plan.chunks(), queue, cell_sums);
}

}  // namespace convt_reduce::cuda
