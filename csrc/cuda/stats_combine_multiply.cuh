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

// Blocks of a multiprocessor, for which there are registers.
template <int kWidth>
constexpr int kInputBlocks = kWidth == 1 ? 4 : 3;

template <int kWidth, typename T>
struct InputStage {
  static constexpr int kPairs = kLineBytes / static_cast<int>(sizeof(T)) / kPairTerms;
  uint4 lines[kInputRows][kLinePieces];
  FragmentPair weights[kPairs][kWidth];
};

// Four terms of two batch elements as pieces. `from` has the lane's 16 bytes of each: where
// elements are 16 bits, the terms of two steps.
template <typename T>
__device__ __forceinline__ void take_apart(const uint4 (&from)[2], int step,
                                           uint32_t (&pieces)[3][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& four = from[half];
    float4 v;
    if constexpr (std::is_same_v<T, float>) {
      v = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
           __uint_as_float(four.w)};
    } else {
      const uint32_t first = step == 0 ? four.x : four.z;
      const uint32_t second = step == 0 ? four.y : four.w;
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        pieces[0][half] = first;
        pieces[0][half + 2] = second;
        continue;
      }
      const float2 low = __half22float2(reinterpret_cast<const __half2&>(first));
      const float2 high = __half22float2(reinterpret_cast<const __half2&>(second));
      v = {low.x, low.y, high.x, high.y};
    }
    split_pair(v.x, v.y, pieces[0][half], pieces[1][half], pieces[2][half]);
    split_pair(v.z, v.w, pieces[0][half + 2], pieces[1][half + 2], pieces[2][half + 2]);
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
  float step[kWidth][4] = {};
#pragma unroll
  for (int product = kFirst; product < 6; ++product) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const auto& weight = weights[j][kProducts[product][1]];
      multiply_add(step[j], pieces[kProducts[product][0]], weight[0], weight[1]);
    }
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) results[j][e] += step[j][e];
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
  constexpr int kLineTerms = kLineBytes / static_cast<int>(sizeof(T));
  constexpr int kPieceTerms = kVectorBytes / static_cast<int>(sizeof(T));
  constexpr int kLoads = kInputRows * kLinePieces / kInputThreads;  // of a thread, from rows
  constexpr int kRowsApart = kInputThreads / kLinePieces;           // of these
  constexpr int kWeightPieces = Stage::kPairs * kWidth * kPairPieces;
  constexpr int kWeightLoads = (kWeightPieces + kInputThreads - 1) / kInputThreads;
  constexpr int kSteps = kLineTerms / kStep;
  static_assert(kRowsApart % 2 == 0, "rows of a thread have one place");
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
  // Neighbouring rows would meet in the same banks.
  const auto place = [](int row, int piece) { return piece ^ (row % 2 * 4); };
  const int load_rows = (a.tile_rows - load_row + kRowsApart - 1) / kRowsApart;  // of a thread
  const uintptr_t limit = address_of(a.data) + (p.batch - 1) * a.row_bytes +
                          p.c_in * a.positions * static_cast<int64_t>(sizeof(T));
  bool waited = false;

  for (int64_t block = blockIdx.x; block < a.blocks; block += gridDim.x) {
    const int64_t rest = quotient(block, a.slices);
    const int slice = static_cast<int>(block - rest * a.slices);
    const int64_t group = quotient(rest, a.tiles);
    // The last tile is as long as the others, and has some batch elements again.
    const int64_t n_begin = min((rest - group * a.tiles) * a.tile_rows, p.batch - a.tile_rows);
    const int line_begin = slice * a.slice;
    const int lines = min(a.slice, a.lines - line_begin);

    const unsigned char* next_line =
        static_cast<const unsigned char*>(a.data) + (n_begin + load_row) * a.row_bytes +
        (group * a.terms + (line_begin * kLinePieces + load_piece) * int64_t{kPieceTerms}) *
            static_cast<int64_t>(sizeof(T));
    const bool aligned =
        address_of(next_line) % kVectorBytes == 0 && a.row_bytes % kVectorBytes == 0;
    const int whole = aligned ? a.terms / kLineTerms - line_begin : 0;
    const uint4* next_weights[kWeightLoads];
#pragma unroll
    for (int j = 0; j < kWeightLoads; ++j) {
      const int i = j * kInputThreads + threadIdx.x;
      const int pair = i / (kWidth * kPairPieces);
      const int piece = min(i - pair * (kWidth * kPairPieces), a.columns8 * kPairPieces - 1);
      const int64_t line = group * a.lines + line_begin;
      next_weights[j] =
          reinterpret_cast<const uint4*>(folded + (line * Stage::kPairs + pair) * a.columns8) +
          piece;
    }
    const auto load_line = [&](int line, Stage& stage) {
      uint4* to = &stage.lines[load_row][place(load_row, load_piece)];
      constexpr int kToApart = kRowsApart * kLinePieces;
      const int64_t apart = kRowsApart * a.row_bytes;
      if (line < whole) {
        uintptr_t from = address_of(next_line);
#pragma unroll
        for (int j = 0; j < kLoads; ++j, from += apart) {
          if (j >= load_rows) break;
          start_piece(reinterpret_cast<unsigned char*>(to + j * kToApart), from);
        }
      } else {
        const int term = (line_begin + line) * kLineTerms + load_piece * kPieceTerms;
        copy_slowly<kLoads, T>(next_line, load_rows, apart, a.terms - term, to, kToApart,
                               address_of(a.data), limit);
      }
      next_line += kLineBytes;
    };
    const auto load_weights = [&](Stage& stage) {
      uint4* to = reinterpret_cast<uint4*>(stage.weights) + threadIdx.x;
#pragma unroll
      for (int j = 0; j < kWeightLoads; ++j) {
        if (kWeightPieces % kInputThreads == 0 || j * kInputThreads + threadIdx.x < kWeightPieces) {
          start_piece(reinterpret_cast<unsigned char*>(to + j * kInputThreads),
                      address_of(next_weights[j]));
        }
        next_weights[j] += Stage::kPairs * kPairPieces * a.columns8;
      }
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
        uint4 elements[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int of_row = warp * kRows16 + half * 8 + lane / 4;
          const int piece = (std::is_same_v<T, float> ? step : pair) * 4 + lane % 4;
          elements[half] = now.lines[of_row][place(of_row, piece)];
        }
        uint32_t pieces[3][4];
        take_apart<T>(elements, step % 2, pieces);
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
          y[of * p.c_out + o] = mean_result<T>(p, a, of, o, mean);
        }
      }
    }
  }
  if (!waited) wait_for_previous_kernel();
}

}  // namespace convt_reduce::cuda
