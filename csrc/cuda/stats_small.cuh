// Stats for small planes whose channels lie one behind the other: a thread per plane.
//
// A block copies its planes to shared memory as they lie, 16 bytes at a time where it can, and then
// every thread walks its own plane, cell by cell. All threads walk alike, so there is nothing to
// find out and nothing to add up across threads. In shared memory a plane takes an odd number of
// words, for else the threads of a warp would meet in few banks; a plane of an even number is
// copied word by word to make room for one more.
#pragma once

#include "cuda/axis_bands.cuh"

namespace convt_reduce::cuda {

constexpr int kSmallThreads = 128;
constexpr int kMostColumnBands = 4;

struct SmallArguments {
  const void* data;
  int64_t stretch_bytes;  // from one stretch of adjacent planes to the next
  AxisBands<int> depths;
  AxisBands<int> rows;
  AxisBands<int> columns;
  int positions;  // of a plane
  int cells;
  int per_block;    // planes, a multiple of the warp
  int copied;       // bytes that are copied without a gap: a plane, or all of a block
  int plane_bytes;  // of a plane in shared memory
  int64_t planes;   // of a stretch
  int64_t blocks;   // of a stretch
  int64_t all_blocks;
  uint64_t covered;  // a bit per cell
};

// Starts a copy of kUnit bytes to shared memory, both addresses multiples of it.
template <int kUnit>
__device__ inline void copy_unit(unsigned char* to, const unsigned char* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kUnit >= 4) {
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kUnit));
    return;
  }
#endif
  if constexpr (kUnit == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  } else if constexpr (kUnit == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  } else if constexpr (kUnit == 4) {
    *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
  } else {
    *reinterpret_cast<unsigned short*>(to) = *reinterpret_cast<const unsigned short*>(from);
  }
}

__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  __syncthreads();
}

// Copies `bytes` bytes in pieces of p.copied, p.plane_bytes apart in shared memory.
template <int kUnit>
__device__ inline void copy_planes(const SmallArguments& p, const unsigned char* from, int bytes,
                                   unsigned char* to) {
  const int units = p.copied / kUnit;  // of a piece
  int piece = threadIdx.x / units;
  int unit = threadIdx.x - piece * units;
  const int piece_step = kSmallThreads / units;
  const int unit_step = kSmallThreads - piece_step * units;
  for (int i = threadIdx.x; (i + 1) * kUnit <= bytes; i += kSmallThreads) {
    copy_unit<kUnit>(to + piece * p.plane_bytes + unit * kUnit, from + i * kUnit);
    piece += piece_step;
    unit += unit_step;
    if (unit >= units) {
      unit -= units;
      ++piece;
    }
  }
  // What is left over is less than a unit, at the end of the input: only where nothing is padded.
  const int whole = bytes / kUnit * kUnit;
  for (int i = whole + 2 * threadIdx.x; i < bytes; i += 2 * kSmallThreads) {
    copy_unit<2>(to + i, from + i);
  }
}

template <typename T>
__device__ inline void sum_plane(const SmallArguments& p, const T* plane, AccumulateOf<T>* out) {
  using Acc = AccumulateOf<T>;
  int cell = 0;
  for (int b0 = 0; b0 < p.depths.bands; ++b0) {
    for (int b1 = 0; b1 < p.rows.bands; ++b1, cell += p.columns.bands) {
      Acc sums[kMostColumnBands] = {};
      for (int d = p.depths.begin[b0]; d < p.depths.end(b0); ++d) {
        for (int h = p.rows.begin[b1]; h < p.rows.end(b1); ++h) {
          const T* row = plane + (d * p.rows.size + h) * p.columns.size;
#pragma unroll
          for (int b2 = 0; b2 < kMostColumnBands; ++b2) {
            if (b2 >= p.columns.bands) break;
            const int end = p.columns.end(b2);
#pragma unroll 4
            for (int column = p.columns.begin[b2]; column < end; ++column) {
              sums[b2] += widen(row[column]);
            }
          }
        }
      }
#pragma unroll
      for (int b2 = 0; b2 < kMostColumnBands; ++b2) {
        if (b2 >= p.columns.bands) break;
        out[cell + b2] = (p.covered >> (cell + b2)) & 1 ? sums[b2] : Acc(0);
      }
    }
  }
}

template <int kUnit, typename T>
__global__ void __launch_bounds__(kSmallThreads)
    stats_small_kernel(const __grid_constant__ SmallArguments p, AccumulateOf<T>* cell_sums) {
  extern __shared__ __align__(16) unsigned char shared[];
  let_next_kernel_start();
  for (int64_t block = blockIdx.x; block < p.all_blocks; block += gridDim.x) {
    const int64_t stretch = quotient(block, p.blocks);
    const int64_t first = (block - stretch * p.blocks) * p.per_block;
    const int planes = static_cast<int>(min(int64_t{p.per_block}, p.planes - first));
    const int bytes = planes * p.positions * static_cast<int>(sizeof(T));
    const unsigned char* from = static_cast<const unsigned char*>(p.data) +
                                stretch * p.stretch_bytes +
                                first * p.positions * static_cast<int64_t>(sizeof(T));
    copy_planes<kUnit>(p, from, bytes, shared);
    wait_for_copies();
    for (int plane = threadIdx.x; plane < planes; plane += kSmallThreads) {
      sum_plane<T>(p, reinterpret_cast<const T*>(shared + plane * p.plane_bytes),
                   cell_sums + (stretch * p.planes + first + plane) * p.cells);
    }
    __syncthreads();
  }
}

}  // namespace convt_reduce::cuda
