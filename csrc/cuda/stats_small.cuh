// Stats for small planes whose channels lie one behind the other: a few threads per plane.
//
// A block copies a tile of planes to shared memory while it adds up the tile before. Which element
// belongs to which cell is found out once per block: `order` lists the elements of a plane, cell by
// cell. `lanes` threads then walk that list together for a plane, and the plane's shape no longer
// matters. Planes of a multiple of 32 bytes would meet in few banks of shared memory, so those lie
// 16 bytes further apart there.
#pragma once

#include "cuda/axis_bands.cuh"
#include "cuda/staging.cuh"

namespace convt_reduce::cuda {

constexpr int kSmallThreads = 64;
constexpr int kSmallStages = 2;
constexpr int kSmallTogether = 2;  // planes that a thread walks at the same time

struct SmallArguments {
  const void* data;
  int64_t stretch_bytes;  // from one stretch of adjacent planes to the next
  AxisBands<int> depths;
  AxisBands<int> rows;
  AxisBands<int> columns;
  int positions;  // of a plane
  int cells;
  int lanes;        // threads on one plane, a power of two
  int per_tile;     // planes
  int gap;          // bytes between planes in shared memory: 0 or 16
  int order_at;     // where in shared memory `order` begins
  int stages_at;    // and the tiles
  int stage_bytes;  // of a tile
  int64_t planes;   // of a stretch
  int64_t tiles;    // of a stretch
  int64_t all_tiles;
};

// A tile of planes: where it lies.
struct SmallTile {
  uintptr_t begin;
  uintptr_t limit_begin;
  uintptr_t limit_end;
  int64_t first;  // plane, of all
  int planes;

  template <typename T>
  __device__ static SmallTile at(const SmallArguments& p, int64_t index) {
    const int plane_bytes = p.positions * static_cast<int>(sizeof(T));
    const int64_t stretch = index < p.tiles ? 0 : quotient(index, p.tiles);
    const int64_t first = (index - stretch * p.tiles) * p.per_tile;
    SmallTile tile;
    tile.limit_begin = address_of(p.data) + stretch * p.stretch_bytes;
    tile.limit_end = tile.limit_begin + p.planes * plane_bytes;
    tile.begin = tile.limit_begin + first * plane_bytes;
    tile.first = stretch * p.planes + first;
    tile.planes = static_cast<int>(min(int64_t{p.per_tile}, p.planes - first));
    return tile;
  }
};

__device__ inline void copy_tile(const SmallArguments& p, const SmallTile& tile, int plane_bytes,
                                 unsigned char* to) {
  if (p.gap == 0) {
    copy_stretch<kSmallThreads>(to, tile.begin, tile.begin + tile.planes * plane_bytes,
                                tile.limit_begin, tile.limit_end, threadIdx.x);
    return;
  }
  // All planes have one phase. A piece across two of them is copied twice.
  const int phase = phase_of(tile.begin);
  const int pieces = (plane_bytes + phase + kVectorBytes - 1) / kVectorBytes;  // of a plane
  int plane = threadIdx.x / pieces;
  int piece = threadIdx.x - plane * pieces;
  const int plane_step = kSmallThreads / pieces;
  const int piece_step = kSmallThreads - plane_step * pieces;
  while (plane < tile.planes) {
    copy_piece(to + plane * (plane_bytes + p.gap) + piece * kVectorBytes,
               tile.begin - phase + plane * plane_bytes + piece * kVectorBytes, tile.limit_begin,
               tile.limit_end);
    plane += plane_step;
    piece += piece_step;
    if (piece >= pieces) {
      piece -= pieces;
      ++plane;
    }
  }
}

// order[cell_begin[cell] ...]: where the cell's elements lie in a plane, in bytes, as they lie in
// memory.
__device__ inline void list_cells(const SmallArguments& p, int element_bytes, int* cell_begin,
                                  unsigned short* order) {
  for (int position = threadIdx.x; position < p.positions; position += kSmallThreads) {
    const int row = position / p.columns.size;
    const int depth = row / p.rows.size;
    const Found<int> b0 = p.depths.locate(depth);
    const Found<int> b1 = p.rows.locate(row - depth * p.rows.size);
    const Found<int> b2 = p.columns.locate(position - row * p.columns.size);
    // The cells before this one: whole slabs, then rows of this slab, then columns of these rows.
    const int begin = b0.begin * p.rows.size * p.columns.size +
                      b0.length() * (b1.begin * p.columns.size + b1.length() * b2.begin);
    const int d = depth - b0.begin;
    const int h = row - depth * p.rows.size - b1.begin;
    const int w = position - row * p.columns.size - b2.begin;
    const int in_cell = (d * b1.length() + h) * b2.length() + w;
    order[begin + in_cell] = static_cast<unsigned short>(position * element_bytes);
    if (in_cell == 0) {
      cell_begin[(b0.band * p.rows.bands + b1.band) * p.columns.bands + b2.band] = begin;
    }
  }
  if (threadIdx.x == 0) cell_begin[p.cells] = p.positions;
}

// One cell of the planes that a thread walks together: the sums, at every lane.
template <typename T>
__device__ inline void sum_cell(const SmallArguments& p,
                                const unsigned char* const (&from)[kSmallTogether],
                                const unsigned short* order, int begin, int end,
                                AccumulateOf<T> (&sums)[kSmallTogether]) {
#pragma unroll
  for (int i = 0; i < kSmallTogether; ++i) sums[i] = 0;
#pragma unroll 4
  for (int at = begin; at < end; at += p.lanes) {
    const int offset = order[at];
#pragma unroll
    for (int i = 0; i < kSmallTogether; ++i) {
      sums[i] += widen(*reinterpret_cast<const T*>(from[i] + offset));
    }
  }
  for (int half = p.lanes / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < kSmallTogether; ++i) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], half);
    }
  }
}

template <typename T>
__device__ inline void sum_tile(const SmallArguments& p, const SmallTile& tile,
                                const unsigned char* stage, const int* cell_begin,
                                const unsigned short* order, AccumulateOf<T>* results) {
  using Acc = AccumulateOf<T>;
  const int plane_step = p.positions * static_cast<int>(sizeof(T)) + p.gap;
  const unsigned char* data = stage + phase_of(tile.begin);
  const int lane = threadIdx.x & (p.lanes - 1);
  const int groups = kSmallThreads / p.lanes;
  // Every thread takes every turn, since the shuffles need whole warps; a group past the last plane
  // repeats it and keeps nothing.
  for (int base = 0; base < tile.planes; base += groups * kSmallTogether) {
    const unsigned char* from[kSmallTogether];
    int plane[kSmallTogether];
#pragma unroll
    for (int i = 0; i < kSmallTogether; ++i) {
      plane[i] = base + i * groups + static_cast<int>(threadIdx.x) / p.lanes;
      from[i] = data + min(plane[i], tile.planes - 1) * plane_step;
    }
    int cell = 0;
    int begin = 0;
    for (int b0 = 0; b0 < p.depths.bands; ++b0) {
      for (int b1 = 0; b1 < p.rows.bands; ++b1) {
        for (int b2 = 0; b2 < p.columns.bands; ++b2, ++cell) {
          const int end = cell_begin[cell + 1];
          Acc sums[kSmallTogether];
          sum_cell<T>(p, from, order, begin + lane, end, sums);
          begin = end;
          if (lane != (cell & (p.lanes - 1))) continue;
          const bool covered =
              p.depths.is_covered(b0) && p.rows.is_covered(b1) && p.columns.is_covered(b2);
#pragma unroll
          for (int i = 0; i < kSmallTogether; ++i) {
            if (plane[i] >= tile.planes) continue;
            results[plane[i] * p.cells + cell] = covered ? sums[i] : Acc(0);
          }
        }
      }
    }
  }
}

// Shared memory: results [per_tile][cells], cell_begin [cells + 1], order [positions], the tiles.
template <typename T>
__global__ void __launch_bounds__(kSmallThreads)
    stats_small_kernel(const __grid_constant__ SmallArguments p, AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* results = reinterpret_cast<Acc*>(shared);
  int* cell_begin = reinterpret_cast<int*>(results + p.per_tile * p.cells);
  unsigned short* order = reinterpret_cast<unsigned short*>(shared + p.order_at);
  const auto stage = [&](int turn) { return shared + p.stages_at + turn * p.stage_bytes; };
  const int plane_bytes = p.positions * static_cast<int>(sizeof(T));
  list_cells(p, sizeof(T), cell_begin, order);
  wait_for_previous_kernel();
  let_next_kernel_start();

  int64_t index = blockIdx.x;
  SmallTile tile = SmallTile::at<T>(p, index);
  copy_tile(p, tile, plane_bytes, stage(0));
  close_batch();
  for (int turn = 0; index < p.all_tiles; turn ^= 1) {
    index += gridDim.x;
    SmallTile next = tile;
    if (index < p.all_tiles) {
      next = SmallTile::at<T>(p, index);
      copy_tile(p, next, plane_bytes, stage(turn ^ 1));
    }
    close_batch();
    wait_for_batches<1>();
    __syncthreads();
    sum_tile<T>(p, tile, stage(turn), cell_begin, order, results);
    __syncthreads();
    for (int i = threadIdx.x; i < tile.planes * p.cells; i += kSmallThreads) {
      cell_sums[tile.first * p.cells + i] = results[i];
    }
    tile = next;
  }
}

}  // namespace convt_reduce::cuda
