// Combine for small batches on tensor cores: the warps of a block share the terms of a few results,
// and so have them soon after stats is done.
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

struct SplitTiles {
  int64_t rows;      // tiles of the batch
  int tile_rows;     // batch elements of each
  int64_t columns;   // tiles of a group's output channels
  int64_t blocks;    // groups * columns * rows
  int64_t steps;     // of depth
  int64_t columns8;  // fragments side by side: group_out / 8, rounded up
  int cluster;       // blocks that share the steps of a tile, a cluster
};

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

template <typename Tile, bool kInside>
int64_t split_shared(int cells, int64_t steps) {
  constexpr int64_t kVectors = sizeof(Fragment) / kVectorBytes * Tile::kWidth;
  constexpr int64_t kOfBlock = Tile::kRows * Tile::kColumns / 4;
  return split_parts<Tile, kInside>(cells) + (kInside ? steps * kVectors : kOfBlock);
}

// A lane's four terms of a row, or zeros behind its end: rows and their ends lie on 16 bytes.
__device__ inline float4 load_terms(const float* from, bool exist) {
  return exist ? *reinterpret_cast<const float4*>(from) : float4{};
}

// The same from few chunks that are `apart`, for kTerms of what a thread loads, added as in
// sum_of_few().
template <int kTerms>
__device__ __forceinline__ void load_chunks(const float* const* from, const bool* exist,
                                            int64_t apart, int chunks, float4* sums) {
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
        values[c][i] = load_terms(from[i] + offset, exist[i] && c < left);
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
      fold_weights<kInsideTaps, T>(
          p, covers, group, 0, (steps + cells - 1) / cells, column_begin, columns, tiles.steps,
          reinterpret_cast<float*>(shared),
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
    float results[kHigh][kWidth][4] = {};
    for (int first = rank * kSplitWarps + warp; first < steps; first += warps * kAhead) {
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
      constexpr int kLoads = kHigh * kHalves;  // of a step
      const float* at[kAhead * kLoads];
      bool exist[kAhead * kLoads];
#pragma unroll
      for (int i = 0; i < kAhead * kLoads; ++i) {
        const int term = (first + i / kLoads * warps) * kStep;
        at[i] = from[i / kHalves % kHigh][i % kHalves] + term;
        exist[i] = term + lane % 4 * 4 < depth && (kHalves > 1 || lane / 4 < rows);
      }
      float4 sums[kAhead * kLoads];
      if (!Tile::kMerges || chunks == 1) {
#pragma unroll
        for (int i = 0; i < kAhead * kLoads; ++i) sums[i] = load_terms(at[i], exist[i]);
      } else if constexpr (Tile::kMerges) {
        constexpr int kTerms = kAhead * kLoads < 4 ? kAhead * kLoads : 4;
        static_assert(kAhead * kLoads % kTerms == 0);
#pragma unroll
        for (int i = 0; i < kAhead * kLoads; i += kTerms) {
          load_chunks<kTerms>(at + i, exist + i, p.chunk, chunks, sums + i);
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
    __syncthreads();

    const auto sum_of_warps = [&](int row) {
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
    };
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
    const bool pairs = p.group_out % 2 == 0;
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
      float means[2] = {sum.x, sum.y};
      T values[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!isfinite(means[e]) && e < own_outs) {
          means[e] = careful_mean<T>(p, n_begin + row, own_o + e, cell_sums);
        }
        values[e] = result<T>(p, means[e], bias[e]);
      }
      put_pair(values, own_outs, pairs, y + (n_begin + row) * p.c_out + own_o);
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
