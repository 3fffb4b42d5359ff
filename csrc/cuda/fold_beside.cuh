// Folding weights in blocks of stats' own grid, its first: so combine finds them folded when stats
// is done. A kernel of its own would get its blocks only when stats runs out of them, and what it
// reads then takes as long as what stats has asked for before.
//
// The additions are those of fold_weights(), in the same order: a block has 16 input channels and 4
// output channels, a thread one of the former, all of the latter, and a cell at a time.
#pragma once

#include <type_traits>

#include "cuda/combine_fold.cuh"

namespace convt_reduce::cuda {

constexpr int kBesideOuts = kColumns8 / 2;  // output channels of a block: half of a fragment
static_assert(kBesideOuts * sizeof(float) == sizeof(float4), "a tap of all of them is one load");

// Vectors of shared memory: taps [input channels][taps | 1], and behind them floats
// terms [outs][terms].
CONVT_HD inline int beside_taps(int taps) { return kFoldChannels * (taps | 1); }
CONVT_HD inline int beside_terms_apart(int cells) { return kFoldChannels * cells + 4; }
inline int64_t beside_bytes(const BesideFold& f) {
  if (f.blocks == 0) return 0;
  const int taps = f.taps[0] * f.taps[1] * f.taps[2];
  const int cells = f.bands[0] * f.bands[1] * f.bands[2];
  return sizeof(float4) * beside_taps(taps) +
         sizeof(float) * kBesideOuts * beside_terms_apart(cells);
}

// What one of the `f.blocks` first blocks does.
template <typename T>
__device__ __forceinline__ void do_fold_beside(const BesideFold& f, int block, float4* shared) {
  const int taps1 = f.taps[1];
  const int taps2 = f.taps[2];
  const int taps = f.taps[0] * taps1 * taps2;
  const int cells = f.bands[0] * f.bands[1] * f.bands[2];
  const int apart = taps | 1;  // odd: so that threads read from different banks
  const int terms_apart = beside_terms_apart(cells);
  float* const staged = reinterpret_cast<float*>(shared);
  float* const terms = reinterpret_cast<float*>(shared + beside_taps(taps));

  const int64_t rest = quotient(block, f.columns8 * 2);
  const int64_t half_column = block - rest * f.columns8 * 2;
  const int64_t group = quotient(rest, f.chunks);
  const int64_t chunk = rest - group * f.chunks;
  const int64_t c_begin = chunk * kFoldChannels;
  const int64_t o_begin = half_column * kBesideOuts;
  const int channels = static_cast<int>(min(f.group_in - c_begin, int64_t{kFoldChannels}));
  const int outs = static_cast<int>(min(f.group_out - o_begin, int64_t{kBesideOuts}));
  const T* from = static_cast<const T*>(f.weight.data) +
                  (group * f.group_in + c_begin) * f.weight.stride_c_in +
                  o_begin * f.weight.stride_c_out;
  const int loads = channels > 0 ? outs * taps : 0;
  for (int i = threadIdx.x; i < loads; i += blockDim.x) {
    const int out = i / taps;
    const int tap = i - out * taps;
    const int row = tap / taps2;
    const int t0 = row / taps1;
    const T* w = from + out * f.weight.stride_c_out + t0 * f.weight.stride[0] +
                 (row - t0 * taps1) * f.weight.stride[1] + (tap - row * taps2) * f.weight.stride[2];
    T loaded[kFoldChannels];  // all loads before the first store, so that they overlap
#pragma unroll
    for (int c = 0; c < kFoldChannels; ++c) {
      loaded[c] = *w;
      if (c + 1 < channels) w += f.weight.stride_c_in;
    }
#pragma unroll
    for (int c = 0; c < kFoldChannels; ++c) {
      staged[(c * apart + tap) * kBesideOuts + out] = widen(loaded[c]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kFoldChannels * cells; i += blockDim.x) {
    const int c = i % kFoldChannels;
    const int cell = i / kFoldChannels;
    const int b01 = cell / f.bands[2];
    const int b0 = b01 / f.bands[1];
    const int b1 = b01 - b0 * f.bands[1];
    const int b2 = cell - b01 * f.bands[2];
    const int end0 = f.tap_end[0][b0];
    const int end1 = f.tap_end[1][b1];
    const int begin2 = f.tap_begin[2][b2];
    const int end2 = f.tap_end[2][b2];
    float sums[kBesideOuts] = {};
#pragma unroll 1
    for (int t0 = f.tap_begin[0][b0]; t0 < end0; ++t0) {
#pragma unroll 1
      for (int t1 = f.tap_begin[1][b1]; t1 < end1; ++t1) {
        const float4* const row = shared + c * apart + (t0 * taps1 + t1) * taps2;
#pragma unroll 4
        for (int t2 = begin2; t2 < end2; ++t2) {
          const float4 weights = row[t2];
          sums[0] += weights.x;
          sums[1] += weights.y;
          sums[2] += weights.z;
          sums[3] += weights.w;
        }
      }
    }
#pragma unroll
    for (int o = 0; o < kBesideOuts; ++o) {
      const bool exists = c < channels && o < outs;
      terms[o * terms_apart + c * cells + cell] = exists ? sums[o] * f.scale : 0.0f;
    }
  }
  __syncthreads();
  constexpr int kHalf = kWarp / 2;  // lanes of half a fragment
  const int steps = static_cast<int>(min(f.steps - chunk * cells, int64_t{cells}));
  const int lane = threadIdx.x % kHalf;
  const int to_lane = static_cast<int>(half_column % 2) * kHalf + lane;
  const float* const own = terms + lane / 4 * terms_apart + lane % 4 * 4;
  Fragment* const to = static_cast<Fragment*>(f.folded) +
                       (group * f.steps + chunk * cells) * f.columns8 + half_column / 2;
  for (int step = threadIdx.x / kHalf; step < steps; step += blockDim.x / kHalf) {
    put_fragment(*reinterpret_cast<const float4*>(own + step * kStep), to_lane,
                 EitherFragment{to + step * f.columns8, f.matrices});
  }
}

// Whether the block folds, which it has done then.
template <typename T>
__device__ __forceinline__ bool folds_beside(const BesideFold& f, void* shared) {
  if constexpr (std::is_same_v<AccumulateOf<T>, float>) {
    if (static_cast<int>(blockIdx.x) >= f.blocks) return false;
    wait_for_previous_kernel();
    let_next_kernel_start();
    do_fold_beside<T>(f, blockIdx.x, static_cast<float4*>(shared));
    return true;
  }
  return false;
}

}  // namespace convt_reduce::cuda
