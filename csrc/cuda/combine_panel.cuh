// Combine for large batches of few terms on tensor cores: folded weights stay in shared memory.
#pragma once

#include "cuda/combine.cuh"
#include "cuda/pieces.cuh"
#include "cuda/staging.cuh"

namespace convt_reduce::cuda {

constexpr int kPanelThreads = 512;
constexpr int kPanelWarps = kPanelThreads / kWarp;
constexpr int kPanelWidth = 8;     // fragments side by side
constexpr int kPanelStages = 4;    // steps of a warp's cell sums that are there or on their way
constexpr int kPanelTogether = 4;  // fragments that a warp multiplies with at a time

struct PanelTiles {
  int64_t rows;        // tiles of 16 batch elements
  int64_t row_blocks;  // blocks that share them
  int64_t columns;     // panels of a group's output channels
  int64_t blocks;      // groups * columns * row_blocks
  int64_t steps;       // of depth
  int64_t columns8;    // fragments side by side: group_out / 8, rounded up
};

inline int64_t panel_shared(int64_t steps) {
  return steps * kPanelWidth * static_cast<int64_t>(sizeof(Fragment)) +
         int64_t{kPanelWarps} * kPanelStages * kRows16 * kStep *
             static_cast<int64_t>(sizeof(float));
}

// A block has kPanelWidth * 8 output channels, whose folded weights come once. A warp takes 16
// batch elements at a time through all steps; each lane copies for itself what it will multiply,
// some steps ahead, so that warps wait for each other only at the start.
template <typename T>
__global__ void __launch_bounds__(kPanelThreads, 1)
    panel_kernel(const __grid_constant__ CombineArguments p,
                 const __grid_constant__ PanelTiles tiles, const float* cell_sums,
                 const Fragment* folded, T* y) {
  if constexpr (!has_tensor_cores()) {
    __trap();  // not launched
    return;
  }
  constexpr int kAhead = kPanelStages - 1;
  constexpr int kPieces = sizeof(Fragment) / kVectorBytes;
  extern __shared__ float4
      shared[];  // the panel [steps][width], and rings [warps][stages][2][lanes]
  __shared__ float bias_tile[kPanelWidth * kColumns8];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int lane_row = lane / 4;
  const int lane_term = lane % 4;
  const int steps = static_cast<int>(tiles.steps);
  const int depth = static_cast<int>(p.depth);
  const int64_t row_stride = p.c_in * p.cells.count();
  const Fragment* const panel = reinterpret_cast<const Fragment*>(shared);
  float4* const ring =
      shared + steps * (kPanelWidth * kPieces) + warp * (kPanelStages * 2 * kWarp) + lane;
  let_next_kernel_start();  // stats has waited for all that came before us
  wait_for_previous_kernel();

  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x) {
    const int64_t rest = quotient(block, tiles.row_blocks);
    const int64_t row_block = block - rest * tiles.row_blocks;
    const int64_t group = quotient(rest, tiles.columns);
    const int64_t column_begin = (rest - group * tiles.columns) * kPanelWidth;
    const int64_t o_begin = group * p.group_out + column_begin * kColumns8;
    const int outs = static_cast<int>(
        min(p.group_out - column_begin * kColumns8, int64_t{kPanelWidth * kColumns8}));
    const int pieces_across = (outs + kColumns8 - 1) / kColumns8 * kPieces;
    const int64_t tile_step = tiles.row_blocks * kPanelWarps;
    const int64_t first_tile = row_block + warp * tiles.row_blocks;

    int64_t load_tile = first_tile;  // what is loaded next
    int load_term = 0;
    int load_stage = 0;
    const float* from[2];
    const auto turn_to = [&](int64_t tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t n = min(tile * kRows16 + half * 8 + lane_row, p.batch - 1);
        from[half] = cell_sums + n * row_stride + group * p.depth + lane_term * 4;
      }
    };
    const auto load = [&] {
      if (load_tile < tiles.rows) {
        const bool exist = load_term + lane_term * 4 < depth;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy_async<16>(ring + (load_stage * 2 + half) * kWarp,
                         exist ? from[half] + load_term : cell_sums, exist ? 16 : 0);
        }
        load_stage = load_stage + 1 == kPanelStages ? 0 : load_stage + 1;
        load_term += kStep;
        if (load_term >= depth) {
          load_term = 0;
          load_tile += tile_step;
          turn_to(load_tile);
        }
      }
      close_batch();
    };

    __syncthreads();  // the panel and the bias before these have been used
    if (threadIdx.x < outs) bias_tile[threadIdx.x] = bias_of<T>(p, o_begin + threadIdx.x);
    turn_to(first_tile);
    // The panel comes in parts, a batch each, before which no warp needs more of it.
    const uint4* const weights = reinterpret_cast<const uint4*>(
        folded + group * tiles.steps * tiles.columns8 + column_begin);
#pragma unroll 1
    for (int part = 0; part < kAhead; ++part) {
      const int begin = (part * steps + kAhead - 1) / kAhead * (kPanelWidth * kPieces);
      const int end = ((part + 1) * steps + kAhead - 1) / kAhead * (kPanelWidth * kPieces);
      for (int i = begin + threadIdx.x; i < end; i += kPanelThreads) {
        const int step = i / (kPanelWidth * kPieces);
        const int piece = i - step * (kPanelWidth * kPieces);
        if (piece < pieces_across) {
          copy_async<16>(shared + i, weights + step * tiles.columns8 * kPieces + piece, 16);
        }
      }
      load();
    }
    const auto wait_for_step = [&](bool whole_block) {
      wait_for_batches<kAhead - 1>();
      if (whole_block) __syncthreads();
    };
    if (first_tile >= tiles.rows) {
      for (int step = 0; step < min(steps, kAhead); ++step) {
        wait_for_step(true);
        close_batch();
      }
    }

    int stage = 0;
    for (int64_t tile = first_tile; tile < tiles.rows; tile += tile_step) {
      float results[kPanelWidth][4] = {};
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        wait_for_step(tile == first_tile && step < kAhead);
        load();
        const float4 sums[2] = {ring[stage * 2 * kWarp], ring[(stage * 2 + 1) * kWarp]};
        stage = stage + 1 == kPanelStages ? 0 : stage + 1;
        uint32_t pieces[3][4];
        take_apart(sums, pieces);
#pragma unroll
        for (int begin = 0; begin < kPanelWidth; begin += kPanelTogether) {
          LaneWeights fragments[kPanelTogether];
#pragma unroll
          for (int j = 0; j < kPanelTogether; ++j) {
            fragments[j] = LaneWeights(panel[step * kPanelWidth + begin + j], lane);
          }
          float products[kPanelTogether][4];
          multiply_step<kPanelTogether>([&](int) -> const auto& { return pieces; },
                                        [&](int j) -> const auto& { return fragments[j]; },
                                        products);
#pragma unroll
          for (int j = 0; j < kPanelTogether; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) results[begin + j][e] += products[j][e];
          }
        }
      }

      const bool pairs = p.group_out % 2 == 0;
      const int64_t n_first = tile * kRows16 + lane_row;
      const int64_t o_first = o_begin + lane_term * 2;
      uint32_t rare = 0;  // a bit for each result that is not finite
#pragma unroll
      for (int j = 0; j < kPanelWidth; ++j) {
        const int left = outs - lane_term * 2 - j * kColumns8;  // maybe none
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (n_first + half * 8 >= p.batch) continue;
          T values[2] = {};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (e >= left) continue;
            const float mean = results[j][half * 2 + e];
            if (!isfinite(mean)) rare |= 1u << ((half * kPanelWidth + j) * 2 + e);
            values[e] = result<T>(p, mean, bias_tile[j * kColumns8 + lane_term * 2 + e]);
          }
          put_pair(values, left, pairs,
                   y + (n_first + half * 8) * p.c_out + o_first + j * kColumns8);
        }
      }
      if (rare != 0) put_carefully<T>(p, n_first, o_first, kPanelWidth, rare, cell_sums, y);
    }
    wait_for_batches<0>();
  }
}

}  // namespace convt_reduce::cuda
