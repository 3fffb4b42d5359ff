// Stats for inputs of any strides and any number of cells: a block per piece of a cell.
//
// A cell is a box of positions, so a block walks its box, or a piece of it where it is large, and
// needs no bookkeeping at all. Where
// channels are neighbours in memory (channels_last) `lanes` threads read the channels of one
// position, several each where alignment allows, and the block's `walkers` take the positions in
// turn; otherwise lanes is 1 and every thread is a walker.
#pragma once

#include <numeric>

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kBoxLoads = 8;  // independent loads in flight per thread

constexpr int kMostSplitCells = 64;  // beyond, every box is one piece

struct BoxesArguments {
  Input input;
  Cells cells;
  int64_t batch;
  int64_t channels;
  int64_t channel_tiles;
  int64_t chunks;                        // the most pieces of a box
  int64_t piece;                         // positions of a piece
  int64_t pieces;                        // of all boxes of a batch element's channels
  int first_piece[kMostSplitCells + 1];  // of each cell; unused where every box is one piece
  int64_t blocks;
  int lanes;
};

CONVT_HD inline int64_t positions_of(const Cells& cells, const CellBands& bands) {
  int64_t positions = 1;
  for (int a = 0; a < kAxes; ++a) {
    positions *= cells.axis[a].end(bands.b[a]) - cells.axis[a].band(bands.b[a]).begin;
  }
  return positions;
}

CONVT_HD inline int64_t pieces_of(int64_t positions, int64_t piece) {
  return quotient(positions + piece - 1, piece);
}

// A piece of a box, found by its number among those of all boxes.
struct BoxPiece {
  int64_t cell;
  int64_t chunk = 0;   // of its box
  int64_t chunks = 1;  // that its box has

  __device__ BoxPiece(const BoxesArguments& p, int64_t number) : cell(number) {
    const int cells = static_cast<int>(p.cells.count());
    if (p.pieces == p.cells.count()) return;
    int low = 0;
    int high = cells;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (p.first_piece[middle] <= number ? low : high) = middle;
    }
    cell = low;
    chunk = number - p.first_piece[low];
    chunks = p.first_piece[low + 1] - p.first_piece[low];
  }
};

// The positions of a box that one walker takes, as offsets in memory, without divisions after the
// first. Index holds a number of positions.
template <typename Index>
struct BoxWalk {
  Index left;  // positions still to take
  int64_t offset;

  __device__ BoxWalk(const BoxesArguments& p, const CellBands& bands, int64_t chunk, int walker,
                     int walkers) {
    int64_t begin = 0;
    for (int a = 0; a < kAxes; ++a) {
      const AxisCells& axis = p.cells.axis[a];
      const int64_t first = axis.band(bands.b[a]).begin;
      size_[a] = static_cast<Index>(axis.end(bands.b[a]) - first);
      begin += first * p.input.stride[a];
    }
    const int64_t count = static_cast<int64_t>(size_[0]) * size_[1] * size_[2];
    const int64_t at = chunk * p.piece + walker;
    const int64_t stop = min((chunk + 1) * p.piece, count);
    left = at < stop ? static_cast<Index>(quotient(stop - at + walkers - 1, walkers)) : 0;
    Index step[kAxes];
    digits(at, at_);
    digits(walkers, step);
    step1_ = step[1];
    step2_ = step[2];
    const auto memory = [&](const Index(&digit)[kAxes]) {
      return digit[0] * p.input.stride[0] + digit[1] * p.input.stride[1] +
             digit[2] * p.input.stride[2];
    };
    offset = begin + memory(at_);
    jump_ = memory(step);
    // What a carry adds: one more of the axis before, minus this axis from end to end.
    carry2_ = p.input.stride[1] - size_[2] * p.input.stride[2];
    carry1_ = p.input.stride[0] - size_[1] * p.input.stride[1];
  }

  __device__ void advance() {
    --left;
    offset += jump_;
    at_[2] += step2_;
    at_[1] += step1_;
    if (at_[2] >= size_[2]) {
      at_[2] -= size_[2];
      ++at_[1];
      offset += carry2_;
    }
    if (at_[1] >= size_[1]) {
      at_[1] -= size_[1];
      offset += carry1_;
    }
  }

 private:
  __device__ void digits(int64_t count, Index (&to)[kAxes]) const {
    const int64_t rows = quotient(count, size_[2]);
    const int64_t slabs = quotient(rows, size_[1]);
    to[2] = static_cast<Index>(count - rows * size_[2]);
    to[1] = static_cast<Index>(rows - slabs * size_[1]);
    to[0] = static_cast<Index>(slabs);
  }

  Index size_[kAxes];
  Index at_[kAxes];
  Index step1_;
  Index step2_;
  int64_t jump_;
  int64_t carry1_;
  int64_t carry2_;
};

// The alignment in bytes, at most a vector's, that every position of the input has.
inline int64_t alignment_of(const Input& input, int64_t bytes) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(input.data));
  int64_t common = std::gcd(address, int64_t{kVectorBytes});
  common = std::gcd(common, input.stride_n * bytes);
  for (const int64_t stride : input.stride) common = std::gcd(common, stride * bytes);
  return common;
}

// A thread's neighbouring channels at one position.
template <int kChannels, typename T>
struct alignas(kChannels * sizeof(T)) Channels {
  T at[kChannels];
};

template <bool kAligned, int kChannels, typename T>
__device__ inline Channels<kChannels, T> load_channels(const T* from) {
  Channels<kChannels, T> loaded;
  if constexpr (kAligned) {
    loaded = *reinterpret_cast<const Channels<kChannels, T>*>(from);
  } else {
#pragma unroll
    for (int j = 0; j < kChannels; ++j) loaded.at[j] = from[j];
  }
  return loaded;
}

template <bool kAligned, int kChannels, typename T, typename Index>
__device__ inline void sum_box_piece(const T* plane, BoxWalk<Index>& walk,
                                     AccumulateOf<T> (&sums)[kChannels]) {
  AccumulateOf<T> lost[kChannels] = {};
  while (walk.left >= kBoxLoads) {
    Channels<kChannels, T> loaded[kBoxLoads];
#pragma unroll
    for (int u = 0; u < kBoxLoads; ++u) {
      loaded[u] = load_channels<kAligned, kChannels>(plane + walk.offset);
      walk.advance();
    }
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      AccumulateOf<T> values[kBoxLoads];
#pragma unroll
      for (int u = 0; u < kBoxLoads; ++u) values[u] = widen(loaded[u].at[j]);
      // Results of 16 bits have no use for it, and it takes registers.
      if constexpr (sizeof(T) >= sizeof(float)) {
        add_exactly(sums[j], lost[j], halves_sum(values));
      } else {
        sums[j] += halves_sum(values);
      }
    }
  }
  while (walk.left > 0) {
    const auto loaded = load_channels<kAligned, kChannels>(plane + walk.offset);
#pragma unroll
    for (int j = 0; j < kChannels; ++j) sums[j] += widen(loaded.at[j]);
    walk.advance();
  }
#pragma unroll
  for (int j = 0; j < kChannels; ++j) sums[j] = settled(sums[j], lost[j]);
}

template <bool kAligned, int kChannels, typename T, typename Index>
__global__ void stats_boxes_kernel(const __grid_constant__ BoxesArguments p,
                                   AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  Acc* places = reinterpret_cast<Acc*>(shared);  // [kChannels][walkers][lanes]
  const int64_t cell_count = p.cells.count();
  const int lane = threadIdx.x % p.lanes;
  const int walker = threadIdx.x / p.lanes;
  const int walkers = blockDim.x / p.lanes;  // a power of two
  wait_for_previous_kernel();
  let_next_kernel_start();

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    const int64_t n_tile = quotient(block, p.pieces);
    const BoxPiece piece(p, block - n_tile * p.pieces);
    const CellBands bands = bands_of(p.cells, piece.cell);
    const int64_t n = quotient(n_tile, p.channel_tiles);
    const int64_t tile = n_tile - n * p.channel_tiles;
    const int64_t c = (tile * p.lanes + lane) * kChannels;
    Acc sums[kChannels] = {};
    if (c < p.channels && covered(p.cells, bands)) {
      const T* plane =
          static_cast<const T*>(p.input.data) + n * p.input.stride_n + c * p.input.stride_c;
      BoxWalk<Index> walk(p, bands, piece.chunk, walker, walkers);
      sum_box_piece<kAligned, kChannels, T>(plane, walk, sums);
    }
#pragma unroll
    for (int j = 0; j < kChannels; ++j) places[j * blockDim.x + threadIdx.x] = sums[j];
    for (int half = walkers / 2; half > 0; half /= 2) {
      __syncthreads();
      if (walker >= half) continue;
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        const int mine = j * blockDim.x + threadIdx.x;
        places[mine] += places[mine + half * p.lanes];
      }
    }
    if (walker == 0 && c < p.channels) {
      // The first piece of a box with fewer than the most stands in for those that it has not.
      const int64_t last = piece.chunk == 0 && piece.chunks < p.chunks ? p.chunks : 0;
#pragma unroll
      for (int j = 0; j < kChannels; ++j) {
        const auto put = [&](int64_t chunk, Acc sum) {
          const int64_t row = (chunk * p.batch + n) * p.channels + c + j;
          cell_sums[row * cell_count + piece.cell] = sum;
        };
        put(piece.chunk, places[j * blockDim.x + lane]);
        for (int64_t chunk = piece.chunks; chunk < last; ++chunk) put(chunk, Acc(0));
      }
    }
    __syncthreads();
  }
}

}  // namespace convt_reduce::cuda
