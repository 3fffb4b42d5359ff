// Whether stats_steps.cuh serves for an input, and how it is shared out.
#pragma once

#include <algorithm>
#include <numeric>

#include "cuda/stats_steps_list.cuh"

namespace convt_reduce::cuda {

constexpr int64_t kMostChannelsChunks = 1024;  // about: a second kernel adds their sums

// How many groups a step has side by side, of `columns`, if a block has room for `most`: as many
// as leave few threads without one.
inline int64_t groups_of_step(int64_t columns, int64_t most, int64_t lanes) {
  if (most >= columns) return columns;
  constexpr double kBetter = 1.02;
  int64_t best = most;
  double best_share = 0;
  for (int64_t groups = most; 2 * groups > most; --groups) {
    const double share =
        static_cast<double>(columns * lanes) /
        static_cast<double>(ceil_div(columns, groups) * round_up(groups * lanes, kWarp));
    if (share > best_share * kBetter) {
      best = groups;
      best_share = share;
    }
  }
  return best;
}

// What is the best for few images is not for many: the former want parts enough for all processors,
// the latter few sums. Large batches may differ from small ones.
struct StepsSizes {
  int64_t whole_bytes;    // of an image: up to this, it is one chunk
  int64_t least_bytes;    // of a chunk of others, about,
  int64_t enough_chunks;  // unless an image has more than that
  int64_t large_bytes;    // of an image: from this on, blocks are large
};
inline StepsSizes sizes_for(int64_t batch) {
  constexpr int64_t kKiB = 1024;
  if (batch > kLargeBatch) return {640 * kKiB, 256 * kKiB, 16, 160 * kKiB};
  // Maps have multiples of 7 rows more often than of 8, and combine can still add so many chunks.
  constexpr int64_t kEnough = 7;
  static_assert(kEnough <= kMostMergedChunks);
  return {160 * kKiB, 128 * kKiB, kEnough, 64 * kKiB};
}

// Whether images have positions enough for steps: with fewer, another form is faster, where an
// image is large, or all that a large batch reads.
inline bool has_positions(const Problem& problem, int64_t bytes) {
  constexpr int64_t kEnough = 128;
  constexpr int64_t kFewest = 32;
  constexpr int64_t kMostImageBytes = 256 * 1024;
  constexpr int64_t kMostBytes = 20 * 1024 * 1024;
  const int64_t positions = problem.positions();
  if (positions >= kEnough || positions < kFewest) return positions >= kEnough;
  const int64_t image = positions * problem.c_in * bytes;
  return image <= kMostImageBytes &&
         (problem.batch <= kLargeBatch || problem.batch * image <= kMostBytes);
}

// `threads` of a block; `image_bytes` of a tile of channels. Fills the plan and returns whether a
// block has room for it.
inline bool share_out_steps(const Problem& problem, const Cells& cells, const Input& input,
                            int64_t bytes, int64_t image_bytes, int64_t threads, StepsPlan& plan) {
  constexpr int64_t kMostBytes = 512 * 1024;  // of a chunk
  constexpr int64_t kThreadRows = 64;         // at least, before a step has several
  const Axis(&axis)[kAxes] = problem.axis;
  const int64_t most = threads / plan.lanes;
  if (most == 0) return false;
  plan.groups = static_cast<int>(groups_of_step(axis[2].size / plan.positions, most, plan.lanes));
  const StepsSizes sizes = sizes_for(problem.batch);
  const bool whole = image_bytes <= sizes.whole_bytes;
  const int64_t rest = most / plan.groups;
  const int64_t rows = std::clamp<int64_t>(axis[0].size * axis[1].size / kThreadRows, 1,
                                           std::min(rest, axis[1].size));
  plan.images = whole ? static_cast<int>(rest / rows) : 1;
  plan.step[0] = 1;
  plan.step[1] = static_cast<int>(rows);
  plan.step[2] = plan.groups * plan.positions;
  plan.threads = static_cast<int>(round_up(plan.lanes * plan.groups * rows * plan.images, kWarp));
  const int64_t wanted =
      std::max(std::clamp(image_bytes / sizes.enough_chunks, sizes.least_bytes, kMostBytes),
               ceil_div(image_bytes, kMostChannelsChunks));
  int64_t reach = 0;
  int64_t inner = plan.lanes * kVectorBytes / plan.positions;  // bytes of a position of an axis
  plan.chunks = 1;
  for (int a = kAxes - 1; a >= 0; --a) {
    const int64_t size = axis[a].size;
    const int64_t step = plan.step[a];
    const int64_t count =
        whole ? 1 : ceil_div(size, std::clamp<int64_t>((wanted + inner / 2) / inner, step, size));
    plan.size[a] = static_cast<int>(round_up(ceil_div(size, count), step));
    plan.count[a] = static_cast<int>(ceil_div(size, plan.size[a]));
    plan.chunks *= plan.count[a];
    inner = plan.count[a] == 1 ? inner * size : wanted;  // then slices of one
    if (size > 1) reach += plan.size[a] * input.stride[a] * bytes;
  }
  // Offsets in a chunk are of 32 bits.
  return reach <= INT32_MAX && StepsRoom(plan, cells, bytes).all <= kSharedPerBlock;
}

inline bool plan_steps(const Problem& problem, const Cells& cells, const Input& input,
                       int64_t bytes, StepsPlan& plan) {
  constexpr int64_t kMostLanes = 32;  // of a position
  // Instead, where so many divide those of an image of up to so many bytes: blocks for more
  // processors, and no more sums. Of large images, wide stretches are read a little faster.
  constexpr int64_t kFewLanes = 8;
  constexpr int64_t kFewLanesBytes = 5 << 20;
  constexpr int64_t kFewestThreads = 2 * kWarp;  // of a block
  const int64_t vector = kVectorBytes / bytes;
  if (!has_positions(problem, bytes)) return false;
  plan.positions = static_cast<int>(vector / std::gcd(problem.c_in, vector));
  for (int a = 0; a < kAxes; ++a) {
    const int64_t size = problem.axis[a].size;
    if (a == kAxes - 1 && plan.positions > 1) {
      if (input.stride[a] != problem.c_in || size % plan.positions != 0) return false;
    } else if (size > 1 && input.stride[a] % vector != 0) {
      return false;
    }
  }
  const int64_t lanes = problem.c_in * plan.positions / vector;
  if (plan.positions > 1 && lanes > kStepsThreads) return false;
  const bool few =
      lanes % kFewLanes == 0 && problem.positions() * problem.c_in * bytes <= kFewLanesBytes;
  plan.tiles = plan.positions > 1 ? 1 : ceil_div(lanes, few ? kFewLanes : kMostLanes);
  plan.lanes = static_cast<int>(ceil_div(lanes, plan.tiles));
  const int64_t image_bytes = problem.positions() / plan.positions * plan.lanes * kVectorBytes;
  int64_t threads =
      image_bytes < sizes_for(problem.batch).large_bytes ? kStepsThreads / 2 : kStepsThreads;
  for (; threads >= kFewestThreads; threads /= 2) {
    if (share_out_steps(problem, cells, input, bytes, image_bytes, threads, plan)) return true;
  }
  return false;
}

}  // namespace convt_reduce::cuda
