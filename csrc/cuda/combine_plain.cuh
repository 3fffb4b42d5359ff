// The matrix product of combine on ordinary cores: for float64, and for GPUs without tensor
// products of bfloat16. Folded weights are [depth][c_out].
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/combine.cuh"
#include "cuda/pieces.cuh"

namespace convt_reduce::cuda {
namespace plain {

// Terms of a slice: no fewer, so that parts stay small beside the operands; no more, so that a
// block is done soon; and between them as many as give about this many blocks.
constexpr int64_t kLeastSlice = 128;
constexpr int64_t kMostSlice = 512;
constexpr int64_t kWantedBlocks = 512;

constexpr int kRows = 64;       // batch elements of a block
constexpr int kColumns = 64;    // output channels of a block
constexpr int kDepth = 16;      // terms that a block holds in shared memory at a time
constexpr int kThreadRows = 8;  // results of a thread
constexpr int kThreadColumns = 4;
constexpr int kAcross = kColumns / kThreadColumns;  // threads side by side
constexpr int kThreads = kRows / kThreadRows * kAcross;
constexpr int kPadding = 4;  // so that the transposing stores do not meet in one bank
constexpr int kFoldThreads = 256;
constexpr int kSumLoads = kRows * kDepth / kThreads;  // of a thread, for one step in depth
constexpr int kWeightLoads = kColumns * kDepth / kThreads;
static_assert(kDepth % kSumLoads == 0 && kThreads % kColumns == 0, "loads come out even");

// A thread per input channel and output channel, neighbouring ones with neighbouring output
// channels, whose weights are neighbours in memory.
template <typename T>
__global__ void fold_kernel(const __grid_constant__ CombineArguments p, AccumulateOf<T>* folded) {
  const int64_t total = p.c_out * p.group_in;
  const int64_t cells = p.cells.count();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t c = quotient(i, p.c_out);
    const int64_t o = i - c * p.c_out;
    const Channel channel(p, o);
    for (int64_t cell = 0; cell < cells; ++cell) {
      const int64_t term = c * cells + cell;
      folded[term * p.c_out + o] = folded_weight<T>(p, channel, term);
    }
  }
  wait_for_previous_kernel();
}

struct Tiles {
  int64_t batch;  // tiles of the batch
  int64_t out;    // tiles of a group's output channels
  int64_t slice;  // terms
  int64_t slices;
  int64_t blocks;  // groups * batch * out * slices
};

template <typename T>
__device__ inline void put_result(const CombineArguments& p, int64_t n, int64_t o,
                                  const AccumulateOf<T>* cell_sums, AccumulateOf<T> mean, T* y) {
  if (!isfinite(mean)) mean = careful_mean<T>(p, n, o, cell_sums);
  y[n * p.c_out + o] = result<T>(p, mean, bias_of<T>(p, o));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    multiply_kernel(const __grid_constant__ CombineArguments p, const __grid_constant__ Tiles tiles,
                    const AccumulateOf<T>* cell_sums, const AccumulateOf<T>* folded,
                    AccumulateOf<T>* parts, T* y) {
  using Acc = AccumulateOf<T>;
  if constexpr (std::is_same_v<Acc, float> && has_tensor_cores()) {
    __trap();  // not launched
    return;
  }
  __shared__ __align__(16) Acc sums_tile[kDepth][kRows + kPadding];
  __shared__ __align__(16) Acc weights_tile[kDepth][kColumns];
  const int row = threadIdx.x / kAcross * kThreadRows;
  const int column = threadIdx.x % kAcross * kThreadColumns;
  // What a thread loads: some terms of one batch element; one output channel of some terms.
  const int sum_row = threadIdx.x * kSumLoads / kDepth;
  const int sum_term = threadIdx.x * kSumLoads % kDepth;
  const int weight_column = threadIdx.x % kColumns;
  const int weight_term = threadIdx.x / kColumns;
  wait_for_previous_kernel();
  let_next_kernel_start();

  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x) {
    int64_t rest = quotient(block, tiles.slices);
    const int64_t slice = block - rest * tiles.slices;
    int64_t next = quotient(rest, tiles.out);
    const int64_t o_begin = (rest - next * tiles.out) * kColumns;
    const int64_t group = quotient(next, tiles.batch);
    const int64_t n_begin = (next - group * tiles.batch) * kRows;
    const int64_t term_begin = slice * tiles.slice;
    const int64_t term_end = min(term_begin + tiles.slice, p.depth);

    const bool n_exists = n_begin + sum_row < p.batch;
    const bool o_exists = o_begin + weight_column < p.group_out;
    const Acc* sums_from = cell_sums +
                           ((n_begin + sum_row) * p.c_in + group * p.group_in) * p.cells.count() +
                           sum_term;
    const Acc* weights_from =
        folded + weight_term * p.c_out + group * p.group_out + o_begin + weight_column;
    Acc next_sums[kSumLoads];
    Acc next_weights[kWeightLoads];
    const auto load = [&](int64_t term) {
#pragma unroll
      for (int j = 0; j < kSumLoads; ++j) {
        const bool exists = n_exists && term + sum_term + j < term_end;
        next_sums[j] = exists ? sums_from[term + j] : Acc(0);
      }
#pragma unroll
      for (int j = 0; j < kWeightLoads; ++j) {
        const int64_t of = term + j * (kThreads / kColumns);
        const bool exists = o_exists && of + weight_term < term_end;
        next_weights[j] = exists ? weights_from[of * p.c_out] : Acc(0);
      }
    };

    Acc results[kThreadRows][kThreadColumns] = {};
    load(term_begin);
    for (int64_t term = term_begin; term < term_end; term += kDepth) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kSumLoads; ++j) sums_tile[sum_term + j][sum_row] = next_sums[j];
#pragma unroll
      for (int j = 0; j < kWeightLoads; ++j) {
        weights_tile[weight_term + j * (kThreads / kColumns)][weight_column] = next_weights[j];
      }
      __syncthreads();
      load(term + kDepth);
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        Acc a[kThreadRows];
        Acc b[kThreadColumns];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) a[i] = sums_tile[k][row + i];
#pragma unroll
        for (int j = 0; j < kThreadColumns; ++j) b[j] = weights_tile[k][column + j];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
          for (int j = 0; j < kThreadColumns; ++j) results[i][j] += a[i] * b[j];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadColumns; ++j) {
        const int64_t n = n_begin + row + i;
        const int64_t of_group = o_begin + column + j;
        if (n >= p.batch || of_group >= p.group_out) continue;
        const int64_t o = group * p.group_out + of_group;
        if (tiles.slices == 1) {
          put_result<T>(p, n, o, cell_sums, results[i][j], y);
        } else {
          parts[(slice * p.batch + n) * p.c_out + o] = results[i][j];
        }
      }
    }
  }
}

inline Tiles plan(int64_t batch, int64_t groups, int64_t group_out, int64_t depth) {
  Tiles tiles;
  tiles.batch = ceil_div(batch, kRows);
  tiles.out = ceil_div(group_out, kColumns);
  const int64_t whole = groups * tiles.batch * tiles.out;  // blocks, if there were no slices
  const int64_t of_alone = groups * tiles.out;             // the same for a batch of one
  const int64_t wanted = ceil_div(kWantedBlocks, batch <= kLargeBatch ? of_alone : whole);
  tiles.slice =
      round_up(std::clamp(ceil_div(depth, wanted), kLeastSlice, kMostSlice), int64_t{kDepth});
  tiles.slices = ceil_div(depth, tiles.slice);
  tiles.blocks = whole * tiles.slices;
  return tiles;
}

}  // namespace plain
}  // namespace convt_reduce::cuda
