// The matrix product of the input itself with folded weights: stats_combine.cuh.
#pragma once

#include <type_traits>

#include "cuda/stats_combine.cuh"

namespace convt_reduce::cuda {

constexpr int kInputWarps = 4;
constexpr int kInputThreads = kInputWarps * kWarp;
constexpr int kInputRows = kInputWarps * kRows16;  // batch elements of a block
// Lines of each batch element that are there or on their way: as many as fit where any card grants
// their memory.
template <int kWidth, typename T>
constexpr int kInputStages = kWidth == 1 || sizeof(T) == sizeof(float) ? 4 : 3;

// Blocks of a multiprocessor, for which there are registers: more than are at work at a time, so
// that the next kernel's find some too.
template <int kWidth>
constexpr int kInputBlocks = kWidth == 1 ? 5 : 4;

template <int kWidth, typename T>
struct InputStage {
  static constexpr int kPairs = kLineBytes / static_cast<int>(sizeof(T)) / kPairTerms;
  uint4 lines[kInputRows][kLinePieces];
  FragmentPair weights[kPairs][kWidth];
};

// Where a piece of a row lies: neighbouring rows would meet in the same banks.
__device__ __forceinline__ int place_of(int row, int piece) {
  return piece ^ (row % 2 * 4 + row / 2 % 4);
}

// A step's terms of 16 batch elements in pieces, as tensor cores take them. `lines` are the warp's.
template <typename T>
__device__ __forceinline__ void take_step(const uint4 (*lines)[kLinePieces], int step, int lane,
                                          uint32_t (&pieces)[3][4]) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      const uint4 v = lines[row][place_of(row, step * 4 + lane % 4)];
      split_pair(__uint_as_float(v.x), __uint_as_float(v.y), pieces[0][half], pieces[1][half],
                 pieces[2][half]);
      split_pair(__uint_as_float(v.z), __uint_as_float(v.w), pieces[0][half + 2],
                 pieces[1][half + 2], pieces[2][half + 2]);
    }
  } else {
    const int row = lane % kRows16;
    load_matrices(&lines[row][place_of(row, step * 2 + lane / kRows16)], pieces[0]);
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = __half22float2(reinterpret_cast<const __half2&>(pieces[0][i]));
        split_pair(v.x, v.y, pieces[0][i], pieces[1][i], pieces[2][i]);
      }
    }
  }
}

// results += a step's products. Of the pieces of a bfloat16 there is one, and of a float16 two.
template <typename T, int kWidth>
__device__ __forceinline__ void multiply_pieces(const uint32_t (&pieces)[3][4],
                                                const uint32_t (&weights)[kWidth][3][2],
                                                float (&results)[kWidth][4]) {
  // Of an element and of a weight: small products first.
  constexpr int kProducts[6][2] = {{2, 0}, {1, 1}, {1, 0}, {0, 2}, {0, 1}, {0, 0}};
  constexpr int kFirst = std::is_same_v<T, __nv_bfloat16> ? 3 : std::is_same_v<T, __half> ? 1 : 0;
  float step[kWidth][4];
#pragma unroll
  for (int product = kFirst; product < 6; ++product) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const auto& weight = weights[j][kProducts[product][1]];
      const auto& piece = pieces[kProducts[product][0]];
      if (product == kFirst) {
        multiply(step[j], piece, weight[0], weight[1]);
      } else {
        multiply_add(step[j], piece, weight[0], weight[1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) results[j][e] += step[j][e];
  }
}

// A line of a warp's 16 batch elements, word by word: where it lies on no 16 bytes or reaches
// behind the row, of which `left` bytes are left. Zeros behind them.
__device__ __forceinline__ void copy_words(const unsigned char* from, int64_t row_bytes, int rows,
                                           int left, int lane, uint4 (*to)[kLinePieces]) {
  constexpr int kWord = 4;
  const unsigned char* word = from + lane * kWord;
  const int bytes = min(max(left - lane * kWord, 0), kWord);
#pragma unroll 2
  for (int row = 0; row < rows; ++row, word += row_bytes) {
    uint32_t* place = reinterpret_cast<uint32_t*>(&to[row][place_of(row, lane / 4)]) + lane % 4;
    copy_async<kWord>(place, word, bytes);
  }
}

// A block has up to 64 batch elements; each of its warps 16 of them and kWidth * 8 output channels,
// all of a group, so that an element is taken apart once.
template <int kWidth, typename T>
__global__ void __launch_bounds__(kInputThreads, kInputBlocks<kWidth>)
    multiply_input_kernel(const __grid_constant__ CombineArguments p,
                          const __grid_constant__ InputArguments a, const FragmentPair* folded,
                          float* parts, T* y) {
  using Stage = InputStage<kWidth, T>;
  static_assert(kInputStages<kWidth, T> * sizeof(Stage) <= 48 * 1024);
  constexpr int kStages = kInputStages<kWidth, T>;
  constexpr int kElement = static_cast<int>(sizeof(T));
  constexpr int kLineTerms = kLineBytes / kElement;
  constexpr int kLoads = kInputRows * kLinePieces / kInputThreads;  // of a thread, from rows
  constexpr int kRowsApart = kInputThreads / kLinePieces;           // of these
  constexpr int kWeightPieces = Stage::kPairs * kWidth * kPairPieces;
  constexpr int kSteps = kLineTerms / kStep;
  static_assert(kRowsApart % 8 == 0, "rows of a thread have one place");
  if constexpr (!has_tensor_cores()) {
    __trap();  // not launched
    return;
  }
  extern __shared__ uint4 stages_shared[];
  Stage* const stages = reinterpret_cast<Stage*>(stages_shared);
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int load_row = threadIdx.x / kLinePieces;
  const int load_piece = threadIdx.x % kLinePieces;
  const int load_rows = (a.tile_rows - load_row + kRowsApart - 1) / kRowsApart;  // of a thread
  bool waited = false;

  for (int64_t block = blockIdx.x; block < a.blocks; block += gridDim.x) {
    const int64_t rest = quotient(block, a.slices);
    const int slice = static_cast<int>(block - rest * a.slices);
    const int64_t group = quotient(rest, a.tiles);
    // The last tile is as long as the others, and has some batch elements again.
    const int64_t n_begin = min((rest - group * a.tiles) * a.tile_rows, p.batch - a.tile_rows);
    const int line_begin = slice * a.slice;
    const int lines = min(a.slice, a.lines - line_begin);

    const unsigned char* const rows =
        static_cast<const unsigned char*>(a.data) + n_begin * a.row_bytes +
        (group * a.terms + int64_t{line_begin} * kLineTerms) * kElement;
    const int whole = address_of(rows) % kVectorBytes == 0 ? a.terms / kLineTerms - line_begin : 0;
    const unsigned char* next_line = rows + load_row * a.row_bytes + load_piece * kVectorBytes;
    const auto load_line = [&](int line, Stage& stage) {
      if (line < whole) {
        uint4* to = &stage.lines[load_row][place_of(load_row, load_piece)];
        uintptr_t from = address_of(next_line);
#pragma unroll
        for (int j = 0; j < kLoads; ++j, from += kRowsApart * a.row_bytes) {
          if (j >= load_rows) break;
          start_passing_piece(reinterpret_cast<unsigned char*>(to + j * kRowsApart * kLinePieces),
                              from);
        }
      } else if (kElement == 2 && address_of(rows) % 4 != 0) {
        const int term = (line_begin + line) * kLineTerms + load_piece * (kVectorBytes / kElement);
        const uintptr_t limit = address_of(a.data) + (p.batch - 1) * a.row_bytes +
                                p.c_in * a.positions * int64_t{kElement};
        copy_slowly<kLoads, T>(next_line, load_rows, kRowsApart * a.row_bytes, a.terms - term,
                               &stage.lines[load_row][place_of(load_row, load_piece)],
                               kRowsApart * kLinePieces, address_of(a.data), limit);
      } else {
        const int rows_of_warp = min(a.tile_rows - warp * kRows16, kRows16);
        const int left = (a.terms - (line_begin + line) * kLineTerms) * kElement;
        copy_words(rows + warp * kRows16 * a.row_bytes + int64_t{line} * kLineBytes, a.row_bytes,
                   rows_of_warp, left, lane, stage.lines + warp * kRows16);
      }
      next_line += kLineBytes;
    };
    const uint4* next_weights =
        reinterpret_cast<const uint4*>(folded +
                                       (group * a.lines + line_begin) * (Stage::kPairs * kWidth)) +
        threadIdx.x;
    const auto load_weights = [&](Stage& stage) {
      uint4* to = reinterpret_cast<uint4*>(stage.weights) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < kWeightPieces; i += kInputThreads) {
        if (i + kInputThreads <= kWeightPieces || i + threadIdx.x < kWeightPieces) {
          start_piece(reinterpret_cast<unsigned char*>(to + i), address_of(next_weights + i));
        }
      }
      next_weights += kWeightPieces;
    };
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < lines) load_line(s, stages[s]);
    }
    if (!waited) {
      wait_for_previous_kernel();
      let_next_kernel_start();
      waited = true;
    }
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < lines) load_weights(stages[s]);
      close_batch();
    }

    float results[kWidth][4] = {};
    float totals[kWidth][4] = {};
    float lost[kWidth][4] = {};
    int stage = 0;
    int ahead = kStages - 1;
#pragma unroll 1
    for (int line = 0; line < lines; ++line) {
      wait_for_batches<kStages - 2>();
      __syncthreads();
      if (line + kStages - 1 < lines) {
        load_line(line + kStages - 1, stages[ahead]);
        load_weights(stages[ahead]);
      }
      close_batch();
      const Stage& now = stages[stage];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int pair = step / 2;
        uint32_t weights[kWidth][3][2];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const FragmentPair& from = now.weights[pair][j];
          const uint4 large = from.large[step % 2][lane];
          const uint2 small = reinterpret_cast<const uint2*>(&from.small[lane])[step % 2];
          weights[j][0][0] = large.x;
          weights[j][0][1] = large.y;
          weights[j][1][0] = large.z;
          weights[j][1][1] = large.w;
          weights[j][2][0] = small.x;
          weights[j][2][1] = small.y;
        }
        uint32_t pieces[3][4];
        take_step<T>(now.lines + warp * kRows16, step, lane, pieces);
        multiply_pieces<T>(pieces, weights, results);
      }
      if ((line + 1) % kLinesOfPart == 0) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            add_exactly(totals[j][e], lost[j][e], results[j][e]);
            results[j][e] = 0;
          }
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    }
    wait_for_batches<0>();
    __syncthreads();

    const int row = warp * kRows16 + lane / 4;  // of the tile; and the one 8 below
    uint32_t rare = 0;                          // a bit for each of these
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = j * kColumns8 + lane % 4 * 2 + e % 2;
        if (column >= p.group_out || row + e / 2 * 8 >= a.tile_rows) continue;
        add_exactly(totals[j][e], lost[j][e], results[j][e]);
        const float mean = settled(totals[j][e], lost[j][e]);
        const int64_t o = group * p.group_out + column;
        const int64_t of = n_begin + row + e / 2 * 8;
        if (a.slices > 1) {
          parts[(slice * p.batch + of) * p.c_out + o] = mean;
        } else {
          y[of * p.c_out + o] = result<T>(p, mean, bias_of<T>(p, o));
          if (!isfinite(mean)) rare |= 1u << (j * 4 + e);
        }
      }
    }
#pragma unroll 1
    for (; rare != 0; rare &= rare - 1) {
      const int i = __ffs(static_cast<int>(rare)) - 1;
      const int column = i / 4 * kColumns8 + lane % 4 * 2 + i % 2;
      put_carefully(p, a, n_begin + row + i % 4 / 2 * 8, group * p.group_out + column, y);
    }
  }
  if (!waited) wait_for_previous_kernel();
}

}  // namespace convt_reduce::cuda
