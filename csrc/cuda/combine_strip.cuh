// Combine for large batches of few terms by products of warpgroups: as combine_panel.cuh, but for
// so many output channels at a time that a cell sum is taken apart once or twice in all.
#pragma once

#include "cuda/combine.cuh"
#include "cuda/warpgroup.cuh"

namespace convt_reduce::cuda {

constexpr int kStripSteps = 2;  // of a stage
constexpr int kStripTerms = kStripSteps * kStep;
constexpr int kMostStripStages = 32;

struct StripTiles {
  int64_t rows;        // tiles of 64 batch elements
  int64_t row_blocks;  // blocks that share them
  int64_t columns;     // strips of a group's output channels
  int64_t blocks;      // groups * columns * row_blocks
  int64_t steps;       // of depth
  int64_t columns8;    // fragments side by side: group_out / 8, rounded up
};

inline int64_t strip_shared(int64_t steps, int64_t width) {
  return round_up(steps, kStripSteps) * width * static_cast<int64_t>(sizeof(Matrices));
}

template <int kWidth, int kGroups, typename T>
__device__ __forceinline__ void multiply_strips(const CombineArguments& p, const StripTiles& tiles,
                                                const float* cell_sums, const Matrices* folded,
                                                T* y) {
  constexpr int kVectors = sizeof(Matrices) / kVectorBytes;
  // Where there are registers for it, the next stage's sums are taken apart meanwhile.
  constexpr bool kMeanwhile = kGroups < 3;
  // Pieces of a sum and of a weight: small products first.
  constexpr int kProducts[6][2] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
  extern __shared__ __align__(128) float4 shared[];  // the strip [steps][width]
  __shared__ float bias_tile[kWidth * kColumns8];
  __shared__ uint64_t barriers[kMostStripStages];
  const int lane = threadIdx.x % kWarp;
  const int warpgroup = threadIdx.x / kWarpgroup;
  const int lane_term = lane % 4;
  const int lane_row = threadIdx.x % kWarpgroup / kWarp * kRows16 + lane / 4;
  const int steps = static_cast<int>(tiles.steps);
  const int stages = (steps + kStripSteps - 1) / kStripSteps;
  const int depth_left = static_cast<int>(p.depth) - lane_term * 4;
  const int64_t row_stride = p.c_in * p.cells.count();
  const auto zero = static_cast<uint32_t>(p.chunks - 1);  // cell sums that come here are whole
  const unsigned strip = shared_address(shared);
  const unsigned strip_at = matrices_at(strip);
  const unsigned barrier = shared_address(barriers);
  if (threadIdx.x < kMostStripStages) {
    make_barrier(barrier + threadIdx.x * 8, 1);
    finish_barriers();
  }
  let_next_kernel_start();  // stats has waited for all that came before us
  wait_for_previous_kernel();

  unsigned parity = 0;
  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x, parity ^= 1) {
    const int64_t rest = quotient(block, tiles.row_blocks);
    const int64_t row_block = block - rest * tiles.row_blocks;
    const int64_t group = quotient(rest, tiles.columns);
    const int64_t column_begin = (rest - group * tiles.columns) * kWidth;
    const int64_t o_begin = group * p.group_out + column_begin * kColumns8;
    const int outs =
        static_cast<int>(min(p.group_out - column_begin * kColumns8, int64_t{kWidth * kColumns8}));
    const int64_t tile_step = tiles.row_blocks * kGroups;
    const int64_t first_tile = row_block + warpgroup * tiles.row_blocks;

    int64_t load_tile = first_tile;  // what is loaded next, maybe past the last tile
    int load_stage = 0;
    const float* from[2];  // this lane's row, and that 8 below
    const auto turn_to = [&](int64_t tile) {
      const int64_t n = min(tile * kRows64 + lane_row, p.batch - 1);
      from[0] = cell_sums + n * row_stride + group * p.depth + lane_term * 4;
      from[1] = from[0] + (min(n + 8, p.batch - 1) - n) * row_stride;
    };
    float4 sums[kStripSteps][2];
    const auto load = [&] {
#pragma unroll
      for (int s = 0; s < kStripSteps; ++s) {
        const int term = load_stage * kStripTerms + s * kStep;
        const bool exists = term < depth_left;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sums[s][half] = {};
          if (exists) sums[s][half] = *reinterpret_cast<const float4*>(from[half] + term);
        }
      }
      if (++load_stage == stages) {
        load_stage = 0;
        load_tile += tile_step;
        turn_to(load_tile);
      }
    };
    uint32_t pieces[kStripSteps][3][4];
    turn_to(first_tile);

    __syncthreads();  // the strip and the bias before these have been used
    if (threadIdx.x < stages) {
      // Where the strip has one step more than there are, that is the last again: it meets zeros.
      const int64_t across = min(tiles.columns8 - column_begin, int64_t{kWidth});
      const auto bytes = static_cast<unsigned>(across * sizeof(Matrices));
      const unsigned arrival = barrier + threadIdx.x * 8;
      expect_bytes(arrival, bytes * kStripSteps);
      for (int s = 0; s < kStripSteps; ++s) {
        const int step = threadIdx.x * kStripSteps + s;
        copy_bulk(
            strip + step * kWidth * static_cast<unsigned>(sizeof(Matrices)),
            reinterpret_cast<uintptr_t>(
                folded + (group * steps + min(step, steps - 1)) * tiles.columns8 + column_begin),
            bytes, arrival);
      }
    }
    load();
    if (threadIdx.x < outs) bias_tile[threadIdx.x] = bias_of<T>(p, o_begin + threadIdx.x);
    __syncthreads();

    const auto take_next = [&](uint32_t (&to)[kStripSteps][3][4]) {
#pragma unroll
      for (int s = 0; s < kStripSteps; ++s) take_apart(sums[s], to[s]);
      load();
    };
    if constexpr (kMeanwhile) take_next(pieces);

    for (int64_t tile = first_tile; tile < tiles.rows; tile += tile_step) {
      float results[kWidth * 4] = {};
#pragma unroll 1
      for (int stage = 0; stage < stages; ++stage) {
        if constexpr (!kMeanwhile) take_next(pieces);
        if (tile == first_tile) wait_for_bytes(barrier + stage * 8, parity);
        // By a shuffle: so the compiler knows that all lanes have the same.
        const unsigned weights =
            __shfl_sync(0xffffffffu, strip_at + stage * (kStripSteps * kWidth * kVectors), 0);
        float products[kWidth * 4];
        settle(products);
        begin_products();
#pragma unroll
        for (int product = 0; product < 6; ++product) {
#pragma unroll
          for (int s = 0; s < kStripSteps; ++s) {
            multiply_warpgroup(
                products, pieces[s][kProducts[product][0]],
                weights + (s * kWidth * kVectors + kProducts[product][1] * (kVectors / 3)),
                kVectors, product > 0 || s > 0);
          }
        }
        close_products();
        uint32_t next[kStripSteps][3][4];
        if constexpr (kMeanwhile) take_next(next);
        wait_for_products<0>();
        settle(products);
        if constexpr (kMeanwhile) put_pieces(next, zero, pieces);
#pragma unroll
        for (int i = 0; i < kWidth * 4; ++i) results[i] += products[i];
      }

      const bool pairs = p.group_out % 2 == 0;
      const int64_t n_first = tile * kRows64 + lane_row;
      const int64_t o_first = o_begin + lane_term * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t n = n_first + half * 8;
        if (n >= p.batch) continue;
        uint32_t rare = 0;  // a bit for each result that is not finite
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int left = outs - lane_term * 2 - j * kColumns8;  // maybe none
          T values[2] = {};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (e >= left) continue;
            const float mean = results[j * 4 + half * 2 + e];
            if (!isfinite(mean)) rare |= 1u << (j * 2 + e);
            values[e] = result<T>(p, mean, bias_tile[j * kColumns8 + lane_term * 2 + e]);
          }
          put_pair(values, left, pairs, y + n * p.c_out + o_first + j * kColumns8);
        }
        if (rare != 0) put_carefully<T>(p, n, o_first, kWidth, rare, cell_sums, y);
      }
    }
  }
}

// A block has kWidth * 8 output channels, whose folded weights come once. A warpgroup takes 64
// batch elements at a time through all stages.
template <int kWidth, int kGroups, typename T>
__global__ void __launch_bounds__(kGroups* kWarpgroup, 1)
    strip_kernel(const __grid_constant__ CombineArguments p,
                 const __grid_constant__ StripTiles tiles, const float* cell_sums,
                 const Matrices* folded, T* y) {
  if constexpr (has_warpgroup_products()) {
    multiply_strips<kWidth, kGroups>(p, tiles, cell_sums, folded, y);
  } else {
    __trap();  // not launched
  }
}

}  // namespace convt_reduce::cuda
