// Stats for inputs of any strides and any number of cells: a block per piece of a cell.
//
// A cell is a box of positions, so a block walks its box and needs no bookkeeping at all. Where
// channels are neighbours in memory (channels_last) `lanes` threads read as many channels of one
// position, and the block's `walkers` take the positions in turn; otherwise lanes is 1 and every
// thread is a walker.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kBoxLoads = 8;  // independent loads in flight per thread

struct BoxesArguments {
  Input input;
  Cells cells;
  int64_t batch;
  int64_t channels;
  int64_t channel_tiles;
  int64_t chunks;  // pieces of every box; short boxes leave some empty
  int64_t blocks;
  int lanes;
};

// Positions of a box, row by row, without divisions after the first.
struct BoxWalk {
  int64_t size[kAxes];
  int64_t at[kAxes];
  int64_t step[kAxes];

  __device__ void digits(int64_t count, int64_t (&to)[kAxes]) const {
    const int64_t rows = quotient(count, size[2]);
    to[2] = count - rows * size[2];
    to[0] = quotient(rows, size[1]);
    to[1] = rows - to[0] * size[1];
  }
  __device__ void advance() {
    at[2] += step[2];
    at[1] += step[1];
    at[0] += step[0];
    if (at[2] >= size[2]) {
      at[2] -= size[2];
      ++at[1];
    }
    if (at[1] >= size[1]) {
      at[1] -= size[1];
      ++at[0];
    }
  }
};

template <typename T>
__device__ inline AccumulateOf<T> sum_box_piece(const BoxesArguments& p, const CellBands& bands,
                                                const T* plane, int64_t chunk, int walker,
                                                int walkers) {
  using Acc = AccumulateOf<T>;
  BoxWalk walk;
  int64_t offset = 0;  // of the box's first position
  for (int a = 0; a < kAxes; ++a) {
    const AxisCells& axis = p.cells.axis[a];
    const int64_t begin = axis.band(bands.b[a]).begin;
    walk.size[a] = axis.end(bands.b[a]) - begin;
    offset += begin * p.input.stride[a];
  }
  const int64_t count = walk.size[0] * walk.size[1] * walk.size[2];
  const int64_t piece = quotient(count + p.chunks - 1, p.chunks);
  int64_t i = chunk * piece + walker;
  const int64_t end = min((chunk + 1) * piece, count);
  if (i >= end) return 0;
  walk.digits(i, walk.at);
  walk.digits(walkers, walk.step);

  Acc sums[kBoxLoads] = {};
  while (i < end) {
#pragma unroll
    for (int u = 0; u < kBoxLoads; ++u) {
      if (i < end) {
        sums[u] += widen(plane[offset + walk.at[0] * p.input.stride[0] +
                               walk.at[1] * p.input.stride[1] + walk.at[2] * p.input.stride[2]]);
      }
      walk.advance();
      i += walkers;
    }
  }
#pragma unroll
  for (int half = kBoxLoads / 2; half > 0; half /= 2) {
#pragma unroll
    for (int u = 0; u < half; ++u) sums[u] += sums[u + half];
  }
  return sums[0];
}

template <typename T>
__global__ void stats_boxes_kernel(const __grid_constant__ BoxesArguments p,
                                   AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* places = reinterpret_cast<Acc*>(shared);  // [walkers][lanes]
  let_next_kernel_start();
  const int64_t cell_count = p.cells.count();
  const int lane = threadIdx.x % p.lanes;
  const int walker = threadIdx.x / p.lanes;
  const int walkers = blockDim.x / p.lanes;  // a power of two

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    const int64_t piece = quotient(block, p.chunks);  // (n, tile, cell)
    const int64_t chunk = block - piece * p.chunks;
    const int64_t n_tile = quotient(piece, cell_count);
    const int64_t cell = piece - n_tile * cell_count;
    const int64_t n = quotient(n_tile, p.channel_tiles);
    const int64_t tile = n_tile - n * p.channel_tiles;
    const int64_t c = tile * p.lanes + lane;
    const CellBands bands = bands_of(p.cells, cell);
    Acc sum = 0;
    if (c < p.channels && covered(p.cells, bands)) {
      const T* plane =
          static_cast<const T*>(p.input.data) + n * p.input.stride_n + c * p.input.stride_c;
      sum = sum_box_piece<T>(p, bands, plane, chunk, walker, walkers);
    }
    places[threadIdx.x] = sum;
    for (int half = walkers / 2; half > 0; half /= 2) {
      __syncthreads();
      if (walker < half) places[threadIdx.x] += places[threadIdx.x + half * p.lanes];
    }
    if (walker == 0 && c < p.channels) {
      const int64_t row = (chunk * p.batch + n) * p.channels + c;
      cell_sums[row * cell_count + cell] = places[lane];
    }
    __syncthreads();
  }
}

}  // namespace convt_reduce::cuda
