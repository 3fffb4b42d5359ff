// Stats, the kernel that reads the input: the launches of its forms, and of what goes with
// them. stats_plan.cu decides which form a call gets.
#include <algorithm>
#include <numeric>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_channels.cuh"
#include "cuda/stats_groups.cuh"
#include "cuda/stats_planes.cuh"
#include "cuda/stats_small.cuh"

namespace convt_reduce::cuda {
namespace {

template <int kValue>
using Number = std::integral_constant<int, kValue>;

constexpr int64_t kSharedPerBlock = 48 * 1024 - 256;  // what any card grants, without the barriers

// ---- small planes -------------------------------------------------------------------------------

constexpr int64_t kSharedPerProcessor = 220 * 1024;  // less on older cards, where fewer blocks run
constexpr int64_t kSharedOverhead = 1200;            // of a block
constexpr int64_t kMostWarpsPerProcessor = 64;

// Blocks that follow each other on a processor even out which processors are faster, but each makes
// a list.
int64_t small_turns(const Problem& problem) { return problem.positions() <= 1024 ? 4 : 2; }

template <int kLanes, int kTogether, typename T>
cudaError_t launch_small_of(const Problem& problem, const Cells& cells, const Input& input,
                            int channels, const Queue& queue, void* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int64_t kGroups = kWarp / kLanes;
  constexpr int64_t kBankBytes = 128;  // of all banks
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  // One stretch of planes where batch elements are adjacent too, else one per batch element.
  const bool one = problem.batch == 1 || input.stride_n == problem.c_in * problem.positions();
  const int64_t stretches = one ? 1 : problem.batch;
  SmallArguments p{.data = input.data,
                   .stretch_bytes = one ? 0 : input.stride_n * kBytes,
                   .depths = AxisBands<int>(cells.axis[0]),
                   .rows = AxisBands<int>(cells.axis[1]),
                   .columns = AxisBands<int>(cells.axis[2])};
  const int64_t planes = problem.planes() / channels;
  p.channels = channels;
  p.positions = static_cast<int>(problem.positions()) * channels;
  p.cells = static_cast<int>(cells.count()) * channels;
  p.planes = planes / stretches;

  // Tiles are as large as they may be, unless few planes would leave processors without any. The
  // sums do not depend on it.
  const int64_t plane = p.positions * kBytes;
  const int64_t share = std::max<int64_t>(planes / queue.processors, 1);
  int64_t group = kTogether;  // planes
  while (2 * kGroups * group * plane <= kSmallTileBytes &&
         2 * kGroups * group * p.cells <= kSmallTileCells &&
         2 * kGroups * group * kSmallWarps <= share) {
    group *= 2;
  }
  while ((1 << p.group_bits) < group) ++p.group_bits;
  p.per_tile = static_cast<int>(std::min(kGroups * group, share));
  p.tiles = ceil_div(p.planes, p.per_tile);
  p.all_tiles = stretches * p.tiles;
  // Where groups would meet in the same banks, the next begins behind the lanes of this one.
  if (kLanes < kWarp && group * plane % kVectorBytes == 0) {
    const int64_t lanes = round_up(kLanes * kBytes, kVectorBytes);
    p.gap = static_cast<int>((lanes + kBankBytes - group * plane % kBankBytes) % kBankBytes);
  }

  p.order_at = static_cast<int>(2 * p.cells * sizeof(ListedCell));
  p.warps_at = static_cast<int>(
      round_up(p.order_at + p.positions * static_cast<int64_t>(sizeof(short)), kVectorBytes));
  p.tile_at = static_cast<int>(
      round_up(kGroups * group * p.cells * static_cast<int64_t>(sizeof(Acc)), kVectorBytes));
  p.warp_bytes = static_cast<int>(
      p.tile_at + round_up(kGroups * (group * plane + p.gap), kVectorBytes) + kVectorBytes);
  const int64_t warps = std::clamp<int64_t>(
      std::min((kSharedPerBlock - p.warps_at) / p.warp_bytes, p.all_tiles / queue.processors), 1,
      kSmallWarps);
  const int64_t shared = p.warps_at + warps * p.warp_bytes;
  const int64_t blocks_per_processor = std::clamp<int64_t>(
      kSharedPerProcessor / (shared + kSharedOverhead), 1, kMostWarpsPerProcessor / warps);
  return launch(&stats_small_kernel<kLanes, kTogether, T>,
                std::min(ceil_div(p.all_tiles, warps),
                         queue.processors * blocks_per_processor * small_turns(problem)),
                static_cast<int>(warps * kWarp), shared, queue.stream, queue.overlaps, p,
                static_cast<Acc*>(cell_sums));
}

template <typename T>
cudaError_t launch_small(const Problem& problem, const Cells& cells, const Input& input,
                         const SmallPlan& plan, const Queue& queue, void* cell_sums) {
  const auto run = [&](auto lanes, auto together) {
    return launch_small_of<decltype(lanes)::value, decltype(together)::value, T>(
        problem, cells, input, plan.channels, queue, cell_sums);
  };
  if (plan.together == 1) return run(Number<32>{}, Number<1>{});
  if (plan.lanes == 2) return run(Number<2>{}, Number<2>{});
  if (plan.lanes == 4) return run(Number<4>{}, Number<2>{});
  if (plan.lanes == 8) return run(Number<8>{}, Number<2>{});
  if (plan.lanes == 16) return run(Number<16>{}, Number<2>{});
  return run(Number<32>{}, Number<2>{});
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
    p.step_rows = plan.step_rows;
    p.step = plan.step_rows * static_cast<int>(problem.axis[2].size);
    p.tile = plan.tile;
    p.row_tiles = static_cast<Index>(plan.row_tiles);
    while ((1 << p.worker_bits) < plan.workers) ++p.worker_bits;
    p.cells = static_cast<int>(cells.count());
    p.tiles = static_cast<Index>(plan.tiles);
    p.chunk = static_cast<Index>(plan.chunk);
    p.channels = input.stride_n == problem.c_in * input.stride_c ? problem.planes() : problem.c_in;
    p.planes = problem.planes();
    p.chunks = plan.chunks;
    p.blocks = ceil_div(p.planes * p.chunks, kPlaneWarps >> p.worker_bits);
    p.adjacent = p.channels == 1 || input.stride_c == problem.positions();
    p.rooms_at = static_cast<int>(
        round_up(kPlaneWarps * p.cells * static_cast<int64_t>(sizeof(Acc)), kVectorBytes));
    p.rooms = 1;
    if (plan.slots != kLongRows) {
      p.room_bytes =
          static_cast<int>(room_bytes(plan.tile * problem.axis[2].size, plan.slots, sizeof(T)));
      // Where blocks are few, warps would wait for one tile after the other.
      const bool few = p.blocks <= 2 * queue.processors;
      if (few && p.rooms_at + kPlaneWarps * 2 * p.room_bytes <= kSharedPerBlock) p.rooms = 2;
    }
    return launch(&stats_planes_kernel<decltype(slots)::value, decltype(load)::value, T, Index>,
                  p.blocks, kPlaneWarps * kWarp, p.rooms_at + kPlaneWarps * p.rooms * p.room_bytes,
                  queue.stream, queue.overlaps, p, static_cast<Acc*>(cell_sums));
  };
  if (plan.slots == 4) return run(Number<4>{}, Number<1>{}, int32_t{});
  if (plan.slots == 8) return run(Number<8>{}, Number<1>{}, int32_t{});
  if (plan.slots == 16) return run(Number<16>{}, Number<1>{}, int32_t{});
  const auto run_long = [&](auto load) {
    if (problem.positions() > kNarrowPositions) return run(Number<kLongRows>{}, load, int64_t{});
    return run(Number<kLongRows>{}, load, int32_t{});
  };
  if constexpr (sizeof(T) == 2) {
    if (plan.load == 2) return run_long(Number<2>{});
  }
  return run_long(Number<1>{});
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

constexpr int kMergeThreads = 128;

// cell_sums [chunks][entries] -> their sums, into the first row. `lanes` threads share an entry,
// and neighbouring threads have neighbouring entries.
template <typename Acc>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(Acc* cell_sums, int64_t entries, int64_t chunks, int lanes) {
  __shared__ Acc sums[kMergeThreads];
  const int per_block = kMergeThreads / lanes;
  const int lane = threadIdx.x / per_block;
  const int64_t blocks = ceil_div(entries, per_block);
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const int64_t entry = block * per_block + (threadIdx.x - lane * per_block);
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
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (lane < half) sum += sums[threadIdx.x + half * per_block];
      __syncthreads();
    }
    if (lane == 0 && entry < entries) cell_sums[entry] = sum;
  }
}

template <typename Acc>
cudaError_t launch_merge(int64_t entries, int64_t chunks, const Queue& queue, void* cell_sums) {
  constexpr int64_t kMostLanes = 8;
  const int lanes = static_cast<int>(largest_power_of_two(std::min(chunks, kMostLanes)));
  return launch(&merge_kernel<Acc>, ceil_div(entries, kMergeThreads / lanes), kMergeThreads, 0,
                queue.stream, queue.overlaps, static_cast<Acc*>(cell_sums), entries, chunks, lanes);
}

__global__ void fill_bands_kernel(const __grid_constant__ Cells cells) {
  const AxisCells& axis = cells.axis[threadIdx.x];
  if (axis.table != nullptr) fill_bands(axis.axis, const_cast<Band*>(axis.table));
}

}  // namespace

int compiled_for() {
  cudaFuncAttributes attributes;  // all kernels are compiled for the same
  if (cudaFuncGetAttributes(&attributes, &fill_bands_kernel) == cudaSuccess) {
    return attributes.ptxVersion;
  }
  cudaGetLastError();
  return 0;
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
        return launch_small<T>(problem, cells, input, plan.small, queue, cell_sums);
      case StatsPlan::Kind::kPlanes:
        return launch_planes<T>(problem, cells, input, plan.planes, queue, cell_sums);
      case StatsPlan::Kind::kGroups:
        return launch_groups(problem, cells, input, dtype, plan.groups, queue, cell_sums);
      case StatsPlan::Kind::kChannels:
        return launch_channels(problem, cells, input, dtype, plan.channels, queue, cell_sums);
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
