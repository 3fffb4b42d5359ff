// Which of its forms stats takes for a call, and how the work is shared out.
#include <algorithm>
#include <numeric>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_channels.cuh"
#include "cuda/stats_planes_plan.cuh"
#include "cuda/stats_small.cuh"
#include "cuda/stats_steps_plan.cuh"

namespace convt_reduce::cuda {
namespace {

bool planes_are_contiguous(const Problem& problem, const Input& input) {
  int64_t stride = 1;
  for (int a = kAxes - 1; a >= 0; --a) {
    if (problem.axis[a].size > 1 && input.stride[a] != stride) return false;
    stride *= problem.axis[a].size;
  }
  return true;
}

// ---- small planes -------------------------------------------------------------------------------

// Above this, a list costs more than it saves; with many cells, a little later.
constexpr int64_t kMostSmallBytes = 5 * 1024 + 512;
constexpr int64_t kMostManyBytes = 6 * 1024;

bool is_small(int64_t plane_bytes, int64_t cells) {
  constexpr int64_t kFewCells = 4;
  return plane_bytes <= (cells <= kFewCells ? kMostSmallBytes : kMostManyBytes);
}

// Whether the channels of a batch element lie one behind the other.
bool channels_are_adjacent(const Problem& problem, const Input& input) {
  return problem.c_in == 1 || input.stride_c == problem.positions();
}

SmallPlan plan_small(int64_t positions, int64_t cells, int64_t bytes) {
  const int64_t plane = positions * bytes;
  SmallPlan plan;
  plan.together = 2 * plane <= kSmallTileBytes ? 2 : 1;
  // As few lanes on a plane as the room for the others' planes allows.
  plan.lanes = plan.together == 2 ? 2 : kWarp;
  const auto planes = [&] { return kWarp / plan.lanes * plan.together; };
  while (plan.lanes < kWarp &&
         (planes() * plane > kSmallTileBytes || planes() * cells > kSmallTileCells)) {
    plan.lanes *= 2;
  }
  return plan;
}

// ---- neighbouring channels ----------------------------------------------------------------------

// Chunks of about kChannelsThreads times this; small images have as few walkers as it allows.
constexpr int64_t kThreadBytes = 1024;

void share_out(const Problem& problem, const Cells& cells, int64_t bytes, int64_t lane_bytes,
               ChannelsPlan& plan) {
  constexpr int64_t kMostThreadLoads = 256;
  constexpr int64_t kSumsShare = 16;     // a chunk's bytes over its sums' bytes, at least
  constexpr int64_t kStretchBytes = 32;  // that walkers read together, at least
  const int64_t load_bytes = plan.channels * bytes;
  const int64_t loads = problem.c_in / plan.channels;
  const int64_t tiles = ceil_div(
      loads, std::min<int64_t>(kChannelsThreads, std::max<int64_t>(lane_bytes / load_bytes, 1)));
  plan.lanes = static_cast<int>(ceil_div(loads, tiles));
  const int64_t most_walkers = kChannelsThreads / plan.lanes;
  const int64_t thread_loads = std::min(kThreadBytes / load_bytes, kMostThreadLoads);
  const int64_t wanted =
      std::max({thread_loads * most_walkers, ceil_div(problem.positions(), kMostChannelsChunks),
                ceil_div(kSumsShare * cells.count() * static_cast<int64_t>(sizeof(float)), bytes)});
  int64_t inner = problem.positions();
  int64_t positions = 1;  // of a chunk
  plan.chunks = 1;
  for (int a = 0; a < kAxes; ++a) {
    const int64_t size = problem.axis[a].size;
    inner /= size;
    const int64_t count = ceil_div(size, std::clamp<int64_t>(wanted / inner, 1, size));
    plan.size[a] = static_cast<int>(ceil_div(size, count));
    plan.count[a] = static_cast<int>(ceil_div(size, plan.size[a]));
    plan.chunks *= plan.count[a];
    positions *= plan.size[a];
  }
  const int64_t fewest = ceil_div(kStretchBytes, plan.lanes * load_bytes);
  plan.walkers = static_cast<int>(
      std::clamp<int64_t>(std::max(ceil_div(positions, thread_loads), fewest), 1, most_walkers));
  plan.images = kChannelsThreads / (plan.lanes * plan.walkers);
}

// Whether channels are neighbours in memory, in numbers that the forms for these can take.
bool channels_are_neighbours(const Problem& problem, const Cells& cells, const Input& input) {
  return input.stride_c == 1 && problem.c_in > 1 && input.stride[2] != 1 && !needs_table(cells) &&
         cells.count() <= kMostPlaneCells && problem.positions() <= kNarrowPositions;
}

// Whether whole images are best taken as small planes: those whose positions are no whole vectors.
bool plan_small_images(const Problem& problem, const Cells& cells, const Input& input,
                       int64_t bytes, SmallPlan& plan) {
  const int64_t image = problem.positions() * problem.c_in;
  if (!image_is_dense(problem, input)) return false;
  if (problem.c_in * bytes % kVectorBytes == 0 || image * bytes > kMostManyBytes ||
      cells.count() * problem.c_in > kMostPlaneCells) {
    return false;
  }
  plan = plan_small(image, cells.count() * problem.c_in, bytes);
  plan.channels = static_cast<int>(problem.c_in);
  return true;
}

// Whether the form with a walker per position serves, and how.
bool plan_channels(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype,
                   ChannelsPlan& plan) {
  constexpr int64_t kFewestPositions = 5;  // of a cell on average, or there is little to add
  if (problem.positions() < kFewestPositions * cells.count()) return false;
  const int64_t bytes = element_bytes(dtype);
  const int64_t sum_bytes = dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  plan.channels = static_cast<int>(std::gcd(problem.c_in, kVectorBytes / bytes));
  int64_t lane_bytes = 512;  // of one position; with many cells, less
  for (; lane_bytes >= 64; lane_bytes /= 2) {
    share_out(problem, cells, bytes, lane_bytes, plan);
    if (channels_shared_words(plan, cells, plan.images) * sum_bytes <= kSharedPerBlock) break;
  }
  if (lane_bytes < 64) return false;
  // Offsets in a chunk are of 32 bits.
  int64_t reach = 0;
  for (int a = 0; a < kAxes; ++a) {
    if (problem.axis[a].size > 1) reach += plan.size[a] * input.stride[a];
  }
  return reach <= INT32_MAX;
}

// ---- any strides --------------------------------------------------------------------------------

// Threads on a position: as many as leave few without channels.
int choose_lanes(int64_t wanted) {
  constexpr double kEnough = 0.8;  // the share of threads that have channels
  int best = 1;
  double best_share = 0;
  for (int lanes = kWarp; lanes >= 1; lanes /= 2) {
    const double share = static_cast<double>(wanted) / static_cast<double>(round_up(wanted, lanes));
    if (share <= best_share) continue;
    best = lanes;
    best_share = share;
    if (share >= kEnough) break;
  }
  return best;
}

BoxesPlan plan_boxes(const Problem& problem, const Cells& cells, const Input& input,
                     int64_t bytes) {
  constexpr int64_t kLoadsPerWalker = 64;  // of a piece
  constexpr int64_t kMostBoxChunks = 64;   // a second kernel adds them
  constexpr int64_t kMostThreads = 128;
  BoxesPlan plan;
  if (input.stride_c == 1 && input.stride[2] != 1) {
    if (problem.positions() <= INT32_MAX) {
      plan.channels = static_cast<int>(std::gcd(problem.c_in, kVectorBytes / bytes));
    }
    plan.lanes = choose_lanes(ceil_div(problem.c_in, plan.channels));
  }
  const int64_t cell_count = cells.count();
  const int64_t average = ceil_div(problem.positions(), cell_count);
  plan.threads = static_cast<int>(largest_power_of_two(
      std::clamp<int64_t>(average * plan.lanes / kBoxLoads, kWarp, kMostThreads)));
  plan.piece = problem.positions();
  plan.pieces = cell_count;
  if (cell_count > kMostSplitCells || needs_table(cells)) return plan;
  const int64_t walkers = plan.threads / plan.lanes;
  plan.piece = std::max(walkers * kLoadsPerWalker, ceil_div(problem.positions(), kMostBoxChunks));
  plan.pieces = 0;
  for (int64_t cell = 0; cell < cell_count; ++cell) {
    const int64_t chunks = pieces_of(positions_of(cells, bands_of(cells, cell)), plan.piece);
    plan.pieces += chunks;
    plan.chunks = std::max(plan.chunks, chunks);
  }
  return plan;
}

}  // namespace

StatsPlan plan_stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype) {
  StatsPlan plan;
  const int64_t bytes = element_bytes(dtype);
  if (!needs_table(cells) && cells.count() <= kMostPlaneCells &&
      planes_are_contiguous(problem, input)) {
    if (is_small(problem.positions() * bytes, cells.count()) &&
        channels_are_adjacent(problem, input)) {
      plan.kind = StatsPlan::Kind::kSmall;
      plan.small = plan_small(problem.positions(), cells.count(), bytes);
    } else {
      plan.kind = StatsPlan::Kind::kPlanes;
      plan.planes = plan_rows(problem, cells.count(), bytes);
    }
    return plan;
  }
  if (channels_are_neighbours(problem, cells, input)) {
    if (plan_small_images(problem, cells, input, bytes, plan.small)) {
      plan.kind = StatsPlan::Kind::kSmall;
      return plan;
    }
    if (plan_steps(problem, cells, input, bytes, plan.steps)) {
      plan.kind = StatsPlan::Kind::kSteps;
      return plan;
    }
    if (plan_channels(problem, cells, input, dtype, plan.channels)) {
      plan.kind = StatsPlan::Kind::kChannels;
      return plan;
    }
  }
  plan.boxes = plan_boxes(problem, cells, input, bytes);
  return plan;
}

}  // namespace convt_reduce::cuda
