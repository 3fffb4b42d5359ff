// What the kernels share in which the warps of a block share the terms of a few results.
#pragma once

#include "cuda/combine_fold.cuh"

namespace convt_reduce::cuda {

constexpr int kSplitThreads = 256;
constexpr int kSplitWarps = kSplitThreads / kWarp;
// A warp's sums stay accurate without a second level.
constexpr int64_t kMostSplitSteps = kSplitWarps * (kPartTerms / kStep);
// Sums that a thread loads at a time where cell sums are in chunks.
constexpr int kChunksLoads = 16;
constexpr int kInsideTaps = 9;  // taps that a block folds itself, at most

// A block, or a cluster of blocks, has kHigh * 16 batch elements and kWidth * 8 output channels; of
// a tensor product's 16 batch elements kHalves * 8 at most, which changes no bits: with fewer,
// there are more blocks, and each has less to load. Its warps take the steps in turn, of which each
// loads kAhead at a time, and the warps' sums are added in order, then those of the cluster's
// blocks: so the order of additions depends on the depth and on the size of the cluster alone.
template <int kHigh_, int kWidth_, int kAhead_, int kHalves_ = 2>
struct SplitTile {
  static constexpr int kHigh = kHigh_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kAhead = kAhead_;
  static constexpr int kHalves = kHalves_;
  static constexpr int kLoads = kHigh * kHalves;  // of a lane for a step, four terms each
  static constexpr int kRows = kHigh * kHalves * 8;
  static constexpr int kColumns = kWidth * kColumns8;
  // Whether the products of several steps are made at a time, since one has too few to hide their
  // latency.
  static constexpr bool kStepsTogether = kHigh * kWidth == 1;
  static constexpr bool kMerges = kHigh == 1;  // more has no registers left for chunks
};

// Vectors of shared memory before what the block folds: the warps' sums, and first of all what
// folding needs.
template <typename Tile, bool kInside>
CONVT_HD inline int split_parts(int cells) {
  const int parts = kSplitThreads * Tile::kHigh * Tile::kWidth;
  const int fold = kSplitThreads / kFoldThreads * fold_floats<kInsideTaps>(cells) / 4;
  return kInside && fold > parts ? fold : parts;
}

// A lane's four terms of a row, or zeros behind its end: rows and their ends lie on 16 bytes.
__device__ inline float4 load_terms(const float* from, bool exist) {
  return exist ? *reinterpret_cast<const float4*>(from) : float4{};
}

// The same from few chunks that are `apart`, for kTerms of what a thread loads, added as in
// sum_of_few().
template <int kTerms, typename At, typename Exists>
__device__ __forceinline__ void load_chunks(const At& at, const Exists& exists, int64_t apart,
                                            int chunks, float4* sums) {
  constexpr int kTogether = kChunksLoads / kTerms;
  static_assert(kTogether % kChunksTogether == 0);
#pragma unroll
  for (int i = 0; i < kTerms; ++i) sums[i] = {};
  int64_t offset = 0;
#pragma unroll 1
  for (int left = chunks; left > 0; left -= kTogether) {
    float4 values[kTogether][kTerms];
#pragma unroll
    for (int c = 0; c < kTogether; ++c, offset += apart) {
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        values[c][i] = load_terms(at(i) + offset, exists(i) && c < left);
      }
    }
#pragma unroll
    for (int c = 0; c < kTogether; c += kChunksTogether) {
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        const auto of_term = [&](auto member) {
          return (values[c][i].*member + values[c + 1][i].*member) +
                 (values[c + 2][i].*member + values[c + 3][i].*member);
        };
        sums[i].x += of_term(&float4::x);
        sums[i].y += of_term(&float4::y);
        sums[i].z += of_term(&float4::z);
        sums[i].w += of_term(&float4::w);
      }
    }
  }
}

// The products of a warp's steps, from `begin` on every `warps`-th, which go to its part of `parts`
// [kSplitWarps][kHigh][kWidth][lanes]. load_sums(step, sums) loads a lane's terms of kAhead steps.
template <typename Tile, typename LoadSums>
__device__ __forceinline__ void multiply_steps(int begin, int warps, int steps,
                                               const Fragment* fragments, int64_t step_apart,
                                               int columns, const LoadSums& load_sums,
                                               float4* parts) {
  constexpr int kHigh = Tile::kHigh;
  constexpr int kWidth = Tile::kWidth;
  constexpr int kAhead = Tile::kAhead;
  constexpr int kHalves = Tile::kHalves;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  float results[kHigh][kWidth][4] = {};
  for (int first = begin; first < steps; first += warps * kAhead) {
    float4 sums[kAhead * Tile::kLoads];
    load_sums(first, sums);
    LaneWeights weights[kAhead][kWidth];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int step = min(first + a * warps, steps);
      // Past the last step or the last fragment, that again: it meets zeros or is not written.
      const Fragment* of_step = fragments + min(step, steps - 1) * step_apart;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        weights[a][j] = LaneWeights(of_step[min(j, columns - 1)], lane);
      }
    }
    uint32_t pieces[kAhead][kHigh][3][4];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int i = 0; i < kHigh; ++i) {
        const float4* of = sums + (a * kHigh + i) * kHalves;
        take_apart({of[0], kHalves > 1 ? of[kHalves - 1] : float4{}}, pieces[a][i]);
      }
    }
    constexpr int kTogether = Tile::kStepsTogether ? kAhead : kHigh * kWidth;
#pragma unroll
    for (int begin = 0; begin < kAhead * kHigh * kWidth; begin += kTogether) {
      float step[kTogether][4];
      multiply_step<kTogether>(
          [&](int j) -> const auto& {
            const int at = begin + j;
            return pieces[at / (kHigh * kWidth)][at / kWidth % kHigh];
          },
          [&](int j) -> const auto& {
            const int at = begin + j;
            return weights[at / (kHigh * kWidth)][at % kWidth];
          },
          step);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int at = begin + j;
#pragma unroll
        for (int e = 0; e < 4; ++e) results[at / kWidth % kHigh][at % kWidth][e] += step[j][e];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kHigh; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const auto& of = results[i][j];
      parts[((warp * kHigh + i) * kWidth + j) * kWarp + lane] = {of[0], of[1], of[2], of[3]};
    }
  }
}

// The warps' sums of pair `own` of a row, added in order.
template <typename Tile>
__device__ __forceinline__ float2 warps_sum(const float4* parts, int row, int own) {
  constexpr int kHigh = Tile::kHigh;
  constexpr int kWidth = Tile::kWidth;
  const int of_lane = (row / kRows16 * kWidth + own / 4) * kWarp + row % 8 * 4 + own % 4;
  const float2* part = reinterpret_cast<const float2*>(parts + of_lane) + row / 8 % 2;
  float2 sum = {};
#pragma unroll
  for (int w = 0; w < kSplitWarps; ++w) {
    const float2 v = part[w * (kHigh * kWidth * kWarp * 2)];
    sum.x += v.x;
    sum.y += v.y;
  }
  return sum;
}

// Two results from their means, or as many as exist: `outs` from channel o on, maybe none. `sums`
// are the cell sums of the batch element and the group.
template <typename T>
__device__ __forceinline__ void put_means(const CombineArguments& p, const float2& sum,
                                          const float (&bias)[2], int64_t o, int outs,
                                          const float* sums, T* to) {
  float means[2] = {sum.x, sum.y};
  T values[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!isfinite(means[e]) && e < outs) {
      means[e] = careful_mean_of_row<T>(p, o + e, sums);
    }
    values[e] = result<T>(p, means[e], bias[e]);
  }
  put_pair(values, outs, p.group_out % 2 == 0, to);
}

}  // namespace convt_reduce::cuda
