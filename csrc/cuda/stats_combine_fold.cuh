// Folding weights for the kernel of stats_combine_multiply.cuh.
#pragma once

#include "cuda/combine_fold.cuh"
#include "cuda/stats_combine.cuh"

namespace convt_reduce::cuda {

// A block folds the weights of the channels that its pairs of steps touch, cell by cell, into
// shared memory [channels][cells][8], and then gives each position those of its cell. The first
// kernel of its call: so it waits for who came before.
template <typename T>
__global__ void __launch_bounds__(kPositionThreads)
    fold_positions_kernel(const __grid_constant__ CombineArguments p,
                          const __grid_constant__ InputArguments a,
                          const __grid_constant__ Covers covers, FragmentPair* folded) {
  extern __shared__ float cell_weights[];
  __shared__ int64_t offsets[kMostFoldTaps];
  __shared__ unsigned char cell_of[kMostInputPositions];
  constexpr int kLoads = 9;  // on their way together: all of a kernel of 3 x 3
  const int lane = threadIdx.x % kWarp;
  const int cells = static_cast<int>(p.cells.count());
  const int taps2 = static_cast<int>(p.cells.axis[2].axis.kernel);
  const int taps1 = static_cast<int>(p.cells.axis[1].axis.kernel);
  const int all_taps = static_cast<int>(p.cells.axis[0].axis.kernel) * taps1 * taps2;
  for (int tap = threadIdx.x; tap < all_taps; tap += kPositionThreads) {
    const int row = tap / taps2;
    const int t0 = row / taps1;
    offsets[tap] = t0 * p.weight.stride[0] + (row - t0 * taps1) * p.weight.stride[1] +
                   (tap - row * taps2) * p.weight.stride[2];
  }
  for (int i = threadIdx.x; i < a.positions; i += kPositionThreads) {
    const int row = i / a.columns.size;
    const int depth = row / a.rows.size;
    const int b0 = a.depths.locate(depth).band;
    const int b1 = a.rows.locate(row - depth * a.rows.size).band;
    const int b2 = a.columns.locate(i - row * a.columns.size).band;
    cell_of[i] = static_cast<unsigned char>((b0 * a.rows.bands + b1) * a.columns.bands + b2);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t block = blockIdx.x; block < a.fold_blocks; block += gridDim.x) {
    const int64_t rest = quotient(block, a.columns8);
    const int64_t column = block - rest * a.columns8;
    const int64_t group = quotient(rest, a.fold_parts);
    const int pair_begin = static_cast<int>(rest - group * a.fold_parts) * a.fold_pairs;
    const int pairs = min(a.fold_pairs, a.row_pairs - pair_begin);
    const int outs = static_cast<int>(min(p.group_out - column * kColumns8, int64_t{kColumns8}));
    const int c_begin = pair_begin * kPairTerms / a.positions;
    const int c_end =
        min(((pair_begin + pairs) * kPairTerms - 1) / a.positions + 1, a.terms / a.positions);
    const T* const from = static_cast<const T*>(p.weight.data) +
                          (group * p.group_in + c_begin) * p.weight.stride_c_in +
                          column * kColumns8 * p.weight.stride_c_out;
    __syncthreads();
    for (int i = threadIdx.x; i < (c_end - c_begin) * cells * kColumns8; i += kPositionThreads) {
      const int of_channel = i / kColumns8;
      const int c = of_channel / cells;
      const int o = i % kColumns8;
      const T* w = from + c * p.weight.stride_c_in + o * p.weight.stride_c_out;
      uint64_t bits = o < outs ? covers.of_cell[of_channel - c * cells] : 0;
      float sum = 0;
      while (bits != 0) {
        float loaded[kLoads];
#pragma unroll
        for (int k = 0; k < kLoads; ++k, bits &= bits - 1) {
          loaded[k] = bits != 0 ? widen(w[offsets[__ffsll(static_cast<int64_t>(bits)) - 1]]) : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kLoads; ++k) sum += loaded[k];
      }
      cell_weights[i] = sum * static_cast<float>(p.scale);
    }
    __syncthreads();
    for (int i = threadIdx.x / kWarp; i < pairs; i += kPositionThreads / kWarp) {
      FragmentPair& to = folded[(group * a.row_pairs + pair_begin + i) * a.columns8 + column];
      uint2 small[2];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        float values[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int term = (pair_begin + i) * kPairTerms + term_of<T>(lane % 4, step, half);
          int c = term / a.positions;
          int position = term - c * a.positions;
#pragma unroll
          for (int e = half * 2; e < half * 2 + 2; ++e) {
            const int at = ((c - c_begin) * cells + cell_of[position]) * kColumns8 + lane / 4;
            values[e] = c < c_end ? cell_weights[at] : 0.0f;
            if (++position == a.positions) {
              position = 0;
              ++c;
            }
          }
        }
        uint4 large;
        split_pair(values[0], values[1], large.x, large.z, small[step].x);
        split_pair(values[2], values[3], large.y, large.w, small[step].y);
        to.large[step][lane] = large;
      }
      to.small[lane] = {small[0].x, small[0].y, small[1].x, small[1].y};
    }
  }
}

}  // namespace convt_reduce::cuda
