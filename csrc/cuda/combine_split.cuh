// Combine for small batches on tensor cores: the warps of a block share the terms of a few results,
// and so have them soon after stats is done.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/combine_split_tile.cuh"

namespace convt_reduce::cuda {

struct SplitTiles {
  int64_t rows;      // tiles of the batch
  int tile_rows;     // batch elements of each
  int64_t columns;   // tiles of a group's output channels
  int64_t blocks;    // groups * columns * rows
  int64_t steps;     // of depth
  int64_t columns8;  // fragments side by side: group_out / 8, rounded up
  int cluster;       // blocks that share the steps of a tile, a cluster
};

template <typename Tile, bool kInside>
int64_t split_shared(int cells, int64_t steps) {
  constexpr int64_t kVectors = sizeof(Fragment) / kVectorBytes * Tile::kWidth;
  constexpr int64_t kOfBlock = Tile::kRows * Tile::kColumns / 4;
  return split_parts<Tile, kInside>(cells) + (kInside ? steps * kVectors : kOfBlock);
}

// kInside: the block folds its weights itself, while stats still reads; else they are in `folded`.
template <typename Tile, bool kInside, typename T>
__global__ void __launch_bounds__(kSplitThreads, 2)
    split_kernel(const __grid_constant__ CombineArguments p,
                 const __grid_constant__ SplitTiles tiles, const __grid_constant__ Covers covers,
                 const float* cell_sums, const Fragment* folded, T* y) {
  constexpr int kHigh = Tile::kHigh;
  constexpr int kWidth = Tile::kWidth;
  constexpr int kAhead = Tile::kAhead;
  constexpr int kHalves = Tile::kHalves;
  constexpr int kPairs = Tile::kColumns / 2;  // of a row
  static_assert(kSplitThreads % kPairs == 0, "a thread's results are of the same channels");
  if constexpr (!has_tensor_cores()) {
    __trap();  // not launched
    return;
  }
  extern __shared__ float4 shared[];
  float4* const parts = shared;  // [warps][kHigh][kWidth][lanes], where folding was before
  float2* const of_block =       // [rows][pairs], the sums of those: what the cluster reads
      reinterpret_cast<float2*>(parts + kSplitThreads * kHigh * kWidth);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int steps = static_cast<int>(tiles.steps);
  const int cluster = kInside ? 1 : tiles.cluster;
  const int rank = kInside ? 0 : static_cast<int>(blockIdx.x % tiles.cluster);
  const int warps = cluster * kSplitWarps;  // that share the steps
  const int depth = static_cast<int>(p.depth);
  const int chunks = static_cast<int>(p.chunks);
  const int64_t row_stride = p.c_in * p.cells.count();
  if (!kInside) let_next_kernel_start();  // stats has waited for all that came before us
  bool waited = false;

  for (int64_t block = blockIdx.x / cluster; block < tiles.blocks; block += gridDim.x / cluster) {
    const int64_t rest = quotient(block, tiles.rows);
    const int64_t n_begin = (block - rest * tiles.rows) * tiles.tile_rows;
    const int64_t group = quotient(rest, tiles.columns);
    const int64_t column_begin = (rest - group * tiles.columns) * kWidth;
    const int64_t o_begin = group * p.group_out + column_begin * kColumns8;
    const int outs =
        static_cast<int>(min(p.group_out - column_begin * kColumns8, int64_t{Tile::kColumns}));
    const int columns = static_cast<int>(min(tiles.columns8 - column_begin, int64_t{kWidth}));
    const int rows = static_cast<int>(min(p.batch - n_begin, int64_t{tiles.tile_rows}));

    // Of the two neighbouring channels whose results this thread will write.
    const int own = threadIdx.x % kPairs;
    const int64_t own_o = o_begin + own * 2;
    const int own_outs = outs - own * 2;  // maybe none
    const float bias[2] = {own_outs > 0 ? bias_of<T>(p, own_o) : 0.0f,
                           own_outs > 1 ? bias_of<T>(p, own_o + 1) : 0.0f};

    const Fragment* fragments = folded;
    int64_t step_apart = tiles.columns8;
    if constexpr (kInside) {
      const int cells = static_cast<int>(p.cells.count());
      Fragment* const panel =
          reinterpret_cast<Fragment*>(shared + split_parts<Tile, kInside>(cells));
      fold_weights<kInsideTaps, true, T>(
          p, covers, BlockTeams{}, FoldLoads<kInsideTaps>(p), group, 0, (steps + cells - 1) / cells,
          column_begin, columns, tiles.steps, reinterpret_cast<float*>(shared),
          [&](int step, int column) -> Fragment& { return panel[step * kWidth + column]; });
      fragments = panel;
      step_apart = kWidth;
    } else {
      fragments += group * tiles.steps * tiles.columns8 + column_begin;
    }
    const float* from[kHigh][kHalves];
#pragma unroll
    for (int i = 0; i < kHigh; ++i) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int row = min(i * kRows16 + half * 8 + lane / 4, rows - 1);
        from[i][half] = cell_sums + (n_begin + row) * row_stride + group * p.depth + lane % 4 * 4;
      }
    }
    if (!waited) {
      wait_for_previous_kernel();
      if (kInside) let_next_kernel_start();
    }
    waited = true;
    const auto load_sums = [&](int first, float4(&sums)[kAhead* Tile::kLoads]) {
      constexpr int kLoads = Tile::kLoads;
      const auto term_of = [&](int i) { return (first + i / kLoads * warps) * kStep; };
      const auto at = [&](int i) { return from[i / kHalves % kHigh][i % kHalves] + term_of(i); };
      const auto exists = [&](int i) {
        return term_of(i) + lane % 4 * 4 < depth && (kHalves > 1 || lane / 4 < rows);
      };
      if (!Tile::kMerges || chunks == 1) {
#pragma unroll
        for (int i = 0; i < kAhead * kLoads; ++i) sums[i] = load_terms(at(i), exists(i));
      } else if constexpr (Tile::kMerges) {
        constexpr int kTerms = kAhead * kLoads < 4 ? kAhead * kLoads : 4;
        static_assert(kAhead * kLoads % kTerms == 0);
#pragma unroll
        for (int i = 0; i < kAhead * kLoads; i += kTerms) {
          load_chunks<kTerms>([&](int j) { return at(i + j); },
                              [&](int j) { return exists(i + j); }, p.chunk, chunks, sums + i);
        }
      }
    };
    multiply_steps<Tile>(rank * kSplitWarps + warp, warps, steps, fragments, step_apart, columns,
                         load_sums, parts);
    __syncthreads();

    const auto sum_of_warps = [&](int row) { return warps_sum<Tile>(parts, row, own); };
    int first_row = threadIdx.x / kPairs;
    int row_step = kSplitThreads / kPairs;
    if (cluster > 1) {
      for (int row = first_row; row < rows; row += row_step) {
        of_block[row * kPairs + own] = sum_of_warps(row);
      }
      meet_cluster();
      first_row = first_row * cluster + rank;
      row_step *= cluster;
    }
    for (int row = first_row; row < rows; row += row_step) {
      float2 sum = {};
      if (cluster > 1) {
        for (int r = 0; r < cluster; ++r) {
          const float2 v = load_of_cluster(of_block + row * kPairs + own, r);
          sum.x += v.x;
          sum.y += v.y;
        }
      } else {
        sum = sum_of_warps(row);
      }
      put_means<T>(p, sum, bias, own_o, own_outs,
                   cell_sums + (n_begin + row) * row_stride + group * p.depth,
                   y + (n_begin + row) * p.c_out + own_o);
    }
    if (cluster > 1) {
      meet_cluster();  // others may still read what is ours
    } else {
      __syncthreads();
    }
  }
  if (!waited) wait_for_previous_kernel();
}

}  // namespace convt_reduce::cuda
