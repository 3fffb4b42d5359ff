// Whether stats_groups.cuh serves for an input, and how it is shared out.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/stats_groups_list.cuh"

namespace convt_reduce::cuda {

// Where single positions are vectors, the sizes for which this form measured best.
constexpr int64_t kFewestGroupsPositions = 128;
constexpr int64_t kMostPositionLoads = 32;
inline int64_t most_groups_positions(int64_t bytes) { return bytes == 2 ? 4096 : 1024; }

constexpr int64_t kMostChannelsChunks = 1024;  // a second kernel adds their sums

// `threads` of a block. Fills the plan and returns whether a block has room for it.
inline bool share_out_groups(const Problem& problem, const Cells& cells, const Input& input,
                             int64_t bytes, int threads, GroupsPlan& plan) {
  constexpr int64_t kSharedBytes = 48 * 1024;  // what any card grants
  const bool single = plan.positions == 1;
  const int64_t walker_loads = single ? 64 : 128;  // of a chunk
  const int64_t lanes = problem.c_in * plan.positions * bytes / kVectorBytes;
  if (lanes > threads) return false;
  plan.threads = threads;
  plan.lanes = static_cast<int>(lanes);
  const int64_t most_walkers = threads / lanes;
  const int64_t groups = problem.positions() / plan.positions;
  const int64_t wanted =
      std::max(walker_loads * most_walkers, ceil_div(groups, kMostChannelsChunks)) * plan.positions;
  int64_t inner = problem.positions();
  int64_t reach = 0;
  int64_t chunk = 1;
  plan.chunks = 1;
  for (int a = 0; a < kAxes; ++a) {
    const int64_t unit = a == kAxes - 1 ? plan.positions : 1;
    const int64_t size = problem.axis[a].size;
    inner /= size;
    const int64_t count = ceil_div(size, std::clamp<int64_t>(wanted / inner, unit, size));
    plan.size[a] = static_cast<int>(round_up(ceil_div(size, count), unit));
    plan.count[a] = static_cast<int>(ceil_div(size, plan.size[a]));
    plan.chunks *= plan.count[a];
    chunk *= plan.size[a];
    if (size > 1) reach += plan.size[a] * input.stride[a];
  }
  // Steps of parts of groups are short: fewer walkers have fewer gaps.
  const int64_t walker_groups = single ? 32 : 64;
  plan.walkers = static_cast<int>(
      std::clamp<int64_t>(ceil_div(chunk / plan.positions, walker_groups), 1, most_walkers));
  plan.images = threads / (plan.lanes * plan.walkers);
  // Offsets in a chunk are of 32 bits.
  return reach <= INT32_MAX && GroupsRoom(plan, cells, bytes).all <= kSharedBytes;
}

inline bool plan_groups(const Problem& problem, const Cells& cells, const Input& input,
                        int64_t bytes, GroupsPlan& plan) {
  const int64_t vector = kVectorBytes / bytes;
  const auto whole = [&](int a) {
    return problem.axis[a].size == 1 || input.stride[a] % vector == 0;
  };
  if (!whole(0) || !whole(1)) return false;
  plan.positions = static_cast<int>(vector / std::gcd(problem.c_in, vector));
  if (plan.positions == 1) {
    if (!whole(2) || problem.positions() < kFewestGroupsPositions ||
        problem.positions() > most_groups_positions(bytes) ||
        problem.c_in > kMostPositionLoads * vector) {
      return false;
    }
    return share_out_groups(problem, cells, input, bytes, 128, plan);
  }
  if (input.stride[2] != problem.c_in || problem.axis[2].size % plan.positions != 0) return false;
  for (const int threads : {128, 64, 32}) {
    if (share_out_groups(problem, cells, input, bytes, threads, plan)) return true;
  }
  return false;
}

}  // namespace convt_reduce::cuda
