// Combine for large batches of few terms on tensor cores: folded weights stay in shared memory.
#pragma once

#include "cuda/combine.cuh"
#include "cuda/pieces.cuh"
#include "cuda/staging.cuh"

namespace convt_reduce::cuda {

constexpr int kPanelThreads = 512;
constexpr int kPanelWarps = kPanelThreads / kWarp;
constexpr int kPanelWidth = 4;   // fragments side by side
constexpr int kPanelSteps = 2;   // of a stage
constexpr int kPanelStages = 3;  // of a warp's cell sums that are there or on their way
constexpr int kPanelTerms = kPanelSteps * kStep;

struct PanelTiles {
  int64_t rows;        // tiles of 16 batch elements
  int64_t row_blocks;  // blocks that share them
  int64_t columns;     // panels of a group's output channels
  int64_t blocks;      // groups * columns * row_blocks
  int64_t steps;       // of depth
  int64_t columns8;    // fragments side by side: group_out / 8, rounded up
};

inline int64_t panel_shared(int64_t steps) {
  return round_up(steps, kPanelSteps) * kPanelWidth * static_cast<int64_t>(sizeof(Fragment)) +
         int64_t{kPanelWarps} * kPanelStages * kRows16 * kPanelTerms *
             static_cast<int64_t>(sizeof(float));
}

// A block has kPanelWidth * 8 output channels, whose folded weights come once. A warp takes 16
// batch elements at a time through all stages, and copies for itself what it will multiply, some
// stages ahead, so that warps wait for each other only at the start.
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
  constexpr int kVectors = sizeof(Fragment) / kVectorBytes;
  constexpr int kStepVectors = kPanelWidth * kVectors;
  constexpr int kStageVectors = kPanelSteps * kStepVectors;
  constexpr int kRowVectors = kPanelTerms / 4;         // of a row's cell sums in a stage
  constexpr int kRowsTogether = kWarp / kRowVectors;   // that a warp copies at a time
  constexpr int kLoads = kRows16 / kRowsTogether;      // copies of a stage
  constexpr int kRingVectors = kRows16 * kRowVectors;  // of a stage
  static_assert(kRowVectors == 8 && kRowsTogether % 2 == 0, "rows fill the banks");
  extern __shared__ float4 shared[];  // the panel [steps][width], and rings [warps][stages][rows]
  __shared__ float bias_tile[kPanelWidth * kColumns8];
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int lane_row = lane / 4;
  const int lane_term = lane % 4;
  const int load_row = lane / kRowVectors;
  const int load_at = lane % kRowVectors;
  const int steps = static_cast<int>(tiles.steps);
  const int stages = (steps + kPanelSteps - 1) / kPanelSteps;
  const int depth_left = static_cast<int>(p.depth) - load_at * 4;
  const int64_t row_stride = p.c_in * p.cells.count();
  const Fragment* const panel = reinterpret_cast<const Fragment*>(shared);
  // Odd rows have the halves of their 128 bytes exchanged, or a row and the next, of which the
  // same half is read at a time, would meet in the same banks.
  float4* const ring = shared + stages * kStageVectors + warp * (kPanelStages * kRingVectors);
  float4* const load_to = ring + load_row * kRowVectors + (load_at ^ load_row % 2 * 4);
  const float4* const row_sums = ring + lane_row * kRowVectors;
  const int row_at = lane_term ^ lane_row % 2 * 4;
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
    const int across = (outs + kColumns8 - 1) / kColumns8;
    const int64_t tile_step = tiles.row_blocks * kPanelWarps;
    const int64_t first_tile = row_block + warp * tiles.row_blocks;

    int64_t load_tile = first_tile;  // what is loaded next
    int load_term = 0;
    int load_stage = 0;
    const float* from;
    int rows_left;  // of the tile, from load_row on
    const auto turn_to = [&](int64_t tile) {
      const int64_t n = tile * kRows16 + load_row;
      from = cell_sums + n * row_stride + group * p.depth + load_at * 4;
      rows_left = static_cast<int>(min(p.batch - n, int64_t{kRows16}));
    };
    const auto load = [&] {
      if (load_tile < tiles.rows) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const bool exists = load_term < depth_left && i * kRowsTogether < rows_left;
          copy_async<16>(load_to + load_stage * kRingVectors + i * kWarp,
                         exists ? from + i * kRowsTogether * row_stride : cell_sums,
                         exists ? kVectorBytes : 0);
        }
        load_stage = load_stage + 1 == kPanelStages ? 0 : load_stage + 1;
        load_term += kPanelTerms;
        from += kPanelTerms;
        if (load_term >= stages * kPanelTerms) {
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
    // The panel comes in parts, a batch each, before which no warp needs more of it. Where it has
    // one step more than there are, that is the last again: it meets zeros.
    const Fragment* const weights = folded + group * tiles.steps * tiles.columns8 + column_begin;
#pragma unroll 1
    for (int part = 0; part < kAhead; ++part) {
      const int begin = (part * stages + kAhead - 1) / kAhead * kStageVectors;
      const int end = ((part + 1) * stages + kAhead - 1) / kAhead * kStageVectors;
      for (int i = begin + threadIdx.x; i < end; i += kPanelThreads) {
        const int step = i / kStepVectors;
        const int column = (i - step * kStepVectors) / kVectors;
        if (column < across) {
          const Fragment& fragment = weights[min(step, steps - 1) * tiles.columns8 + column];
          copy_async<16>(shared + i, reinterpret_cast<const uint4*>(&fragment) + i % kVectors, 16);
        }
      }
      load();
    }
    const auto wait_for_stage = [&](bool whole_block) {
      wait_for_batches<kAhead - 1>();
      if (whole_block) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    };
    // A warp without a tile goes through the first one all the same, with nothing in it: the block
    // meets there.
    int room = 0;
    for (int64_t tile = first_tile; tile == first_tile || tile < tiles.rows; tile += tile_step) {
      float results[kPanelWidth][4] = {};
#pragma unroll 1
      for (int stage = 0; stage < stages; ++stage) {
        wait_for_stage(tile == first_tile && stage < kAhead);
        load();
        uint32_t pieces[kPanelSteps][3][4];
        LaneWeights fragments[kPanelSteps][kPanelWidth];
#pragma unroll
        for (int s = 0; s < kPanelSteps; ++s) {
          const float4* const at = row_sums + room * kRingVectors + (row_at ^ s * 4);
          const float4 sums[2] = {at[0], at[kRingVectors / 2]};
          take_apart(sums, pieces[s]);
#pragma unroll
          for (int j = 0; j < kPanelWidth; ++j) {
            fragments[s][j] = LaneWeights(panel[(stage * kPanelSteps + s) * kPanelWidth + j], lane);
          }
        }
        room = room + 1 == kPanelStages ? 0 : room + 1;
        float products[kPanelWidth][4];
        multiply_step<kPanelWidth, kPanelSteps>(
            [&](int i) -> const auto& { return pieces[i / kPanelWidth]; },
            [&](int i) -> const auto& { return fragments[i / kPanelWidth][i % kPanelWidth]; },
            products);
#pragma unroll
        for (int j = 0; j < kPanelWidth; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) results[j][e] += products[j][e];
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
