// Spread over planes that are not few and large.
//
// Planes follow one another without gaps, so the pattern of cells repeats from plane to plane, and
// so that it repeats at whole sectors of memory a period is one plane or several. A block has one
// chunk of the period, 16 KiB, and writes it in every period of its group:
//
//   |  period 0   |  period 1   |  period 2   |  period 3   |  period 4   |
//   | c0 | c1 | c2| c0 | c1 | c2| c0 | c1 | c2| c0 | c1 | c2| c0 | c1 | c2|
//        |block|                     |block|                     |block|     one of two groups
//
// A slot is a vector of the chunk. Each thread has four of them and keeps in registers where its
// elements find their gradients in shared memory; a period then costs it a load per element and a
// store per slot, wherever planes begin and end. A turn is a few periods: their tap gradients are
// copied to shared memory two turns ahead and added up, cell by cell, one turn ahead, by some warps
// while the others already store.
#pragma once

#include "cuda/period_grads.cuh"
#include "cuda/periods.cuh"

namespace convt_reduce::cuda {

// Where a thread's elements find their gradients: byte offsets, two to a register.
template <typename T>
struct Offsets {
  static constexpr int kSize = Vector<T>::kSize;
  unsigned pairs[kPeriodSlots][kSize / 2];

  __device__ void set(int slot, int j, int offset) {
    const unsigned half = static_cast<unsigned>(offset) & 0xffff;
    pairs[slot][j / 2] = j % 2 == 0 ? half : pairs[slot][j / 2] | half << 16;
  }
  __device__ T load(const unsigned char* grads, int slot, int j) const {
    const unsigned pair = pairs[slot][j / 2];
    return *reinterpret_cast<const T*>(grads + (j % 2 == 0 ? pair & 0xffff : pair >> 16));
  }
};

template <typename T>
__device__ inline void find_offsets(const PeriodsArguments& p, const PeriodsChunk& chunk,
                                    const PeriodsShared<T>& shared, Offsets<T>& offsets) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kBytes = sizeof(T);
  const int thread = threadIdx.x;
  int line = (chunk.first + thread * kSize) / p.line;
  int column = chunk.first + thread * kSize - line * p.line;
  line -= chunk.first_line;
#pragma unroll
  for (int k = 0; k < kPeriodSlots; ++k) {
    if (thread >= chunk.slots - k * kPeriodThreads) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) offsets.set(k, j, 0);
    } else if (p.line < kSize) {
      int at_line = line;
      int at_column = column;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        offsets.set(k, j, shared.of_line[at_line] + shared.of_column[at_column]);
        if (++at_column == p.line) {
          at_column = 0;
          ++at_line;
        }
      }
    } else {
      const int here = shared.of_line[line];
      const int next = shared.of_line[line + 1];
      if (p.columns_held > 0) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const int outer = column + j < p.line ? here : next;
          offsets.set(k, j, outer + shared.of_column[column + j]);
        }
      } else {
        const int first = band_of(p.columns, column);
        const int last = column + kSize - 1;
        const bool same = last < p.line && band_of(p.columns, last) == first;
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          int offset = here + first * kBytes;
          if (!same) {
            const bool wraps = column + j >= p.line;
            const int at = wraps ? column + j - p.line : column + j;
            offset = (wraps ? next : here) + band_of(p.columns, at) * kBytes;
          }
          offsets.set(k, j, offset);
        }
      }
    }
    line += p.line_step;
    column += p.column_step;
    if (column >= p.line) {
      column -= p.line;
      ++line;
    }
  }
}

template <typename T>
__device__ inline void store_turn(const PeriodsArguments& p, const PeriodsChunk& chunk,
                                  const PeriodsShared<T>& shared, const Offsets<T>& offsets,
                                  int turn, T* grad) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kStep = kPeriodThreads * kSize;  // from one slot of a thread to its next
  const int thread = threadIdx.x;
  const unsigned char* grads =
      reinterpret_cast<const unsigned char*>(shared.grads + (turn & 1) * shared.grads_size);
  const int64_t period = static_cast<int64_t>(p.period) * p.positions;
  const int64_t begin = chunk.period(p, turn, 0) * period + chunk.first;
  T* to = grad + begin + thread * kSize;
  int64_t room = p.planes * p.positions - begin;  // up to the last plane's end
#pragma unroll 1
  for (int i = 0; i < p.turn && room > 0; ++i) {
    if (room >= chunk.slots * kSize) {
#pragma unroll
      for (int k = 0; k < kPeriodSlots; ++k) {
        Vector<T> vector;
#pragma unroll
        for (int j = 0; j < kSize; ++j) vector.at[j] = offsets.load(grads, k, j);
        if (thread < chunk.slots - k * kPeriodThreads) {
          *reinterpret_cast<Vector<T>*>(to + k * kStep) = vector;
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPeriodSlots; ++k) {
        const int count = static_cast<int>(room) - k * kStep - thread * kSize;
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (j < count) to[k * kStep + j] = offsets.load(grads, k, j);
        }
      }
    }
    grads += chunk.planes * p.cells * sizeof(T);
    to += p.groups * period;
    room -= p.groups * period;
  }
}

template <typename T>
__global__ void __launch_bounds__(kPeriodThreads, kPeriodBlocks)
    spread_periods_kernel(const __grid_constant__ PeriodsArguments p,
                          const __grid_constant__ CellGradsArguments g, T* grad) {
  extern __shared__ __align__(16) unsigned char memory[];
  const PeriodsShared<T> shared(PeriodsLayout<T>(p), memory);
  const PeriodsChunk chunk(p, Vector<T>::kSize);
  fill_tables(p, g.cells, chunk, shared);
  wait_for_previous_kernel();
  let_next_kernel_start();
  Offsets<T> offsets;
  // One loop, whose first two rounds only prepare, so that there is one copy of each part.
#pragma unroll 1
  for (int turn = -2; turn < 0 || chunk.exists(p, turn); ++turn) {
    wait_for_batches<0>();
    __syncthreads();
    if (turn >= -1 && chunk.exists(p, turn + 1)) make_grads(p, chunk, shared, turn + 1);
    if (turn != -1) {
      const int last = turn == -2 ? 1 : turn + 2;
#pragma unroll 1
      for (int next = turn == -2 ? 0 : last; next <= last; ++next) {
        if (chunk.exists(p, next)) copy_turn(p, g, chunk, shared, next);
      }
    }
    close_batch();
    if (turn == -2) find_offsets(p, chunk, shared, offsets);
    if (turn >= 0) store_turn(p, chunk, shared, offsets, turn, grad);
  }
}

}  // namespace convt_reduce::cuda
