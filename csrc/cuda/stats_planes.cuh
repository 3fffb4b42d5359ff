// Stats for inputs whose planes are contiguous: one pass of 16-byte loads.
//
// `lanes` threads share a plane and step through its vectors together, so that a thread's columns
// never change when lanes * vector size is a multiple of the width. Then the column bands are known
// once and for all, and only the row's bands have to be watched: a thread adds whole vectors into
// one sum per slot until its run ends. A run is a stretch of memory with one band on the outer axes
// (and one cell, where the width does not divide). What a run gave goes to the thread's own place
// in shared memory, one per cell; at the end those are added across threads in a fixed order.
//
//   a plane of width 8, vectors of 4, lanes = 4:     t0 t0 t0 t0 t1 t1 t1 t1
//                                                    t2 t2 t2 t2 t3 t3 t3 t3
//                                                    t0 t0 t0 t0 t1 ...
//
// A plane need not start on a 16-byte boundary: vectors are laid on the boundaries, and the first
// and the last are read by elements.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kUnroll = 16;   // independent 16-byte loads in flight per thread
constexpr int kFewLoads = 4;  // and on the way to a run's end

struct PlanesArguments {
  Input input;
  Cells cells;
  int64_t channels;
  int64_t planes;
  int64_t positions;  // of a plane
  int64_t chunk;      // vectors
  int64_t chunks;
  int64_t blocks;
  int lanes;
  int groups;
  int reduce_width;  // threads that add one cell's sums, a power of two up to a warp
};

// The run that holds a position: its end, and its first cell.
struct Run {
  int64_t end;
  int64_t cell;
};

template <bool kColumns>
__device__ inline Run run_at(const Cells& cells, int64_t position) {
  const int64_t width = cells.axis[2].axis.size;
  const int64_t height = cells.axis[1].axis.size;
  int64_t row, d;
  if (position < INT32_MAX && width < INT32_MAX && height < INT32_MAX) {  // short divisions
    row = static_cast<unsigned>(position) / static_cast<unsigned>(width);
    d = static_cast<unsigned>(row) / static_cast<unsigned>(height);
  } else {
    row = position / width;
    d = row / height;
  }
  const int64_t b0 = cells.axis[0].band_of(d);
  const int64_t b1 = cells.axis[1].band_of(row - d * height);
  Run run;
  run.cell = cells.index(b0, b1, 0);
  if (!kColumns && cells.axis[2].bands > 1) {
    const int64_t b2 = cells.axis[2].band_of(position - row * width);
    run.cell += b2;
    run.end = row * width + cells.axis[2].end(b2);
  } else if (cells.axis[1].bands > 1) {
    run.end = (d * height + cells.axis[1].end(b1)) * width;
  } else {
    run.end = cells.axis[0].end(b0) * height * width;
  }
  return run;
}

template <int kLoads, typename T, typename Acc>
__device__ inline void add_vectors(const T* from, int64_t step, Acc (&sums)[Vector<T>::kSize]) {
  Vector<T> vectors[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) vectors[u] = load_once(from + u * step);
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
#pragma unroll
    for (int j = 0; j < Vector<T>::kSize; ++j) sums[j] += widen(vectors[u].at[j]);
  }
}

// Moves the slots' sums to the thread's places in shared memory.
template <bool kColumns, int kSize, typename Acc>
__device__ inline void put_down(Acc (&sums)[kSize], const int (&column_band)[kSize], int64_t cell,
                                Acc* mine) {
  if (kColumns) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) mine[(cell + column_band[j]) * blockDim.x] += sums[j];
  } else {
    Acc sum = sums[0];
#pragma unroll
    for (int j = 1; j < kSize; ++j) sum += sums[j];
    mine[cell * blockDim.x] += sum;
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) sums[j] = 0;
}

// One vector that a run's end, the plane's start or its end may cut. Leaves `run` at the run of the
// vector's last element.
template <bool kColumns, typename T, typename Acc>
__device__ inline void add_cut_vector(const PlanesArguments& p, const T* plane, int64_t position,
                                      const int (&column_band)[Vector<T>::kSize], Run& run,
                                      Acc (&sums)[Vector<T>::kSize], Acc* mine) {
  constexpr int kSize = Vector<T>::kSize;
  Acc values[kSize];
  if (position >= 0 && position + kSize <= p.positions) {
    const Vector<T> vector = load_once(plane + position);
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = widen(vector.at[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const int64_t at = position + j;
      values[j] = at >= 0 && at < p.positions ? widen(plane[at]) : Acc(0);
    }
  }
  const int64_t end = position + kSize < p.positions ? position + kSize : p.positions;
  int64_t from = position > 0 ? position : 0;
  while (from < end) {
    if (from >= run.end) {
      put_down<kColumns>(sums, column_band, run.cell, mine);
      run = run_at<kColumns>(p.cells, from);
    }
    const int64_t to = run.end < end ? run.end : end;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (position + j >= from && position + j < to) sums[j] += values[j];
    }
    from = to;
  }
}

template <bool kColumns, typename T, typename Acc>
__device__ inline void add_chunk(const PlanesArguments& p, int64_t plane_index, int64_t chunk,
                                 int lane, Acc* mine) {
  constexpr int kSize = Vector<T>::kSize;
  const T* plane = static_cast<const T*>(p.input.data) +
                   plane_index / p.channels * p.input.stride_n +
                   plane_index % p.channels * p.input.stride_c;
  const int64_t phase = reinterpret_cast<uintptr_t>(plane) % kVectorBytes / sizeof(T);
  const int64_t step = static_cast<int64_t>(p.lanes) * kSize;
  int64_t position = (chunk * p.chunk + lane) * kSize - phase;  // of the vector's first element
  const int64_t chunk_end = (chunk + 1) * p.chunk * kSize - phase;
  const int64_t end = chunk_end < p.positions ? chunk_end : p.positions;
  if (position >= end) return;

  int column_band[kSize] = {};
  if (kColumns && p.cells.axis[2].bands > 1) {
    const int64_t width = p.cells.axis[2].axis.size;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const int64_t column = (position + j + kSize * width) % width;  // position >= 1 - kSize
      column_band[j] = static_cast<int>(p.cells.axis[2].band_of(column));
    }
  }

  Acc sums[kSize] = {};
  Run run = run_at<kColumns>(p.cells, position > 0 ? position : 0);
  while (position < end) {
    const int64_t whole_end = run.end < end ? run.end : end;
    if (position >= 0 && position + (kUnroll - 1) * step + kSize <= whole_end) {
      add_vectors<kUnroll>(plane + position, step, sums);
      position += kUnroll * step;
    } else if (position >= 0 && position + (kFewLoads - 1) * step + kSize <= whole_end) {
      add_vectors<kFewLoads>(plane + position, step, sums);
      position += kFewLoads * step;
    } else {
      add_cut_vector<kColumns>(p, plane, position, column_band, run, sums, mine);
      position += step;
    }
  }
  put_down<kColumns>(sums, column_band, run.cell, mine);
}

template <bool kColumns, typename T>
__global__ void stats_planes_kernel(const __grid_constant__ PlanesArguments p,
                                    AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* places = reinterpret_cast<Acc*>(shared);  // [cells][threads]
  let_next_kernel_start();
  const int cells = static_cast<int>(p.cells.count());
  const int group = threadIdx.x / p.lanes;
  const int lane = threadIdx.x % p.lanes;
  const int adders = blockDim.x / p.reduce_width;

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    for (int cell = 0; cell < cells; ++cell) places[cell * blockDim.x + threadIdx.x] = 0;
    const int64_t item = block * p.groups + group;
    if (group < p.groups && item < p.planes * p.chunks) {
      add_chunk<kColumns, T>(p, item / p.chunks, item % p.chunks, lane, places + threadIdx.x);
    }
    __syncthreads();

    // Every thread takes the same number of turns, since the shuffles need whole warps.
    for (int first = 0; first < p.groups * cells; first += adders) {
      const int task = first + threadIdx.x / p.reduce_width;
      const int cell = task % cells;
      const int64_t task_item = block * p.groups + task / cells;
      const bool real = task < p.groups * cells && task_item < p.planes * p.chunks;
      Acc sum = 0;
      if (real) {
        const Acc* from = places + cell * blockDim.x + task / cells * p.lanes;
        for (int i = threadIdx.x % p.reduce_width; i < p.lanes; i += p.reduce_width) sum += from[i];
      }
      for (int half = p.reduce_width / 2; half > 0; half /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, half, p.reduce_width);
      }
      if (real && threadIdx.x % p.reduce_width == 0) {
        const int64_t row = task_item % p.chunks * p.planes + task_item / p.chunks;
        cell_sums[row * cells + cell] = covered(p.cells, bands_of(p.cells, cell)) ? sum : Acc(0);
      }
    }
    __syncthreads();
  }
}

}  // namespace convt_reduce::cuda
