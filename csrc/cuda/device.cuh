// What the kernels share: element types, 16-byte vectors, programmatic dependent launch, dispatch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cells.h"
#include "cuda/launch.h"
#include "problem.h"

namespace convt_reduce::cuda {

constexpr int kWarp = 32;
constexpr int kVectorBytes = 16;  // the widest load and store of one thread
constexpr int kLineBytes = 128;   // that memory gives at a time
// Dynamic shared memory that any card grants a block unasked, beside some that is static.
constexpr int64_t kSharedPerBlock = 48 * 1024 - 256;

// ---- element types ------------------------------------------------------------------------------

template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using AccumulateOf = typename Accumulate<T>::type;

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T narrow(AccumulateOf<T> value);
template <>
__device__ inline float narrow<float>(float value) {
  return value;
}
template <>
__device__ inline double narrow<double>(double value) {
  return value;
}
template <>
__device__ inline __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// ---- sums ---------------------------------------------------------------------------------------

// Equal numbers that are added one after another err in one direction, by up to a quarter of an eps
// each time. So a thread's values are added by halves, and sums of many keep what they lose.

template <int kBegin, int kCount, int kSize, typename Acc>
__device__ __forceinline__ Acc halves_sum(const Acc (&values)[kSize]) {
  if constexpr (kCount == 1) {
    return values[kBegin];
  } else {
    return halves_sum<kBegin, kCount / 2>(values) +
           halves_sum<kBegin + kCount / 2, kCount - kCount / 2>(values);
  }
}

template <int kSize, typename Acc>
__device__ __forceinline__ Acc halves_sum(const Acc (&values)[kSize]) {
  return halves_sum<0, kSize>(values);
}

// sum + value, with the rounding error of the addition collected in `lost` (Knuth's two-sum).
template <typename Acc>
__device__ inline void add_exactly(Acc& sum, Acc& lost, Acc value) {
  const Acc total = sum + value;
  const Acc added = total - sum;
  lost += (sum - (total - added)) + (value - added);
  sum = total;
}

// An infinite or NaN sum has no use for its `lost`, which is NaN then.
template <typename Acc>
__device__ inline Acc settled(Acc sum, Acc lost) {
  const Acc total = sum + lost;
  return total == total ? total : sum;
}

// `count` values, each `apart` from the next, in the order of additions that all have who may meet
// few chunks of a sum: the results are the same bits.
constexpr int kChunksTogether = 4;

template <typename Acc>
__device__ inline Acc sum_of_few(const Acc* from, int64_t apart, int count) {
  Acc sum = 0;
  for (int first = 0; first < count; first += kChunksTogether) {
    Acc values[kChunksTogether];
#pragma unroll
    for (int i = 0; i < kChunksTogether; ++i) {
      values[i] = first + i < count ? from[(first + i) * apart] : Acc(0);
    }
    sum += halves_sum(values);
  }
  return sum;
}

// ---- 16-byte vectors ----------------------------------------------------------------------------

template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kSize = kVectorBytes / sizeof(T);
  static_assert(kSize * sizeof(T) == kVectorBytes, "a vector is whole elements");
  T at[kSize];
};

// ---- programmatic dependent launch ------------------------------------------------------------

// Lets the next kernel of the stream start; it may not read our results before its own wait.
//
// The first kernel of a call, stats, calls it after its own wait: so the kernels behind it find
// everything done that came before the call, such as the writes of its weights, and may read and
// write what their predecessors in the call do not touch without waiting for these. So they may
// call it at once. A kernel that has not waited by its end must do so then, or it could be taken
// for finished before the one before it is.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before ours has finished and its writes can be seen.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether this code is compiled for GPUs that have products of warpgroups, warpgroup.cuh. Code for
// 9.0 without an a has not.
__device__ constexpr bool has_warpgroup_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return true;
#else
  return false;
#endif
}

// Has memory brought to the second-level cache, from compute capability 9.0 on. Nothing is read: so
// a kernel may ask before its wait, also for what others still write. Both are multiples of 16.
__device__ inline void ask_for_cache(uintptr_t from, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// ---- launches -----------------------------------------------------------------------------------

constexpr int64_t kMaxGrid = 2147483647;  // blocks on grid.x; kernels loop over any more

inline unsigned grid_of(int64_t blocks, int cluster) {
  const int64_t most = kMaxGrid / cluster;
  return static_cast<unsigned>((blocks < most ? blocks : most) * cluster);
}

// From compute capability 9.0 on, each `cluster` blocks that are neighbours on grid.x form a
// cluster.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_grid(void (*kernel)(Parameters...), dim3 grid, int cluster, int threads,
                        size_t shared_bytes, cudaStream_t stream, bool overlap_previous,
                        Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (overlap_previous) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// `cluster` times as many blocks as clusters, as many as kernels loop over.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Parameters...), int64_t clusters, int cluster,
                            int threads, size_t shared_bytes, cudaStream_t stream,
                            bool overlap_previous, Arguments&&... arguments) {
  return launch_grid(kernel, dim3(grid_of(clusters, cluster)), cluster, threads, shared_bytes,
                     stream, overlap_previous, std::forward<Arguments>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
                   cudaStream_t stream, bool overlap_previous, Arguments&&... arguments) {
  return launch_clusters(kernel, blocks, 1, threads, shared_bytes, stream, overlap_previous,
                         std::forward<Arguments>(arguments)...);
}

// What a block may have in dynamic shared memory where it may have `shared_kib` in all: the rest is
// what it has besides, at most.
constexpr int64_t most_shared(int shared_kib) { return int64_t{shared_kib} * 1024 - 1024; }

// Lets a kernel's blocks have as much. The limit is the kernel's and not a call's: it is always the
// same, or another thread could lower it before this one's launch.
template <typename... Parameters>
cudaError_t allow_most_shared(void (*kernel)(Parameters...), int shared_kib) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(most_shared(shared_kib)));
}

template <typename Body>
cudaError_t dispatch(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::kFloat32:
      return body(float{});
    case Dtype::kFloat64:
      return body(double{});
    case Dtype::kFloat16:
      return body(__half{});
    case Dtype::kBFloat16:
      return body(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

CONVT_HD inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t largest_power_of_two(int64_t most) {
  int64_t power = 1;
  while (power * 2 <= most) power *= 2;
  return power;
}
CONVT_HD inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace convt_reduce::cuda
