// Folding weights into the fragments of combine_tensor.cuh, while stats still reads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/combine_tensor.cuh"

namespace convt_reduce::cuda {

constexpr int kFoldChannels = 16;  // input channels of a block: their terms are whole steps
static_assert(kFoldChannels == kStep,
              "as many channels as terms of a step: cells steps of a chunk");
constexpr int kFoldThreads = kFoldChannels * kColumns8;
constexpr int kMostFoldCells = 64;
constexpr int kMostFoldTaps = 64;
constexpr int64_t kFoldBlocks = 1024;  // about: all run at once

// Which taps cover each cell, a bit for each.
struct Covers {
  uint64_t of_cell[kMostFoldCells];
};

struct FoldTiles {
  int64_t steps;
  int64_t columns8;
  int64_t chunks;         // of 16 input channels, enough for all steps
  int64_t across;         // fragments side by side that a block makes
  int64_t column_blocks;  // columns8 / across, rounded up
  int64_t blocks;
};

__device__ inline void put_fragment(const float4& v, int lane, Fragment& to) {
  uint4 large;
  uint2 small;
  split_pair(v.x, v.y, large.x, large.z, small.x);
  split_pair(v.z, v.w, large.y, large.w, small.y);
  to.large[lane] = large;
  to.small[lane] = small;
}

// For up to kTaps taps and kMostFoldCells cells. A block has 16 input channels and 8 output
// channels at a time, a thread one of each: its taps fit in registers. They come through shared
// memory, since in global memory it is a thread's own taps that are neighbours.
template <int kTaps, typename T>
__global__ void __launch_bounds__(kFoldThreads, kTaps <= 16 ? 8 : 4)
    fold_fragments_kernel(const __grid_constant__ CombineArguments p,
                          const __grid_constant__ FoldTiles tiles,
                          const __grid_constant__ Covers covers, Fragment* folded) {
  constexpr int kApart = kTaps | 1;  // odd: so that threads read from different banks
  constexpr int kLoads = (kColumns8 * kTaps + kFoldThreads - 1) / kFoldThreads;
  extern __shared__ float4 shared[];
  float* const staged = reinterpret_cast<float*>(shared);  // [channels][outs][kApart]
  float* const sums = staged;                              // and then [outs][terms]
  const int cells = static_cast<int>(p.cells.count());
  const int taps2 = static_cast<int>(p.cells.axis[2].axis.kernel);
  const int taps1 = static_cast<int>(p.cells.axis[1].axis.kernel);
  const int taps = static_cast<int>(p.cells.axis[0].axis.kernel) * taps1 * taps2;
  const int terms_apart = kFoldChannels * cells + 4;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int own_c = threadIdx.x / kColumns8;
  const int own_o = threadIdx.x % kColumns8;
  const float scale = static_cast<float>(p.scale);
  const int64_t stride = p.weight.stride_c_in;
  int load_out[kLoads];  // of what a thread loads, for 16 channels each: past the last, none
  int64_t load_from[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int i = j * kFoldThreads + threadIdx.x;
    load_out[j] = i / taps;
    const int tap = i - load_out[j] * taps;
    const int row = tap / taps2;
    const int t0 = row / taps1;
    load_from[j] = load_out[j] * p.weight.stride_c_out + t0 * p.weight.stride[0] +
                   (row - t0 * taps1) * p.weight.stride[1] +
                   (tap - row * taps2) * p.weight.stride[2];
  }

  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x) {
    const int64_t rest = quotient(block, tiles.column_blocks);
    const int64_t column_begin = (block - rest * tiles.column_blocks) * tiles.across;
    const int64_t column_end = min(column_begin + tiles.across, tiles.columns8);
    const int64_t group = quotient(rest, tiles.chunks);
    const int64_t c_begin = (rest - group * tiles.chunks) * kFoldChannels;
    const int channels = static_cast<int>(min(p.group_in - c_begin, int64_t{kFoldChannels}));
    const int64_t step_begin = c_begin / kStep * cells;
    const int steps = static_cast<int>(min(tiles.steps - step_begin, int64_t{cells}));
    const T* from = static_cast<const T*>(p.weight.data) + (group * p.group_in + c_begin) * stride +
                    column_begin * kColumns8 * p.weight.stride_c_out;
    Fragment* to = folded + (group * tiles.steps + step_begin) * tiles.columns8;
    for (int64_t column = column_begin; column < column_end; ++column) {
      const int outs = static_cast<int>(min(p.group_out - column * kColumns8, int64_t{kColumns8}));
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (load_out[j] >= outs || channels <= 0) break;
        const T* w = from + load_from[j];
        T loaded[kFoldChannels];  // all loads before the first store, so that they overlap
        if (channels == kFoldChannels) {
#pragma unroll
          for (int c = 0; c < kFoldChannels; ++c, w += stride) loaded[c] = *w;
        } else {
#pragma unroll
          for (int c = 0; c < kFoldChannels; ++c) {
            loaded[c] = *w;
            if (c + 1 < channels) w += stride;
          }
        }
        const int tap = j * kFoldThreads + threadIdx.x - load_out[j] * taps;
#pragma unroll
        for (int c = 0; c < kFoldChannels; ++c) {
          staged[(c * kColumns8 + load_out[j]) * kApart + tap] = widen(loaded[c]);
        }
      }
      __syncthreads();
      float weights[kTaps];
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) weights[tap] = staged[threadIdx.x * kApart + tap];
      __syncthreads();
      const bool exists = own_c < channels && own_o < outs;
#pragma unroll 1
      for (int cell = 0; cell < cells; ++cell) {
        const uint64_t bits = covers.of_cell[cell];
        float sum = 0;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          if (bits >> tap & 1) sum += weights[tap];
        }
        sums[own_o * terms_apart + own_c * cells + cell] = exists ? sum * scale : 0.0f;
      }
      __syncthreads();
      for (int step = warp; step < steps; step += kFoldThreads / kWarp) {
        const float4 v = *reinterpret_cast<const float4*>(sums + lane / 4 * terms_apart +
                                                          step * kStep + lane % 4 * 4);
        put_fragment(v, lane, to[step * tiles.columns8 + column]);
      }
      __syncthreads();
      from += kColumns8 * p.weight.stride_c_out;
    }
  }
  wait_for_previous_kernel();
}

// For any number of taps and cells: a warp per fragment.
template <typename T>
__global__ void __launch_bounds__(kFoldThreads)
    fold_any_fragments_kernel(const __grid_constant__ CombineArguments p, int64_t steps,
                              int64_t columns8, int64_t fragments, Fragment* folded) {
  constexpr int kWarps = kFoldThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  for (int64_t i = blockIdx.x * int64_t{kWarps} + threadIdx.x / kWarp; i < fragments;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t rest = quotient(i, columns8);
    const int64_t group = quotient(rest, steps);
    const int64_t of_group = (i - rest * columns8) * kColumns8 + lane / 4;
    const int64_t term = (rest - group * steps) * kStep + lane % 4 * 4;
    float values[4] = {};
    if (of_group < p.group_out) {
      const Channel channel(p, group * p.group_out + of_group);
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        if (term + e < p.depth) values[e] = folded_weight<T>(p, channel, term + e);
      }
    }
    put_fragment({values[0], values[1], values[2], values[3]}, lane, folded[i]);
  }
  wait_for_previous_kernel();
}

inline Covers covers_of(const CombineArguments& p) {
  Covers covers = {};
  const int64_t taps1 = p.cells.axis[1].axis.kernel;
  const int64_t taps2 = p.cells.axis[2].axis.kernel;
  for (int64_t cell = 0; cell < p.cells.count(); ++cell) {
    const CellBands bands = bands_of(p.cells, cell);
    const Band& band0 = p.cells.axis[0].band(bands.b[0]);
    const Band& band1 = p.cells.axis[1].band(bands.b[1]);
    const Band& band2 = p.cells.axis[2].band(bands.b[2]);
    for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
      for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
        for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
          covers.of_cell[cell] |= uint64_t{1} << ((t0 * taps1 + t1) * taps2 + t2);
        }
      }
    }
  }
  return covers;
}

template <typename T>
cudaError_t launch_fold_fragments(const CombineArguments& p, int64_t steps, int64_t columns8,
                                  const Queue& queue, Fragment* folded) {
  const int64_t groups = p.c_out / p.group_out;
  const int64_t cells = p.cells.count();
  const int64_t taps =
      p.cells.axis[0].axis.kernel * p.cells.axis[1].axis.kernel * p.cells.axis[2].axis.kernel;
  const auto shared = [&](int most) {
    return sizeof(float) *
           std::max<size_t>(kFoldThreads * (most | 1), kColumns8 * (kFoldChannels * cells + 4));
  };
  // A table of bands lies in the device's memory.
  if (cells > kMostFoldCells || taps > kMostFoldTaps || needs_table(p.cells)) {
    const int64_t fragments = groups * steps * columns8;
    return launch(&fold_any_fragments_kernel<T>, ceil_div(fragments, kFoldThreads / kWarp),
                  kFoldThreads, 0, queue.stream, queue.overlaps, p, steps, columns8, fragments,
                  folded);
  }
  FoldTiles tiles;
  tiles.steps = steps;
  tiles.columns8 = columns8;
  tiles.chunks = ceil_div(steps, cells);
  tiles.across = std::clamp<int64_t>(groups * tiles.chunks * columns8 / kFoldBlocks, 1, columns8);
  tiles.column_blocks = ceil_div(columns8, tiles.across);
  tiles.blocks = groups * tiles.chunks * tiles.column_blocks;
  const auto run = [&](auto most) {
    constexpr int kTaps = decltype(most)::value;
    return launch(&fold_fragments_kernel<kTaps, T>, tiles.blocks, kFoldThreads, shared(kTaps),
                  queue.stream, queue.overlaps, p, tiles, covers_of(p), folded);
  };
  if (taps <= 9) return run(std::integral_constant<int, 9>{});
  if (taps <= 16) return run(std::integral_constant<int, 16>{});
  if (taps <= 32) return run(std::integral_constant<int, 32>{});
  return run(std::integral_constant<int, kMostFoldTaps>{});
}

}  // namespace convt_reduce::cuda
