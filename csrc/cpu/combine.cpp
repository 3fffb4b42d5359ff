// Combine folds an output channel's weights once per block of batch elements and multiplies them
// with the cell sums.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/element.h"
#include "cpu/fold.h"
#include "cpu/kernels.h"

namespace convt_reduce::cpu {
namespace {

constexpr int64_t kBatchBlock = 64;  // batch elements that share one folding of the weights

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

// The sum over taps one by one. Folding adds weights before they meet a cell sum, and so would turn
// inf*1 + inf*(-1), a NaN in the convolution, into inf*0.5 or the like: where a folded sum is not
// finite this one decides.
template <typename Acc>
Acc tap_by_tap(const Cells& cells, const std::vector<Acc>& taps, const Acc* sums, int64_t channels,
               Acc scale) {
  const int64_t k1 = cells.axis[1].axis.kernel;
  const int64_t k2 = cells.axis[2].axis.kernel;
  Acc total = 0;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t cell = 0; cell < cells.count(); ++cell) {
      const CellBands bands = bands_of(cells, cell);
      const Band& band0 = cells.axis[0].band(bands.b[0]);
      const Band& band1 = cells.axis[1].band(bands.b[1]);
      const Band& band2 = cells.axis[2].band(bands.b[2]);
      const Acc sum = sums[cell * channels + c];
      for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
        for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
          for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
            total += taps[((t0 * k1 + t1) * k2 + t2) * channels + c] * scale * sum;
          }
        }
      }
    }
  }
  return total;
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
  const Acc multiplier = static_cast<Acc>(problem.multiplier);
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
      const T* w = static_cast<const T*>(weight.data) + o % group_out * weight.stride_c_out +
                   group * group_in * weight.stride_c_in;
      gather_taps<T, Acc>(problem, weight, w, group_in, taps.data());
      folder.taps_to_cells(taps.data(), folded.data());
      for (Acc& value : folded) value *= scale;
      const Acc b = bias.data == nullptr
                        ? Acc(0)
                        : static_cast<Acc>(static_cast<const T*>(bias.data)[o * bias.stride]);
      for (int64_t n = n_begin; n < n_end; ++n) {
        const Acc* sums = turned.data() + (n * problem.groups + group) * depth;
        Acc mean = dot(folded.data(), sums, depth);
        if (!std::isfinite(mean)) mean = tap_by_tap(cells, taps, sums, group_in, scale);
        static_cast<T*>(y)[n * problem.c_out + o] = static_cast<T>(multiplier * (mean + b));
      }
    }
  });
}

}  // namespace

void combine(const Problem& problem, const Cells& cells, const Weight& weight, const Bias& bias,
             Dtype dtype, const ParallelFor& parallel_for, const void* cell_sums, void* y) {
  dispatch(dtype, [&](auto element) {
    combine_of<decltype(element)>(problem, cells, weight, bias, parallel_for, cell_sums, y);
  });
}

}  // namespace convt_reduce::cpu
