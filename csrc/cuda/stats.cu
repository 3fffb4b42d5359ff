// Stats, the kernel that reads the input: the launches of its forms, and of what goes with
// them. stats_plan.cu decides which form a call gets.
#include <algorithm>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_channels.cuh"
#include "cuda/stats_planes.cuh"
#include "cuda/stats_small.cuh"
#include "cuda/stats_steps.cuh"

namespace convt_reduce::cuda {
namespace {

template <int kValue>
using Number = std::integral_constant<int, kValue>;

constexpr int64_t kSharedPerProcessor = 220 * 1024;  // less on older cards, where fewer blocks run
constexpr int64_t kSharedOverhead = 1200;            // of a block
constexpr int64_t kMostWarpsPerProcessor = 64;

// ---- small planes -------------------------------------------------------------------------------

template <int kLanes, int kTogether, typename T>
cudaError_t launch_small_of(const Problem& problem, const Cells& cells, const Input& input,
                            int channels, const Queue& queue, void* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int64_t kGroups = kWarp / kLanes;
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  // One stretch of planes where batch elements are adjacent too, else one per batch element.
  const bool one = problem.batch == 1 || input.stride_n == problem.c_in * problem.positions();
  const int64_t stretches = one ? 1 : problem.batch;
  SmallArguments p{.data = input.data,
                   .stretch_bytes = one ? 0 : input.stride_n * kBytes,
                   .plane = ListedPlane(cells, channels)};
  const int64_t planes = problem.planes() / channels;
  p.positions = static_cast<int>(problem.positions()) * channels;
  p.cells = static_cast<int>(cells.count()) * channels;
  p.planes = planes / stretches;

  // Tiles are as large as they may be, unless few planes would leave processors without any. The
  // sums do not depend on it.
  const int64_t share = std::max<int64_t>(planes / queue.processors, 1);
  const int64_t group = small_group<kLanes, kTogether, T>(p, share / kSmallWarps);
  lay_out_small<kLanes, T>(group, kGroups * group, 0, p);
  p.per_tile = static_cast<int>(std::min(kGroups * group, share));
  p.tiles = ceil_div(p.planes, p.per_tile);
  p.all_tiles = stretches * p.tiles;
  const int64_t warps = std::clamp<int64_t>(
      std::min((kSharedPerBlock - p.warps_at) / p.warp_bytes, p.all_tiles / queue.processors), 1,
      kSmallWarps);
  p.warps = static_cast<int>(warps);
  // Where tiles are few, blocks have more warps for the list.
  constexpr int64_t kListBlocks = 4;  // per processor
  const bool few = ceil_div(p.all_tiles, warps) <= kListBlocks * queue.processors;
  const int64_t list_warps = std::min<int64_t>(p.positions / kWarp + 2, kSmallWarps);
  const int64_t threads = (few ? std::max(warps, list_warps) : warps) * kWarp;
  const int64_t shared = p.warps_at + warps * p.warp_bytes;
  const int64_t blocks_per_processor =
      std::clamp<int64_t>(kSharedPerProcessor / (shared + kSharedOverhead), 1,
                          kMostWarpsPerProcessor * kWarp / threads);
  p.turn_blocks = std::min(ceil_div(p.all_tiles, warps), queue.processors * blocks_per_processor);
  p.warp_tiles = ceil_div(p.all_tiles, p.turn_blocks * warps);
  // In the last turn every warp has one tile.
  const int64_t last_tiles = p.all_tiles - (p.warp_tiles - 1) * p.turn_blocks * warps;
  int64_t blocks = ceil_div(last_tiles, warps);
  for (int64_t left = p.warp_tiles; left > 1; left -= SmallTurn::share_of(left)) {
    blocks += p.turn_blocks;
  }
  return launch(&stats_small_kernel<kLanes, kTogether, T>, blocks, static_cast<int>(threads),
                shared, queue.stream, queue.overlaps, p, static_cast<Acc*>(cell_sums));
}

template <typename T>
cudaError_t launch_small(const Problem& problem, const Cells& cells, const Input& input,
                         const SmallPlan& plan, const Queue& queue, void* cell_sums) {
  const auto run = [&](auto lanes, auto together) {
    return launch_small_of<decltype(lanes)::value, decltype(together)::value, T>(
        problem, cells, input, plan.channels, queue, cell_sums);
  };
  if (plan.together == 1) return run(Number<kWarp>{}, Number<1>{});
  return with_small_lanes(plan.lanes, [&](auto lanes) { return run(lanes, Number<2>{}); });
}

// ---- contiguous planes --------------------------------------------------------------------------

// Shared memory of a block beside places and rooms that kSharedPerBlock does not allow for.
constexpr int64_t kPlanesStaticBytes = kMostPlaneCells + kPlaneWarps * sizeof(int64_t) + kLineBytes;
constexpr int64_t kPassingBytes = 16 * 1024 * 1024;  // of an input, at least

// Rooms of a warp. `fewest` where many blocks are at work; where they are few, as many as leave
// half of the shared memory to the blocks of the next kernel: if these had to wait for it, they
// would not be shared out evenly among the processors.
template <typename Index>
int rooms_for(const PlanesArguments<Index>& p, int64_t fewest, int64_t processors) {
  const auto rooms_in = [&](int64_t bytes) {
    return (bytes - p.rooms_at) / (kPlaneWarps * p.room_bytes);
  };
  const int64_t resident = ceil_div(p.blocks, processors);
  const int64_t wanted =
      std::max(rooms_in(kSharedPerProcessor / 2 / resident - kSharedOverhead), fewest);
  const int64_t tiles = ceil_div(static_cast<int64_t>(p.chunk), int64_t{1} << p.worker_bits);
  const int64_t most =
      std::min<int64_t>({rooms_in(kSharedPerBlock - kPlanesStaticBytes), tiles, kMostRooms});
  return static_cast<int>(std::max<int64_t>(std::min(wanted, most), 1));
}

template <typename T>
cudaError_t launch_planes(const Problem& problem, const Cells& cells, const Input& input,
                          const RowsPlan& plan, const Queue& queue, const BesideFold& fold,
                          void* cell_sums) {
  using Acc = AccumulateOf<T>;
  const auto run = [&](auto slots, auto index) {
    using Index = decltype(index);
    PlanesArguments<Index> p{.input = input,
                             .depths = AxisBands<Index>(cells.axis[0]),
                             .rows = AxisBands<Index>(cells.axis[1]),
                             .columns = AxisBands<Index>(cells.axis[2])};
    p.positions = static_cast<Index>(problem.positions());
    p.step_rows = plan.step_rows;
    p.step = plan.step_rows * static_cast<int>(problem.axis[2].size);
    p.tile = plan.tile;
    p.columns_tile = static_cast<int>(plan.columns_tile);
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
    p.passing = p.planes * problem.positions() * static_cast<int64_t>(sizeof(T)) >= kPassingBytes;
    p.rooms_at = static_cast<int>(
        round_up(kPlaneWarps * p.cells * static_cast<int64_t>(sizeof(Acc)), int64_t{kLineBytes}));
    const bool is_long = plan.slots == kLongRows;
    const int64_t behind = is_long ? 0 : read_behind(plan.slots, problem.axis[2].size);
    p.room_bytes = static_cast<int>(line_place_bytes((plan.tile * plan.columns_tile + behind) *
                                                     static_cast<int64_t>(sizeof(T))));
    p.rooms = rooms_for(p, plan.rooms, queue.processors);
    const int64_t shared =
        std::max<int64_t>(p.rooms_at + kPlaneWarps * p.rooms * p.room_bytes, beside_bytes(fold));
    return launch(&stats_planes_kernel<decltype(slots)::value, T, Index>, p.blocks + fold.blocks,
                  kPlaneWarps * kWarp, shared, queue.stream, queue.overlaps, p, fold,
                  static_cast<Acc*>(cell_sums));
  };
  if (plan.slots == 4) return run(Number<4>{}, int32_t{});
  if (plan.slots == 5) return run(Number<5>{}, int32_t{});
  if (plan.slots == 6) return run(Number<6>{}, int32_t{});
  if (plan.slots == 7) return run(Number<7>{}, int32_t{});
  if (plan.slots == 8) return run(Number<8>{}, int32_t{});
  if (plan.slots == 16) return run(Number<16>{}, int32_t{});
  if (problem.positions() > kNarrowPositions) return run(Number<kLongRows>{}, int64_t{});
  return run(Number<kLongRows>{}, int32_t{});
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

__global__ void fill_bands_kernel(const __grid_constant__ Cells cells) {
  const AxisCells& axis = cells.axis[threadIdx.x];
  if (axis.table != nullptr) fill_bands(axis.axis, const_cast<Band*>(axis.table));
}

// Not launched: where the code has products of warpgroups it has shared memory, which tells.
constexpr int kProbed = 1024;
template <bool kHas>
__device__ void probe(int* to) {
  if constexpr (kHas) {
    __shared__ int probed[kProbed];
    probed[threadIdx.x % kProbed] = *to;
    __syncthreads();
    *to = probed[(threadIdx.x + 1) % kProbed];
  }
}
__global__ void probe_kernel(int* to) { probe<has_warpgroup_products()>(to); }

}  // namespace

bool compiled_for_warpgroups() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, &probe_kernel) == cudaSuccess) {
    return attributes.sharedSizeBytes >= kProbed * sizeof(int);
  }
  cudaGetLastError();
  return false;
}

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
                         Dtype dtype, const StatsPlan& plan, const Queue& queue,
                         const BesideFold& fold, void* cell_sums) {
  if (problem.planes() == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    switch (plan.kind) {
      case StatsPlan::Kind::kSmall:
        return launch_small<T>(problem, cells, input, plan.small, queue, cell_sums);
      case StatsPlan::Kind::kPlanes:
        return launch_planes<T>(problem, cells, input, plan.planes, queue, fold, cell_sums);
      case StatsPlan::Kind::kSteps:
        return launch_steps(problem, cells, input, dtype, plan.steps, queue, fold, cell_sums);
      case StatsPlan::Kind::kChannels:
        return launch_channels(problem, cells, input, dtype, plan.channels, queue, fold, cell_sums);
      case StatsPlan::Kind::kBoxes:
        return launch_boxes<T>(problem, cells, input, plan.boxes, queue, cell_sums);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace convt_reduce::cuda
