// Folding weights into fragments: what the kernels that do it share.
#pragma once

#include "cuda/combine.cuh"
#include "cuda/pieces.cuh"

namespace convt_reduce::cuda {

constexpr int kFoldChannels = 16;  // input channels of a team: their terms are whole steps
static_assert(kFoldChannels == kStep,
              "as many channels as terms of a step: cells steps of a chunk");
constexpr int kFoldThreads = kFoldChannels * kColumns8;
constexpr int kMostFoldCells = 64;
constexpr int kMostFoldTaps = 64;

// Which taps cover each cell, a bit for each.
struct Covers {
  uint64_t of_cell[kMostFoldCells];
};

__device__ inline void put_fragment(const float4& v, int lane, Fragment& to) {
  uint4 large;
  uint2 small;
  split_pair(v.x, v.y, large.x, large.z, small.x);
  split_pair(v.z, v.w, large.y, large.w, small.y);
  to.large[lane] = large;
  to.small[lane] = small;
}

__device__ inline void put_fragment(const float4& v, int lane, Matrices& to) {
  split_pair(v.x, v.y, to.at[0][0][lane], to.at[1][0][lane], to.at[2][0][lane]);
  split_pair(v.z, v.w, to.at[0][1][lane], to.at[1][1][lane], to.at[2][1][lane]);
}

// A fragment in either form.
struct EitherFragment {
  Fragment* at;
  bool matrices;
};

__device__ inline void put_fragment(const float4& v, int lane, const EitherFragment& to) {
  if (to.matrices) {
    put_fragment(v, lane, *reinterpret_cast<Matrices*>(to.at));
  } else {
    put_fragment(v, lane, *to.at);
  }
}

// Floats of shared memory for a team of kFoldThreads threads.
template <int kTaps>
CONVT_HD inline int fold_floats(int cells) {
  const int weights = kFoldThreads * (kTaps | 1);
  const int sums = kColumns8 * (kFoldChannels * cells + 4);
  return weights > sums ? weights : sums;
}

// The threads that fold: all of a block, in whole teams.
struct BlockTeams {
  __device__ int count() const { return blockDim.x / kFoldThreads; }
  __device__ void meet() const { __syncthreads(); }
};

// Of what a thread of a team loads for 16 channels each: past the last output channel, nothing.
template <int kTaps>
struct FoldLoads {
  static constexpr int kCount = (kColumns8 * kTaps + kFoldThreads - 1) / kFoldThreads;
  int out[kCount];
  int tap[kCount];
  int64_t from[kCount];

  __device__ explicit FoldLoads(const CombineArguments& p) {
    const int taps2 = static_cast<int>(p.cells.axis[2].axis.kernel);
    const int taps1 = static_cast<int>(p.cells.axis[1].axis.kernel);
    const int taps = static_cast<int>(p.cells.axis[0].axis.kernel) * taps1 * taps2;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int i = j * kFoldThreads + static_cast<int>(threadIdx.x) % kFoldThreads;
      out[j] = i / taps;
      tap[j] = i - out[j] * taps;
      const int row = tap[j] / taps2;
      const int t0 = row / taps1;
      from[j] = out[j] * p.weight.stride_c_out + t0 * p.weight.stride[0] +
                (row - t0 * taps1) * p.weight.stride[1] +
                (tap[j] - row * taps2) * p.weight.stride[2];
    }
  }
};

// What a team folds at a time.
struct FoldItem {
  int of_chunks;  // which of the chunks,
  int column;     // and which of the columns
  int channels;   // of input, 0 past the last
  int outs;
  int64_t c_begin;
  int64_t o_begin;
};

// Folds the weights of `chunks` times 16 input channels and `across` times 8 output channels of a
// group, for up to kTaps taps and kMostFoldCells cells, and calls to(step, column) for where each
// fragment belongs, from 0 on. A team has 16 input channels and 8 output channels at a time, a
// thread one of each: its taps fit in registers. They come through shared memory, since in global
// memory it is a thread's own taps that are neighbours. All teams call it as one.
// kAhead: a thread's loads for the next are on their way while it folds one.
template <int kTaps, bool kAhead, typename T, typename Teams, typename To>
__device__ __forceinline__ void fold_weights(const CombineArguments& p, const Covers& covers,
                                             const Teams& all_teams, const FoldLoads<kTaps>& loads,
                                             int64_t group, int64_t chunk_begin, int chunks,
                                             int64_t column_begin, int across, int64_t all_steps,
                                             float* shared, const To& to) {
  static_assert(!kAhead || FoldLoads<kTaps>::kCount == 1, "one load at a time is kept");
  constexpr int kCellsTogether = kTaps <= 9 ? 4 : 1;
  constexpr int kApart = kTaps | 1;  // odd: so that threads read from different banks
  const int cells = static_cast<int>(p.cells.count());
  const int terms_apart = kFoldChannels * cells + 4;
  const int teams = all_teams.count();
  const int team = threadIdx.x / kFoldThreads;
  const int thread = threadIdx.x % kFoldThreads;
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;
  const int own_c = thread / kColumns8;
  const int own_o = thread % kColumns8;
  const float scale = static_cast<float>(p.scale);
  const int64_t stride = p.weight.stride_c_in;
  float* const staged = shared + team * fold_floats<kTaps>(cells);  // [channels][outs][kApart]
  float* const sums = staged;                                       // and then [outs][terms]

  T loaded[kFoldChannels];  // all loads before the first store, so that they overlap
  const auto load = [&](const FoldItem& item, int j) {
    const T* w = static_cast<const T*>(p.weight.data) +
                 (group * p.group_in + item.c_begin) * stride +
                 item.o_begin * p.weight.stride_c_out + loads.from[j];
    if (item.channels == kFoldChannels) {
#pragma unroll
      for (int c = 0; c < kFoldChannels; ++c, w += stride) loaded[c] = *w;
    } else {
#pragma unroll
      for (int c = 0; c < kFoldChannels; ++c) {
        loaded[c] = *w;
        if (c + 1 < item.channels) w += stride;
      }
    }
  };
  const auto item_at = [&](int number) {
    FoldItem item;
    item.of_chunks = number / across;
    item.column = number - item.of_chunks * across;
    item.c_begin = (chunk_begin + item.of_chunks) * kFoldChannels;
    item.o_begin = (column_begin + item.column) * kColumns8;
    item.channels = item.of_chunks < chunks
                        ? static_cast<int>(min(p.group_in - item.c_begin, int64_t{kFoldChannels}))
                        : 0;
    item.outs = static_cast<int>(min(p.group_out - item.o_begin, int64_t{kColumns8}));
    return item;
  };
  FoldItem next;
  const auto load_next = [&](int number) {  // maybe past the last: of no channels then
    next = item_at(number);
    if (loads.out[0] < next.outs && next.channels > 0) load(next, 0);
  };
  if constexpr (kAhead) load_next(team);
  for (int first = 0; first < chunks * across; first += teams) {
    const FoldItem item = kAhead ? next : item_at(first + team);
    const int channels = item.channels;
    const int outs = item.outs;
#pragma unroll
    for (int j = 0; j < FoldLoads<kTaps>::kCount; ++j) {
      if (loads.out[j] >= outs || channels <= 0) break;
      if (!kAhead) load(item, j);
#pragma unroll
      for (int c = 0; c < kFoldChannels; ++c) {
        staged[(c * kColumns8 + loads.out[j]) * kApart + loads.tap[j]] = widen(loaded[c]);
      }
    }
    if constexpr (kAhead) load_next(first + teams + team);
    all_teams.meet();
    float weights[kTaps];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) weights[tap] = staged[thread * kApart + tap];
    all_teams.meet();
    const bool exists = own_c < channels && own_o < outs;
#pragma unroll kCellsTogether
    for (int cell = 0; cell < cells; ++cell) {
      const uint64_t bits = covers.of_cell[cell];
      float sum = 0;
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        if (bits >> tap & 1) sum += weights[tap];
      }
      sums[own_o * terms_apart + own_c * cells + cell] = exists ? sum * scale : 0.0f;
    }
    all_teams.meet();
    const int step_begin = item.of_chunks * cells;
    const int64_t left = all_steps - chunk_begin * cells - step_begin;
    const int steps = item.of_chunks < chunks ? static_cast<int>(min(left, int64_t{cells})) : 0;
    for (int step = warp; step < steps; step += kFoldThreads / kWarp) {
      const float4 v = *reinterpret_cast<const float4*>(sums + lane / 4 * terms_apart +
                                                        step * kStep + lane % 4 * 4);
      put_fragment(v, lane, to(step_begin + step, item.column));
    }
    all_teams.meet();
  }
}

inline int64_t taps_of(const Cells& cells) {
  return cells.axis[0].axis.kernel * cells.axis[1].axis.kernel * cells.axis[2].axis.kernel;
}

// Whether cells and taps are few enough for Covers, and no table of bands is needed.
inline bool fits_covers(const Cells& cells) {
  return cells.count() <= kMostFoldCells && taps_of(cells) <= kMostFoldTaps && !needs_table(cells);
}

inline Covers covers_of(const CombineArguments& p) {
  Covers covers = {};
  const int64_t taps1 = p.cells.axis[1].axis.kernel;
  const int64_t taps2 = p.cells.axis[2].axis.kernel;
  for (int64_t cell = 0; cell < p.cells.count(); ++cell) {
    const CellBands bands = bands_of(p.cells, cell);
    const Band& band0 = p.cells.axis[0].band(bands.b[0]);
    const Band& band1 = p.cells.axis[1].band(bands.b[1]);
    const Band& band2 = p.cells.axis[2].band(bands.b[2]);
    for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
      for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
        for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
          covers.of_cell[cell] |= uint64_t{1} << ((t0 * taps1 + t1) * taps2 + t2);
        }
      }
    }
  }
  return covers;
}

// Queues a kernel that writes `folded` [group][steps][columns8], as `matrices` or as fragments,
// while stats still reads.
cudaError_t launch_fold(const CombineArguments& p, Dtype dtype, int64_t steps, int64_t columns8,
                        bool matrices, const Queue& queue, Fragment* folded);

}  // namespace convt_reduce::cuda
