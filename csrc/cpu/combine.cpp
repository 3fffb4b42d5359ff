// Combine for kernels with many taps to a cell and for groups of few output channels: an output
// channel's weights are folded once per block of batch elements and multiplied with the cell sums.
#include <algorithm>
#include <vector>

#include "cpu/element.h"
#include "cpu/fold.h"
#include "cpu/kernels.h"
#include "cpu/results.h"

namespace convt_reduce::cpu {
namespace {

constexpr int64_t kBatchBlock = 64;  // batch elements that share one folding of the weights
// Folding costs more than it saves for up to so many taps to a cell, unless a group has few output
// channels.
constexpr int64_t kTapsPerCell = 4;
constexpr int64_t kFewOutputs = 2;

template <typename Acc>
Acc dot_block(const Acc* a, const Acc* b, int64_t count) {
  Acc lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (int j = 0; i < count; ++i, ++j) lanes[j] += a[i] * b[i];
  return add_lanes(lanes);
}

template <typename Acc>
Acc dot(const Acc* a, const Acc* b, int64_t count) {
  constexpr int64_t kBlock = kLanes * kRun;
  if (count <= kBlock) return dot_block(a, b, count);
  Acc sum = 0;
  Acc lost = 0;
  for (int64_t i = 0; i < count; i += kBlock) {
    add_exactly(sum, lost, dot_block(a + i, b + i, std::min(kBlock, count - i)));
  }
  return settled(sum, lost);
}

// The weights of one output channel, [k0][k1][k2][group_in].
template <typename T, typename Acc>
void gather_taps(const Problem& problem, const Weight& weight, const T* w, int64_t group_in,
                 Acc* taps) {
  for (int64_t t0 = 0; t0 < problem.axis[0].kernel; ++t0) {
    for (int64_t t1 = 0; t1 < problem.axis[1].kernel; ++t1) {
      for (int64_t t2 = 0; t2 < problem.axis[2].kernel; ++t2, taps += group_in) {
        const T* from = w + t0 * weight.stride[0] + t1 * weight.stride[1] + t2 * weight.stride[2];
        for (int64_t c = 0; c < group_in; ++c) {
          taps[c] = static_cast<Acc>(from[c * weight.stride_c_in]);
        }
      }
    }
  }
}

// cell_sums [batch][c_in][cells] -> [batch][groups][cells][group_in]: channels become neighbours,
// so that folding and multiplying run along them.
template <typename Acc>
std::vector<Acc> turn(const Problem& problem, int64_t cells, const Acc* cell_sums,
                      const ParallelFor& parallel_for) {
  const int64_t group_in = problem.c_in / problem.groups;
  std::vector<Acc> turned(problem.planes() * cells);
  const int64_t size = group_in * cells;  // of a group
  parallel_for(problem.batch * problem.groups, std::max<int64_t>(1, kPiece / size),
               [&](int64_t first, int64_t last) {
                 for (int64_t i = first; i < last; ++i) {
                   const Acc* from = cell_sums + i * size;
                   Acc* to = turned.data() + i * size;
                   for (int64_t cell = 0; cell < cells; ++cell) {
                     for (int64_t c = 0; c < group_in; ++c) *to++ = from[c * cells + cell];
                   }
                 }
               });
  return turned;
}

template <typename T>
void combine_of(const Problem& problem, const Cells& cells, const Weight& weight, const Bias& bias,
                const ParallelFor& parallel_for, const void* cell_sums, void* y) {
  using Acc = AccumulateOf<T>;
  const int64_t group_in = problem.c_in / problem.groups;
  const int64_t group_out = problem.c_out / problem.groups;
  const int64_t depth = group_in * cells.count();  // terms of one result
  const Acc scale = static_cast<Acc>(problem.mean_scale());
  const Results<T> results(problem, cells, weight, bias, cell_sums, y);
  const int64_t batch_blocks = (problem.batch + kBatchBlock - 1) / kBatchBlock;
  const int64_t grain = std::max<int64_t>(1, kPiece / (depth + group_in * problem.taps()));
  const std::vector<Acc> turned =
      turn(problem, cells.count(), static_cast<const Acc*>(cell_sums), parallel_for);

  parallel_for(problem.c_out * batch_blocks, grain, [&](int64_t first, int64_t last) {
    Folder<Acc> folder(cells, group_in);
    std::vector<Acc> taps(group_in * problem.taps());
    std::vector<Acc> folded(depth);
    for (int64_t item = first; item < last; ++item) {
      const int64_t o = item / batch_blocks;
      const int64_t n_begin = item % batch_blocks * kBatchBlock;
      const int64_t n_end = std::min(n_begin + kBatchBlock, problem.batch);
      const int64_t group = o / group_out;
      gather_taps<T, Acc>(problem, weight, results.weights(o), group_in, taps.data());
      folder.taps_to_cells(taps.data(), folded.data());
      for (Acc& value : folded) value *= scale;
      for (int64_t n = n_begin; n < n_end; ++n) {
        const Acc* sums = turned.data() + (n * problem.groups + group) * depth;
        results.put(n, o, dot(folded.data(), sums, depth));
      }
    }
  });
}

}  // namespace

void combine(const Problem& problem, const Cells& cells, const Weight& weight, const Bias& bias,
             Dtype dtype, const ParallelFor& parallel_for, const void* cell_sums, void* y) {
  if (problem.taps() <= kTapsPerCell * cells.count() &&
      problem.c_out > kFewOutputs * problem.groups) {
    return combine_taps(problem, cells, weight, bias, dtype, parallel_for, cell_sums, y);
  }
  dispatch(dtype, [&](auto element) {
    combine_of<decltype(element)>(problem, cells, weight, bias, parallel_for, cell_sums, y);
  });
}

}  // namespace convt_reduce::cpu
