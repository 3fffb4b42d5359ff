// Which of its three forms stats takes for a call, and how the work is shared out.
#include <algorithm>
#include <numeric>

#include "cuda/stats_boxes.cuh"
#include "cuda/stats_planes.cuh"
#include "cuda/stats_small.cuh"

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

// Above this, a warp per plane needs fewer instructions.
constexpr int64_t most_small_bytes(int64_t element) { return element == 2 ? 4096 : 2048; }

// Whether the channels of a batch element lie one behind the other.
bool channels_are_adjacent(const Problem& problem, const Input& input) {
  return problem.c_in == 1 || input.stride_c == problem.positions();
}

SmallPlan plan_small(const Problem& problem, int64_t bytes) {
  constexpr int64_t kBytesPerLane = 128;
  constexpr int64_t kBanks = 32;  // bytes; multiples of it meet in few banks
  const int64_t plane = problem.positions() * bytes;
  SmallPlan plan;
  while (plan.lanes < kWarp && plan.lanes * kBytesPerLane < plane) plan.lanes *= 2;
  plan.gap = plane % kBanks == 0 ? kVectorBytes : 0;
  return plan;
}

// ---- contiguous planes --------------------------------------------------------------------------

constexpr int64_t kMostPlaneCells = 256;
constexpr int64_t kChunkBytes = 64 * 1024;  // of a plane for one block, about
constexpr int64_t kMostChunks = 1024;       // a second kernel adds their sums, so not too many
constexpr int64_t kWorkerBytes = 4096;      // of a plane for one warp, at least
constexpr int kSlotForms[] = {4, 8, 16};

RowsPlan plan_rows(const Problem& problem, int64_t bytes) {
  const int64_t width = problem.axis[2].size;
  const int64_t rows = problem.axis[0].size * problem.axis[1].size;
  RowsPlan plan;
  // Where rows have an odd number of elements, every second one would begin between two words.
  plan.load = bytes == 2 && width % 2 == 0 ? 2 : 1;
  const int64_t load = kWarp * plan.load;
  if (width > kPlaneLoads * load || problem.positions() > kNarrowPositions) {
    plan.slots = kLongRows;
    plan.tile = static_cast<int>(kPlaneLoads * load);
    plan.row_tiles = ceil_div(width, plan.tile);
    plan.tiles = rows * plan.row_tiles;
  } else {
    // The fewest slots that a row fits in leave most steps to a tile.
    for (const int slots : kSlotForms) {
      plan.slots = slots;
      if (width <= slots * load) break;
    }
    const int64_t step_rows = plan.slots * load / width;
    plan.step = static_cast<int>(step_rows * width);
    plan.tile = static_cast<int>(kPlaneLoads / plan.slots * step_rows);
    plan.tiles = ceil_div(rows, plan.tile);
  }
  const int64_t plane_bytes = problem.positions() * bytes;
  const int64_t wanted =
      std::clamp<int64_t>((plane_bytes + kChunkBytes / 2) / kChunkBytes, 1, kMostChunks);
  plan.chunk = ceil_div(plan.tiles, wanted);
  plan.chunks = ceil_div(plan.tiles, plan.chunk);
  const int64_t workers = largest_power_of_two(
      std::clamp<int64_t>(plane_bytes / plan.chunks / kWorkerBytes, 1, kPlaneWarps));
  while ((1 << plan.worker_bits) < workers) ++plan.worker_bits;
  return plan;
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
    if (problem.positions() * bytes <= most_small_bytes(bytes) &&
        channels_are_adjacent(problem, input)) {
      plan.kind = StatsPlan::Kind::kSmall;
      plan.small = plan_small(problem, bytes);
    } else {
      plan.kind = StatsPlan::Kind::kPlanes;
      plan.planes = plan_rows(problem, bytes);
    }
    return plan;
  }
  plan.boxes = plan_boxes(problem, cells, input, bytes);
  return plan;
}

}  // namespace convt_reduce::cuda
