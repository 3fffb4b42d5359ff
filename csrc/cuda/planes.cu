// The plan of how threads share contiguous planes; the choice is the host's alone.
#include "cuda/planes.cuh"

#include <algorithm>
#include <numeric>

namespace convt_reduce::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostLanes = 256;
constexpr int64_t kChunkVectors = 2048;   // 32 KiB of a plane for one group, about
constexpr int64_t kVectorsPerThread = 4;  // below this, fewer threads on a plane are enough
constexpr int64_t kNarrowPositions = int64_t{1} << 30;  // a position plus some steps is an int32

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

}  // namespace

PlanesPlan plan_planes(const Problem& problem, const Cells& cells, int vector, int slack) {
  const int64_t width = problem.axis[2].size;
  const int64_t vectors = ceil_div(problem.positions() + slack, vector);
  // Threads keep their columns when lanes * vector is a multiple of the width.
  int64_t base = cells.axis[2].bands == 1 ? 1 : width / std::gcd(width, int64_t{vector});
  PlanesPlan plan;
  plan.wide = problem.positions() > kNarrowPositions;
  plan.columns = base <= kMostLanes && !plan.wide;
  if (!plan.columns) base = 1;
  plan.lanes = choose_lanes(base, vectors);
  plan.groups = std::max(1, kThreads / plan.lanes);
  plan.threads = static_cast<int>(round_up(int64_t{plan.groups} * plan.lanes, kWarp));
  const int64_t wanted = std::max<int64_t>((vectors + kChunkVectors / 2) / kChunkVectors, 1);
  plan.chunk = round_up(ceil_div(vectors, wanted), plan.lanes);
  plan.chunks = ceil_div(vectors, plan.chunk);
  return plan;
}

}  // namespace convt_reduce::cuda
