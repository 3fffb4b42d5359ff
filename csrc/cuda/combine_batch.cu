// Combine for large batches: a matrix product of the cell sums with weights that are folded once.
//
//   fold      folded [c_out][depth]
//   multiply  parts [slices][batch][c_out]: a block has kTile x kTile results and one slice of the
//             depth, so that few results still fill the GPU
//   finish    adds the slices in order, and the bias
#include <cmath>

#include "cuda/combine.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kTile = 64;      // results of a block, each way
constexpr int kDepth = 16;     // terms that a block holds in shared memory at a time
constexpr int kPerThread = 4;  // results of a thread, each way
constexpr int kThreads = (kTile / kPerThread) * (kTile / kPerThread);
constexpr int kPadding = 4;  // so that the transposing stores do not meet in one bank
constexpr int64_t kSlice = 512;
static_assert(kTile * kDepth == kPerThread * kThreads, "a thread loads kPerThread of each operand");

template <typename T>
__global__ void fold_kernel(const __grid_constant__ CombineArguments p, AccumulateOf<T>* folded) {
  const int64_t total = p.c_out * p.depth;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t o = quotient(i, p.depth);
    folded[i] = folded_weight<T>(p, Channel(p, o), i - o * p.depth);
  }
}

struct Tiles {
  int64_t batch;  // tiles of the batch
  int64_t out;    // tiles of a group's output channels
  int64_t slices;
  int64_t blocks;  // groups * batch * out * slices
};

// kPerThread neighbouring terms of one row of an operand, as far as row and terms exist.
template <typename Acc, typename Load>
__device__ inline void load_terms(Acc (&to)[kPerThread], bool row_exists, int64_t term,
                                  int64_t term_end, Load&& load) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    to[j] = row_exists && term + j < term_end ? load(term + j) : Acc(0);
  }
}

template <typename Acc>
__global__ void multiply_kernel(const __grid_constant__ CombineArguments p,
                                const __grid_constant__ Tiles tiles, const Acc* cell_sums,
                                const Acc* folded, Acc* parts) {
  __shared__ __align__(16) Acc sums_tile[kDepth][kTile + kPadding];
  __shared__ __align__(16) Acc weights_tile[kDepth][kTile + kPadding];
  constexpr int kAcross = kTile / kPerThread;
  const int row = threadIdx.x / kAcross;         // of results: kPerThread batch elements,
  const int column = threadIdx.x % kAcross;      // by kPerThread output channels
  constexpr int kLoaders = kDepth / kPerThread;  // threads that load one row's terms
  const int load_row = threadIdx.x / kLoaders;
  const int load_term = threadIdx.x % kLoaders * kPerThread;

  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x) {
    int64_t rest = quotient(block, tiles.slices);
    const int64_t slice = block - rest * tiles.slices;
    int64_t next = quotient(rest, tiles.out);
    const int64_t o_begin = (rest - next * tiles.out) * kTile;
    const int64_t group = quotient(next, tiles.batch);
    const int64_t n_begin = (next - group * tiles.batch) * kTile;
    const int64_t term_begin = slice * kSlice;
    const int64_t term_end = min(term_begin + kSlice, p.depth);

    const bool n_exists = n_begin + load_row < p.batch;
    const bool o_exists = o_begin + load_row < p.group_out;
    const int64_t sums_row = ((n_begin + load_row) * p.c_in + group * p.group_in) * p.cells.count();
    const Acc* weights_row = folded + (group * p.group_out + o_begin + load_row) * p.depth;
    const auto sum_at = [&](int64_t term) { return cell_sums[sums_row + term]; };
    const auto weight_at = [&](int64_t term) { return weights_row[term]; };

    Acc results[kPerThread][kPerThread] = {};
    Acc next_sums[kPerThread];
    Acc next_weights[kPerThread];
    load_terms(next_sums, n_exists, term_begin + load_term, term_end, sum_at);
    load_terms(next_weights, o_exists, term_begin + load_term, term_end, weight_at);
    for (int64_t term = term_begin; term < term_end; term += kDepth) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        sums_tile[load_term + j][load_row] = next_sums[j];
        weights_tile[load_term + j][load_row] = next_weights[j];
      }
      __syncthreads();
      load_terms(next_sums, n_exists, term + kDepth + load_term, term_end, sum_at);
      load_terms(next_weights, o_exists, term + kDepth + load_term, term_end, weight_at);
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        Acc a[kPerThread];
        Acc b[kPerThread];
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) a[i] = sums_tile[k][row * kPerThread + i];
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) b[j] = weights_tile[k][column * kPerThread + j];
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
          for (int j = 0; j < kPerThread; ++j) results[i][j] += a[i] * b[j];
        }
      }
    }
    __syncthreads();
    for (int i = 0; i < kPerThread; ++i) {
      for (int j = 0; j < kPerThread; ++j) {
        const int64_t n = n_begin + row * kPerThread + i;
        const int64_t o = o_begin + column * kPerThread + j;
        if (n >= p.batch || o >= p.group_out) continue;
        parts[(slice * p.batch + n) * p.c_out + group * p.group_out + o] = results[i][j];
      }
    }
  }
}

template <typename T>
__global__ void finish_kernel(const __grid_constant__ CombineArguments p, int64_t slices,
                              const AccumulateOf<T>* cell_sums, const AccumulateOf<T>* parts,
                              T* y) {
  using Acc = AccumulateOf<T>;
  const int64_t total = p.batch * p.c_out;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x) {
    Acc mean = 0;
    for (int64_t slice = 0; slice < slices; ++slice) mean += parts[slice * total + i];
    const int64_t n = quotient(i, p.c_out);
    const int64_t o = i - n * p.c_out;
    if (!isfinite(mean)) {
      const Channel channel(p, o);
      const int64_t begin = (n * p.c_in + channel.c_begin) * p.cells.count();
      mean = 0;
      for (int64_t term = 0; term < p.depth; ++term) {
        mean += careful_term<T>(p, channel, term, cell_sums[begin + term]);
      }
    }
    y[i] = result<T>(p, o, mean);
  }
}

}  // namespace

int64_t combine_batch_scratch(const Problem& problem, const Cells& cells) {
  const int64_t depth = problem.c_in / problem.groups * cells.count();
  return problem.c_out * depth + ceil_div(depth, kSlice) * problem.batch * problem.c_out;
}

cudaError_t launch_combine_batch(const CombineArguments& p, Dtype dtype, const Queue& queue,
                                 const void* cell_sums, void* scratch, void* y) {
  Tiles tiles;
  tiles.batch = ceil_div(p.batch, kTile);
  tiles.out = ceil_div(p.group_out, kTile);
  tiles.slices = ceil_div(p.depth, kSlice);
  tiles.blocks = p.c_out / p.group_out * tiles.batch * tiles.out * tiles.slices;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    using Acc = AccumulateOf<T>;
    const Acc* sums = static_cast<const Acc*>(cell_sums);
    Acc* folded = static_cast<Acc*>(scratch);
    Acc* parts = folded + p.c_out * p.depth;
    cudaError_t error = launch(&fold_kernel<T>, ceil_div(p.c_out * p.depth, kThreads), kThreads, 0,
                               queue.stream, false, p, folded);
    if (error != cudaSuccess) return error;
    error = launch(&multiply_kernel<Acc>, tiles.blocks, kThreads, 0, queue.stream, false, p, tiles,
                   sums, static_cast<const Acc*>(folded), parts);
    if (error != cudaSuccess) return error;
    return launch(&finish_kernel<T>, ceil_div(p.batch * p.c_out, kThreads), kThreads, 0,
                  queue.stream, false, p, tiles.slices, sums, static_cast<const Acc*>(parts),
                  static_cast<T*>(y));
  });
}

}  // namespace convt_reduce::cuda
