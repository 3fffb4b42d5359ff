// Stats and combine in one kernel, for large batches and few output channels: a matrix product of
// the input itself with a folded weight for every position.
//
// Where output channels are few, tensor cores have time to multiply every element. So none is
// added up before: a batch element's planes, one behind the other, are a row of a matrix, whatever
// their shape, and it is read as fast as memory gives it.
//
//   fold      folded weights, for each position those of its cell
//   multiply  a block has a tile of batch elements, all output channels of a group, and one slice
//             of the rows; one slice: y, several: parts
//   finish    adds parts [slices][batch][c_out]
#pragma once

#include "cuda/axis_bands.cuh"
#include "cuda/combine.cuh"
#include "cuda/pieces.cuh"
#include "cuda/staging.cuh"

namespace convt_reduce::cuda {

constexpr int kLinePieces = kLineBytes / kVectorBytes;
constexpr int kPairTerms = 2 * kStep;
constexpr int kLinesOfPart = 4;  // of a sum before it is added to the totals
constexpr int kMostInputPositions = 1024;
constexpr int kPositionThreads = 256;  // of a block that folds
constexpr int kFinishInputThreads = 128;
constexpr int kFinishInputBlocks = 6;  // of a multiprocessor

// The pieces of two steps' weights for 8 output channels, as Fragment has those of one.
struct FragmentPair {
  uint4 large[2][kWarp];
  uint4 small[kWarp];
};
constexpr int kPairPieces = sizeof(FragmentPair) / kVectorBytes;

// Folded weights are [group][line][pair of steps][columns8] of fragment pairs.
struct InputArguments {
  const void* data;
  int64_t row_bytes;  // from one batch element to the next
  AxisBands<int> depths;
  AxisBands<int> rows;
  AxisBands<int> columns;
  int positions;
  int terms;     // of a row and group: channels * positions
  int lines;     // of these, rounded up
  int columns8;  // fragments side by side
  int slice;     // lines
  int slices;
  int finish_lanes;  // threads of a result where parts are added
  int shared_bytes;  // of a block that multiplies
  int tile_rows;     // its batch elements
  int64_t tiles;     // of the batch
  int64_t blocks;    // groups * tiles * slices
  int row_pairs;     // of steps of a row
  int fold_pairs;    // of a block that folds
  int fold_parts;    // such blocks of a row
  int64_t fold_blocks;
};

// Where in a pair of steps the two terms of a half of a lane's share of a step begin: as it reads
// them, 16 bytes of floats at a time, or, of 16-bit elements, as matrices of 8 x 8.
template <typename T>
__device__ inline int term_of(int lane_term, int step, int half) {
  return step * kStep +
         (sizeof(T) == sizeof(float) ? lane_term * 4 + half * 2 : half * 8 + lane_term * 2);
}

// The 16 bytes that begin `phase` bytes, an even number, behind those of `low`.
__device__ inline uint4 shifted(const uint4& low, const uint4& high, int phase) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = phase & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = phase & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], phase % 4 * 8);
  return {words[0], words[1], words[2], words[3]};
}

// A thread's pieces of a line of some rows, 16-bit elements whose pairs are no words: zeros behind
// the rows. Nothing outside [limit_begin, limit_end) is read.
template <int kCount, typename T>
__device__ __noinline__ void copy_slowly(const unsigned char* from, int rows, int64_t rows_apart,
                                         int left, uint4* to, int to_apart, uintptr_t limit_begin,
                                         uintptr_t limit_end) {
  constexpr int kTerms = kVectorBytes / static_cast<int>(sizeof(T));
  if (rows <= 0) return;
  const int phase = phase_of(address_of(from));
  const uintptr_t first = address_of(from) - phase;
  if (left >= kTerms && first >= limit_begin &&
      first + (rows - 1) * rows_apart + 2 * kPiece <= limit_end) {
    uint4 pieces[kCount][2];  // all loads before the first use, so that they overlap
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const auto* vectors = reinterpret_cast<const uint4*>(first + min(j, rows - 1) * rows_apart);
      pieces[j][0] = vectors[0];
      pieces[j][1] = vectors[1];
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < rows) to[j * to_apart] = shifted(pieces[j][0], pieces[j][1], phase);
    }
    return;
  }
#pragma unroll 1
  for (int j = 0; j < rows; ++j) {
    const T* elements = reinterpret_cast<const T*>(from + j * rows_apart);
    T values[kTerms];
#pragma unroll
    for (int e = 0; e < kTerms; ++e) values[e] = e < left ? elements[e] : narrow<T>(0.0f);
#pragma unroll
    for (int e = 0; e < kTerms; ++e) reinterpret_cast<T*>(to + j * to_apart)[e] = values[e];
  }
}

// A mean from the input itself, without folding: see careful_term. In line, and its loops as they
// stand: as a function of its own it would take more registers than the kernels, which have to
// grant them.
template <typename T>
__device__ __forceinline__ float careful_mean_of(const CombineArguments& p, int64_t o,
                                                 const T* row) {
  const Channel channel(p, o);
  const int64_t cells = p.cells.count();
  const AxisCells* axis = p.cells.axis;
  const int64_t positions = axis[0].axis.size * axis[1].axis.size * axis[2].axis.size;
  float mean = 0;
#pragma unroll 1
  for (int64_t term = 0; term < p.depth; ++term) {
    const int64_t c = quotient(term, cells);
    const CellBands b = bands_of(p.cells, term - c * cells);
    const T* plane = row + (channel.c_begin + c) * positions;
    float sum = 0;
    for (int64_t d = axis[0].band(b.b[0]).begin; d < axis[0].end(b.b[0]); ++d) {
#pragma unroll 1
      for (int64_t h = axis[1].band(b.b[1]).begin; h < axis[1].end(b.b[1]); ++h) {
        const T* from = plane + (d * axis[1].axis.size + h) * axis[2].axis.size;
#pragma unroll 1
        for (int64_t w = axis[2].band(b.b[2]).begin; w < axis[2].end(b.b[2]); ++w) {
          sum += widen(from[w]);
        }
      }
    }
    mean += careful_term<T>(p, channel, term, sum);
  }
  return mean;
}

// A result whose mean came out not finite.
template <typename T>
__device__ __forceinline__ void put_carefully(const CombineArguments& p, const InputArguments& a,
                                              int64_t n, int64_t o, T* y) {
  const auto* row = static_cast<const unsigned char*>(a.data) + n * a.row_bytes;
  const float mean = careful_mean_of(p, o, reinterpret_cast<const T*>(row));
  y[n * p.c_out + o] = result<T>(p, mean, bias_of<T>(p, o));
}

// Adds parts. a.finish_lanes threads have a result, each every so many-th slice, so that many parts
// are on their way at a time.
template <typename T>
__global__ void __launch_bounds__(kFinishInputThreads, kFinishInputBlocks)
    finish_input_kernel(const __grid_constant__ CombineArguments p,
                        const __grid_constant__ InputArguments a, const float* parts, T* y) {
  __shared__ float sums[kFinishInputThreads];
  __shared__ float losts[kFinishInputThreads];
  constexpr int kLoads = 8;
  const int columns = kFinishInputThreads / a.finish_lanes;
  const int first = threadIdx.x / columns;
  const int column = threadIdx.x - first * columns;
  const int64_t total = p.batch * p.c_out;
  bool waited = false;
  for (int64_t begin = blockIdx.x * int64_t{columns}; begin < total;
       begin += int64_t{gridDim.x} * columns) {
    const int64_t i = begin + column;
    const int64_t n = quotient(i, p.c_out);
    const int64_t o = i - n * p.c_out;
    const float bias = bias_of<T>(p, o);
    if (!waited) {
      wait_for_previous_kernel();
      // Not before: blocks of the next call would take places from those that multiply.
      let_next_kernel_start();
      waited = true;
    }
    float sum = 0;
    float lost = 0;
    if (i < total) {
#pragma unroll 1
      for (int slice = first; slice < a.slices; slice += kLoads * a.finish_lanes) {
        float loaded[kLoads];  // all loads before the first use, so that they overlap
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          const int of = slice + k * a.finish_lanes;
          loaded[k] = of < a.slices ? parts[of * total + i] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kLoads; ++k) add_exactly(sum, lost, loaded[k]);
      }
    }
    if (a.finish_lanes > 1) {
      __syncthreads();
      sums[threadIdx.x] = sum;
      losts[threadIdx.x] = lost;
      __syncthreads();
    }
    if (i >= total || first != 0) continue;
    for (int lane = 1; lane < a.finish_lanes; ++lane) {
      add_exactly(sum, lost, sums[lane * columns + column]);
      lost += losts[lane * columns + column];
    }
    const float mean = settled(sum, lost);
    y[i] = result<T>(p, mean, bias);
    if (!isfinite(mean)) put_carefully(p, a, n, o, y);
  }
  if (!waited) wait_for_previous_kernel();
}

}  // namespace convt_reduce::cuda
