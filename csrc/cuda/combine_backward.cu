// Combine's derivative: from the result's gradient those of the tap sums, the weight and the bias.
//
//   tap_grads   [n][c][tap]   = sum over o of  scale * grad[n][o] * weight[c][o][tap]
//   grad_weight [c][o][tap]   = sum over n of  scale * grad[n][o] * tap_sums[n][c][tap]
//   grad_bias   [o]           = multiplier * sum over n of  grad[n][o]
//
// One kernel, because for the usual sizes each of these takes less time than a launch: a block has
// 32 neighbouring elements of one of the three, an element per lane (of tap_grads those of up to 8
// batch elements, which meet one weight), and its warps share the terms
// of the sums out among them. Large products are left to torch's matrix product, by the caller.
#include <algorithm>

#include "cuda/device.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 8;  // batch elements of a block's tap gradients, which meet one weight

struct Arguments {
  CombineBackward tensors;
  int64_t batch;
  int64_t c_in;
  int64_t c_out;
  int64_t group_in;
  int64_t group_out;
  int64_t taps;
  int64_t kernel1;  // taps of the last two axes
  int64_t kernel2;
  int64_t tap_tiles;  // of 32 tap gradients of one batch element
  int64_t tap_blocks;
  int64_t weight_blocks;
  int64_t bias_blocks;
  double multiplier;
};

// A warp's share of `count` terms: a stretch, so that it reads neighbours in memory.
struct Share {
  int64_t begin;
  int64_t end;
  __device__ explicit Share(int64_t count) {
    const int64_t each = ceil_div(count, kWarps);
    begin = min(count, each * (threadIdx.x / kWarp));
    end = min(count, begin + each);
  }
};

template <typename Acc, int kCount>
struct Partial {
  Acc sums[kWarps][kCount][kWarp];

  // The sum of the block's partial sums of one element.
  __device__ Acc total(int row, int lane) const {
    Acc of[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of[w] = sums[w][row][lane];
    return halves_sum(of);
  }
};

template <typename T>
__device__ inline AccumulateOf<T> grad_at(const CombineBackward& t, int64_t n, int64_t o) {
  return widen(static_cast<const T*>(t.grad)[n * t.grad_stride_n + o * t.grad_stride_c]);
}

// Each lane's term(0) .. term(count - 1), shared out among the warps: the sum is partial.total(0,
// lane) then.
template <typename Acc, typename Term>
__device__ inline void add_terms(int64_t count, Partial<Acc, kRows>& partial, Term&& term) {
  const Share share(count);
  Acc sum = 0;
#pragma unroll 4
  for (int64_t i = share.begin; i < share.end; ++i) sum += term(i);
  partial.sums[threadIdx.x / kWarp][0][threadIdx.x % kWarp] = sum;
  __syncthreads();
}

template <typename T>
__device__ void tap_grads_tile(const Arguments& p, int64_t block,
                               Partial<AccumulateOf<T>, kRows>& partial) {
  using Acc = AccumulateOf<T>;
  const CombineBackward& t = p.tensors;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t n_tile = quotient(block, p.tap_tiles);
  const int64_t n_begin = n_tile * kRows;
  const int64_t columns = p.c_in * p.taps;
  const int64_t column = (block - n_tile * p.tap_tiles) * kWarp + lane;
  // Lanes past the end repeat the last element, and rows past it the last row; nobody keeps those.
  const int64_t of = min(column, columns - 1);
  const int64_t c = quotient(of, p.taps);
  const int64_t tap = of - c * p.taps;
  const int64_t t01 = quotient(tap, p.kernel2);
  const int64_t t0 = quotient(t01, p.kernel1);
  const T* weight = static_cast<const T*>(t.weight.data) + c * t.weight.stride_c_in +
                    t0 * t.weight.stride[0] + (t01 - t0 * p.kernel1) * t.weight.stride[1] +
                    (tap - t01 * p.kernel2) * t.weight.stride[2];
  const int64_t o_begin = quotient(c, p.group_in) * p.group_out;
  const Acc scale = static_cast<Acc>(t.scale);
  const Share share(p.group_out);
  Acc sums[kRows] = {};
#pragma unroll 4
  for (int64_t o = share.begin; o < share.end; ++o) {
    const Acc w = widen(weight[o * t.weight.stride_c_out]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i] += scale * grad_at<T>(t, min(n_begin + i, p.batch - 1), o_begin + o) * w;
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) partial.sums[warp][i][lane] = sums[i];
  __syncthreads();
  for (int i = warp; i < kRows && n_begin + i < p.batch; i += kWarps) {
    if (column >= columns) break;
    static_cast<Acc*>(t.tap_grads)[(n_begin + i) * columns + column] = partial.total(i, lane);
  }
}

template <typename T>
__device__ void grad_weight_tile(const Arguments& p, int64_t block,
                                 Partial<AccumulateOf<T>, kRows>& partial) {
  using Acc = AccumulateOf<T>;
  const CombineBackward& t = p.tensors;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t count = p.c_in * p.group_out * p.taps;
  const int64_t element = block * kWarp + lane;  // as they lie in memory
  const int64_t of = min(element, count - 1);
  const int64_t outer = quotient(of, t.channels_last ? p.group_out : p.taps);
  const int64_t inner = of - outer * (t.channels_last ? p.group_out : p.taps);
  const int64_t c = quotient(outer, t.channels_last ? p.taps : p.group_out);
  const int64_t middle = outer - c * (t.channels_last ? p.taps : p.group_out);
  const int64_t tap = t.channels_last ? middle : inner;
  const int64_t of_group = t.channels_last ? inner : middle;
  const int64_t o = quotient(c, p.group_in) * p.group_out + of_group;
  const Acc* tap_sums = static_cast<const Acc*>(t.tap_sums) + c * p.taps + tap;
  const Acc scale = static_cast<Acc>(t.scale);
  add_terms(p.batch, partial,
            [&](int64_t n) { return scale * grad_at<T>(t, n, o) * tap_sums[n * p.c_in * p.taps]; });
  if (warp == 0 && element < count) {
    static_cast<T*>(t.grad_weight)[element] = narrow<T>(partial.total(0, lane));
  }
}

template <typename T>
__device__ void grad_bias_tile(const Arguments& p, int64_t block,
                               Partial<AccumulateOf<T>, kRows>& partial) {
  using Acc = AccumulateOf<T>;
  const CombineBackward& t = p.tensors;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t o = block * kWarp + lane;
  add_terms(p.batch, partial, [&](int64_t n) { return grad_at<T>(t, n, min(o, p.c_out - 1)); });
  if (warp == 0 && o < p.c_out) {
    static_cast<T*>(t.grad_bias)[o] =
        narrow<T>(static_cast<Acc>(p.multiplier) * partial.total(0, lane));
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp)
    combine_backward_kernel(const __grid_constant__ Arguments p) {
  __shared__ Partial<AccumulateOf<T>, kRows> partial;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t blocks = p.tap_blocks + p.weight_blocks + p.bias_blocks;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    if (block < p.tap_blocks) {
      tap_grads_tile<T>(p, block, partial);
    } else if (block < p.tap_blocks + p.weight_blocks) {
      grad_weight_tile<T>(p, block - p.tap_blocks, partial);
    } else {
      grad_bias_tile<T>(p, block - p.tap_blocks - p.weight_blocks, partial);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_combine_backward(const Problem& problem, const CombineBackward& tensors,
                                    Dtype dtype, const Queue& queue) {
  Arguments p;
  p.tensors = tensors;
  p.batch = problem.batch;
  p.c_in = problem.c_in;
  p.c_out = problem.c_out;
  p.group_in = problem.c_in / problem.groups;
  p.group_out = problem.c_out / problem.groups;
  p.taps = problem.taps();
  p.kernel1 = problem.axis[1].kernel;
  p.kernel2 = problem.axis[2].kernel;
  p.tap_tiles = ceil_div(p.c_in * p.taps, kWarp);
  p.tap_blocks = tensors.tap_grads == nullptr ? 0 : p.tap_tiles * ceil_div(p.batch, kRows);
  p.weight_blocks =
      tensors.grad_weight == nullptr ? 0 : ceil_div(p.c_in * p.group_out * p.taps, kWarp);
  p.bias_blocks = tensors.grad_bias == nullptr ? 0 : ceil_div(p.c_out, kWarp);
  p.multiplier = problem.multiplier;
  const int64_t blocks = p.tap_blocks + p.weight_blocks + p.bias_blocks;
  if (blocks == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto element) {
    return launch(&combine_backward_kernel<decltype(element)>, blocks, kWarps * kWarp, 0,
                  queue.stream, queue.overlaps, p);
  });
}

}  // namespace convt_reduce::cuda
