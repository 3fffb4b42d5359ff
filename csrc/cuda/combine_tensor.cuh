// The matrix product of combine on tensor cores, as accurate as in float32: pieces.cuh.
#pragma once

#include <algorithm>

#include "cuda/combine.cuh"
#include "cuda/pieces.cuh"
#include "cuda/staging.cuh"

namespace convt_reduce::cuda {

constexpr int kMostStage = 32;  // terms of a stage: slices and folded weights are whole stages

// Folded weights are [group][step][columns8] of fragments.
struct TensorTiles {
  int64_t batch;  // tiles of the batch
  int64_t out;    // tiles of a group's output channels
  int64_t slice;  // terms, whole stages
  int64_t slices;
  int64_t blocks;    // groups * batch * out * slices
  int64_t steps;     // of depth, rounded up to whole stages
  int64_t columns8;  // fragments side by side: group_out / 8, rounded up
  bool aligned;      // whether rows of cell sums begin on 16 bytes
};

// A block has kWarps * 16 batch elements and kWidth * 8 output channels; a warp all of the
// channels, so that a cell sum is taken apart once in a block. kSteps steps at a time are copied to
// shared memory, and kStages times as many are there or on their way.
template <int kWarps_, int kWidth_, int kSteps_, int kStages_>
struct TensorTile {
  static constexpr int kWarps = kWarps_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kSteps = kSteps_;
  static constexpr int kStages = kStages_;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRows = kWarps * kRows16;
  static constexpr int kColumns = kWidth * kColumns8;
  static constexpr int kTerms = kSteps * kStep;  // of a stage
  // Whether there are registers for a second level of sums, so that a slice may be long.
  static constexpr bool kTotals = kWidth <= 2;
  // Fragments that a warp multiplies with at a time: they hide each other's latency.
  static constexpr int kTogether = std::min(kWidth, 4);
  static_assert(kMostStage % kTerms == 0 && kPartTerms % kTerms == 0 && kWidth % kTogether == 0);
};

// results += a step's products, for the warp's 16 rows and all fragments; `sums` are a lane's four
// terms of row lane / 4 and of the one 8 below.
template <typename Tile>
__device__ __forceinline__ void multiply_step(const float4 (&sums)[2],
                                              const Fragment (&fragments)[Tile::kWidth], int lane,
                                              float (&results)[Tile::kWidth][4]) {
  constexpr int kTogether = Tile::kTogether;
  uint32_t pieces[3][4];
  take_apart(sums, pieces);
#pragma unroll
  for (int begin = 0; begin < Tile::kWidth; begin += kTogether) {
    LaneWeights weights[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) weights[j] = LaneWeights(fragments[begin + j], lane);
    float step[kTogether][4];
    multiply_step<kTogether>([&](int) -> const auto& { return pieces; },
                             [&](int j) -> const auto& { return weights[j]; }, step);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) results[begin + j][e] += step[j][e];
    }
  }
}

// What lies past the batch or the channels is read from the last of them and not written. (Without
// the 1 in its bounds the compiler saves registers by spilling them.)
template <typename Tile, typename T>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    tensor_kernel(const __grid_constant__ CombineArguments p,
                  const __grid_constant__ TensorTiles tiles, const float* cell_sums,
                  const Fragment* folded, float* parts, T* y) {
  constexpr int kWidth = Tile::kWidth;
  constexpr int kSteps = Tile::kSteps;
  constexpr int kStages = Tile::kStages;
  constexpr int kThreads = Tile::kThreads;
  constexpr int kRows = Tile::kRows;
  constexpr int kTerms = Tile::kTerms;
  constexpr bool kTotals = Tile::kTotals;
  constexpr int kRowLoads = kTerms / 4;                    // 16-byte loads of a row
  constexpr int kSumLoads = kRows * kRowLoads / kThreads;  // of a thread, as all that follow
  constexpr int kPieces = sizeof(Fragment) / kVectorBytes;
  constexpr int kWeightPieces = kSteps * kWidth * kPieces;
  constexpr int kWeightLoads = (kWeightPieces + kThreads - 1) / kThreads;
  constexpr int kRowsApart = kThreads / kRowLoads;  // of a thread's loads
  static_assert(kRowsApart % 2 == 0, "rows of a thread have one place");
  static_assert(4 * kWidth <= 32, "a bit for each result");
  if constexpr (!has_tensor_cores()) {
    __trap();  // not launched
    return;
  }
  __shared__ __align__(16) float sums_tile[kStages][kRows][kTerms];
  __shared__ __align__(16) Fragment weights_tile[kStages][kSteps][kWidth];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int lane_row = lane / 4;
  const int lane_term = lane % 4;
  const int load_row = threadIdx.x / kRowLoads;
  const int load_at = threadIdx.x % kRowLoads;
  // Neighbouring rows of 128 bytes would meet in the same banks.
  const auto place = [](int row, int load) { return kSteps == 1 ? load : load ^ (row % 2 * 4); };
  float* const sums_to = &sums_tile[0][load_row][place(load_row, load_at) * 4];
  uint4* const weights_to = reinterpret_cast<uint4*>(weights_tile) + threadIdx.x;
  let_next_kernel_start();  // stats has waited for all that came before us
  wait_for_previous_kernel();

  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x) {
    int64_t rest = quotient(block, tiles.out);
    const int64_t column_begin = (block - rest * tiles.out) * kWidth;
    int64_t next = quotient(rest, tiles.slices);
    const int64_t slice = rest - next * tiles.slices;
    const int64_t group = quotient(next, tiles.batch);
    const int64_t n_begin = (next - group * tiles.batch) * kRows;
    const int64_t term_begin = slice * tiles.slice;
    const int64_t terms = min(tiles.slice, p.depth - term_begin);
    const int columns = static_cast<int>(min(tiles.columns8 - column_begin, int64_t{kWidth}));
    const int rows = static_cast<int>(min(p.batch - n_begin, int64_t{kRows}));
    const int64_t row_stride = p.c_in * p.cells.count();

    const float* sums_from[kSumLoads];
#pragma unroll
    for (int j = 0; j < kSumLoads; ++j) {
      const int row = min(load_row + j * kRowsApart, rows - 1);
      sums_from[j] =
          cell_sums + (n_begin + row) * row_stride + group * p.depth + term_begin + load_at * 4;
    }
    const uint4* weights_from[kWeightLoads];
#pragma unroll
    for (int j = 0; j < kWeightLoads; ++j) {
      const int i = j * kThreads + threadIdx.x;
      const int s = i / (kWidth * kPieces);
      const int piece = min(i - s * (kWidth * kPieces), columns * kPieces - 1);
      const int64_t step = group * tiles.steps + term_begin / kStep + s;
      weights_from[j] =
          reinterpret_cast<const uint4*>(folded + step * tiles.columns8 + column_begin) + piece;
    }
    const int64_t stages = ceil_div(terms, kTerms);
    const int64_t whole_stages = tiles.aligned ? terms / kTerms : 0;

    const auto load = [&](int64_t at, int stage) {
      float* to = sums_to + stage * (kRows * kTerms);
      if (at < whole_stages) {
#pragma unroll
        for (int j = 0; j < kSumLoads; ++j) {
          copy_async<16>(to + j * (kRowsApart * kTerms), sums_from[j], 16);
        }
      } else {
        const int left = static_cast<int>(min(terms - at * kTerms, int64_t{kTerms})) - load_at * 4;
#pragma unroll
        for (int j = 0; j < kSumLoads; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const bool exists = e < left;
            copy_async<4>(to + j * (kRowsApart * kTerms) + e, exists ? sums_from[j] + e : cell_sums,
                          exists ? 4 : 0);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kSumLoads; ++j) sums_from[j] += kTerms;
#pragma unroll
      for (int j = 0; j < kWeightLoads; ++j) {
        if (kWeightPieces % kThreads == 0 || j * kThreads + threadIdx.x < kWeightPieces) {
          copy_async<16>(weights_to + stage * kWeightPieces + j * kThreads, weights_from[j], 16);
        }
        weights_from[j] += kSteps * kPieces * tiles.columns8;
      }
    };

    float results[kWidth][4] = {};
    float totals[kTotals ? kWidth : 1][4] = {};
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < stages) load(s, s);
      close_batch();
    }
    int stage = 0;
    int ahead = kStages - 1;
    for (int64_t at = 0; at < stages; ++at) {
      wait_for_batches<kStages - 2>();
      __syncthreads();
      if (at + kStages - 1 < stages) load(at + kStages - 1, ahead);
      close_batch();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float4 sums[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp * kRows16 + half * 8 + lane_row;
          sums[half] = *reinterpret_cast<const float4*>(
              &sums_tile[stage][row][place(row, s * 4 + lane_term) * 4]);
        }
        multiply_step<Tile>(sums, weights_tile[stage][s], lane, results);
      }
      if constexpr (kTotals) {
        if ((at + 1) % (kPartTerms / kTerms) == 0) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              totals[j][e] += results[j][e];
              results[j][e] = 0;
            }
          }
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    }
    wait_for_batches<0>();
    __syncthreads();

    const bool pairs = p.group_out % 2 == 0;
    const int64_t n_first = n_begin + warp * kRows16 + lane_row;
    const int64_t o_first = group * p.group_out + column_begin * kColumns8 + lane_term * 2;
    const int outs =
        static_cast<int>(min(p.group_out - column_begin * kColumns8, int64_t{kWidth * kColumns8}));
    const int o_left = outs - lane_term * 2;  // from o_first on; maybe none
    const int64_t at = n_first * p.c_out + o_first;
    const int halves = n_first + 8 < p.batch ? 2 : n_first < p.batch ? 1 : 0;
    uint32_t rare = 0;  // a bit for each result that is not finite
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      // Not max(min(left, 2), 0): nvcc 13.0 for 9.0 takes that for 2 where it is 0 (the predicate
      // of its VIMNMX.RELU).
      const int left = o_left - j * kColumns8;
      float means[2][2];
      T values[2][2] = {};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          means[half][e] = results[j][half * 2 + e];
          if constexpr (kTotals) means[half][e] += totals[j][half * 2 + e];
          if (tiles.slices > 1 || half >= halves || e >= left) continue;
          if (!isfinite(means[half][e])) rare |= 1u << ((half * kWidth + j) * 2 + e);
          values[half][e] =
              result<T>(p, means[half][e], bias_of<T>(p, o_first + j * kColumns8 + e));
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half >= halves) break;
        const int64_t to = at + half * 8 * p.c_out + j * kColumns8;
        if (tiles.slices > 1) {
          put_pair(means[half], left, pairs, parts + slice * p.batch * p.c_out + to);
        } else {
          put_pair(values[half], left, pairs, y + to);
        }
      }
    }
    if (rare != 0) put_carefully<T>(p, n_first, o_first, kWidth, rare, cell_sums, y);
  }
}

}  // namespace convt_reduce::cuda
