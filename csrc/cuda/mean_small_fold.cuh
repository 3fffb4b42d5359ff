// A small call's weights: mean_small.cuh. The additions are those of fold_weights(), in the same
// order; what differs is when things are found out and loaded.
#pragma once

#include "cuda/mean_small_tiles.cuh"

namespace convt_reduce::cuda {

constexpr int kMaskFloats = 12;  // the taps of a cell, in whole vectors
static_assert(kMaskFloats >= kInsideTaps && kMaskFloats % 4 == 0);

// masks [cells][kMaskFloats]: 1 for each tap that covers a cell, else 0. By all warps of a block.
__device__ inline void fill_masks(const Covers& covers, int cells, int warp, float* masks) {
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  for (int cell = warp; cell < cells; cell += warps) {
    const uint64_t bits = covers.of_cell[cell];
    if (lane < kMaskFloats) masks[cell * kMaskFloats + lane] = bits >> lane & 1 ? 1.0f : 0.0f;
  }
}

// What a thread of a team folds: for 16 input channels at a time, one of them and one of the
// block's output channels. It loads a tap of an output channel, for all 16.
template <typename T>
class MeanFold {
 public:
  // For the threads of teams; without it there is nothing to load or to fold. Reads no weights.
  __device__ void prepare(const CombineArguments& p, const MeanTiles& tiles, int group,
                          int column) {
    const int team = threadIdx.x / kFoldThreads;
    const int thread = threadIdx.x % kFoldThreads;
    const int out = quotient_by(thread, tiles.taps_inverse);
    const int tap = thread - out * tiles.taps;
    const int row = quotient_by(tap, tiles.taps2_inverse);
    const int t0 = quotient_by(row, tiles.taps1_inverse);
    const int taps1 = static_cast<int>(p.cells.axis[1].axis.kernel);
    const int taps2 = static_cast<int>(p.cells.axis[2].axis.kernel);
    const int group_in = static_cast<int>(p.group_in);
    const int o_begin = column * kColumns8;
    outs_ = min(static_cast<int>(p.group_out) - o_begin, kColumns8);
    place_ = out < outs_ ? out * kApart + tap : -1;
    from_ = static_cast<const T*>(p.weight.data) +
            (group * group_in + team * kFoldChannels) * p.weight.stride_c_in +
            (o_begin + out) * p.weight.stride_c_out + t0 * p.weight.stride[0] +
            (row - t0 * taps1) * p.weight.stride[1] + (tap - row * taps2) * p.weight.stride[2];
    channels_ = group_in - team * kFoldChannels;
  }

  // Starts the loads for the next 16 channels of the team.
  __device__ __forceinline__ void load(const CombineArguments& p, const MeanTiles& tiles) {
    if (place_ < 0 || channels_ <= 0) return;
    const int64_t stride = p.weight.stride_c_in;
    const T* w = from_;
    if (channels_ >= kFoldChannels) {
#pragma unroll
      for (int c = 0; c < kFoldChannels; ++c, w += stride) loaded_[c] = *w;
    } else {
#pragma unroll
      for (int c = 0; c < kFoldChannels; ++c) {
        loaded_[c] = *w;
        if (c + 1 < channels_) w += stride;
      }
    }
    from_ += int64_t{tiles.teams} * kFoldChannels * stride;
  }

  // Folds what is loaded, and then loads and folds the rest, into panel [steps]. `shared` is of all
  // teams.
  __device__ __forceinline__ void fold(const CombineArguments& p, const MeanTiles& tiles,
                                       const float* masks, float* shared, Fragment* panel) {
    const int team = threadIdx.x / kFoldThreads;
    const int thread = threadIdx.x % kFoldThreads;
    const int lane = threadIdx.x % kWarp;
    const int cells = static_cast<int>(p.cells.count());
    const int terms_apart = kFoldChannels * cells + 4;
    const float scale = static_cast<float>(p.scale);
    const int own_c = thread / kColumns8;
    const int own_o = thread % kColumns8;
    float* const staged = shared + team * fold_floats<kInsideTaps>(cells);
    float* const terms = staged;  // behind it in time
#pragma unroll 1
    for (int begin = team * cells; channels_ > 0; begin += tiles.teams * cells) {
      if (place_ >= 0) {
#pragma unroll
        for (int c = 0; c < kFoldChannels; ++c) {
          staged[c * kColumns8 * kApart + place_] = widen(loaded_[c]);
        }
      }
      const bool exists = own_c < channels_ && own_o < outs_;
      channels_ -= tiles.teams * kFoldChannels;
      load(p, tiles);
      meet(team);
      float weights[kInsideTaps];
#pragma unroll
      for (int tap = 0; tap < kInsideTaps; ++tap) {
        weights[tap] = tiles.used >> tap & 1 ? staged[thread * kApart + tap] : 0.0f;
      }
      meet(team);
      // Times one or zero: no branches. A NaN from zero times the infinite weight of a tap that
      // covers another cell makes a mean that is computed again, as infinity does there.
#pragma unroll 4
      for (int cell = 0; cell < cells; ++cell) {
        const float4* const mask = reinterpret_cast<const float4*>(masks + cell * kMaskFloats);
        const float4 m[3] = {mask[0], mask[1], mask[2]};
        const float of_tap[kInsideTaps] = {m[0].x, m[0].y, m[0].z, m[0].w, m[1].x,
                                           m[1].y, m[1].z, m[1].w, m[2].x};
        float sum = 0;
#pragma unroll
        for (int tap = 0; tap < kInsideTaps; ++tap) sum = fmaf(weights[tap], of_tap[tap], sum);
        terms[own_o * terms_apart + own_c * cells + cell] = exists ? sum * scale : 0.0f;
      }
      meet(team);
      const int steps = min(tiles.steps - begin, cells);
      for (int step = thread / kWarp; step < steps; step += kFoldThreads / kWarp) {
        const float4 v = *reinterpret_cast<const float4*>(terms + lane / 4 * terms_apart +
                                                          step * kStep + lane % 4 * 4);
        put_fragment(v, lane, panel[begin + step]);
      }
      if (channels_ > 0) meet(team);
    }
  }

 private:
  static constexpr int kApart = kInsideTaps | 1;  // neighbouring threads read other banks

  __device__ static void meet(int team) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kFoldThreads) : "memory");
  }

  T loaded_[kFoldChannels];
  const T* from_ = nullptr;
  int channels_ = 0;  // that are left from the team's on, maybe none
  int place_ = -1;    // of the first that it loads; -1: it loads none
  int outs_ = 0;
};

}  // namespace convt_reduce::cuda
