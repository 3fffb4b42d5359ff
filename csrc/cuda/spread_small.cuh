// Spread for small planes: a block writes a tile of planes as one stretch of memory.
//
// Which cell a position belongs to is found out once per block. A thread then makes vectors of
// neighbouring elements, wherever planes begin and end: it looks up each element's cell, and that
// cell's gradient in its plane.
#pragma once

#include "cuda/axis_bands.cuh"
#include "cuda/cell_grads.cuh"

namespace convt_reduce::cuda {

constexpr int kSpreadThreads = 128;
// Planes of a tile are a multiple of it, so that tiles begin at vectors.
constexpr int64_t kSpreadPlanes = 8;

struct SpreadSmallArguments {
  AxisBands<int> depths;
  AxisBands<int> rows;
  AxisBands<int> columns;
  int positions;  // of a plane
  int cells;
  int per_tile;  // planes
  int64_t planes;
  int64_t tiles;
};

// Shared memory: grads [per_tile][cells] in the gradient's type, cell_of [positions].
template <typename T>
__global__ void __launch_bounds__(kSpreadThreads)
    spread_small_kernel(const __grid_constant__ SpreadSmallArguments p,
                        const __grid_constant__ CellGradsArguments g, T* grad) {
  constexpr int kSize = Vector<T>::kSize;
  extern __shared__ __align__(16) unsigned char shared[];
  T* grads = reinterpret_cast<T*>(shared);
  unsigned short* cell_of = reinterpret_cast<unsigned short*>(grads + p.per_tile * p.cells);
  for (int position = threadIdx.x; position < p.positions; position += kSpreadThreads) {
    const int row = position / p.columns.size;
    const int depth = row / p.rows.size;
    const int b01 =
        p.depths.locate(depth).band * p.rows.bands + p.rows.locate(row - depth * p.rows.size).band;
    cell_of[position] = static_cast<unsigned short>(
        b01 * p.columns.bands + p.columns.locate(position - row * p.columns.size).band);
  }
  constexpr int kStep = kSpreadThreads * kSize;
  const int plane_step = kStep / p.positions;
  const int position_step = kStep - plane_step * p.positions;
  const int first_plane = static_cast<int>(threadIdx.x) * kSize / p.positions;
  const int first_position = static_cast<int>(threadIdx.x) * kSize - first_plane * p.positions;
  wait_for_previous_kernel();
  let_next_kernel_start();

  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int64_t first = tile * p.per_tile;
    const int planes = static_cast<int>(min(int64_t{p.per_tile}, p.planes - first));
    __syncthreads();
    for (int i = threadIdx.x; i < planes * p.cells; i += kSpreadThreads) {
      const int plane = i / p.cells;
      grads[i] = narrow<T>(cell_grad<AccumulateOf<T>>(g, first + plane, i - plane * p.cells));
    }
    __syncthreads();
    T* to = grad + first * p.positions;
    const int count = planes * p.positions;
    int plane = first_plane;
    int position = first_position;
    for (int at = static_cast<int>(threadIdx.x) * kSize; at < count; at += kStep) {
      Vector<T> vector;
      int of = plane;
      int where = position;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (at + j < count) vector.at[j] = grads[of * p.cells + cell_of[where]];
        if (++where == p.positions) {
          where = 0;
          ++of;
        }
      }
      if (at + kSize <= count) {
        *reinterpret_cast<Vector<T>*>(to + at) = vector;
      } else {
        for (int j = 0; j < kSize; ++j) {
          if (at + j < count) to[at + j] = vector.at[j];
        }
      }
      plane += plane_step;
      position += position_step;
      if (position >= p.positions) {
        position -= p.positions;
        ++plane;
      }
    }
  }
}

}  // namespace convt_reduce::cuda
