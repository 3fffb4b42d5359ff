// Stats for inputs whose channels are neighbours in memory, where positions are read in groups that
// are whole vectors: one position, or a few where a position is not. A block has a chunk of some
// images, one after the other.
//
// `lanes` threads have the vectors of a group, always the same, so that each of a thread's elements
// stays with one channel. Three channels of four bytes, four positions in three vectors:
//
//     a b c a | b c a b | c a b c
//
// Some groups of a row, and some rows where these are short, make up a step: one load of every
// thread. Most steps lie in one cell. In one across a cut, all threads read too, and each adds its
// elements to the cells that they are in. So no step is read twice, and there is no end of a row
// for which others wait. Which steps there are is listed once per block, for all of its images.
#pragma once

#include "cuda/fold_beside.cuh"
#include "cuda/stats_steps_run.cuh"

namespace convt_reduce::cuda {

// Threads of a processor that the registers have room for: fewer if each has two tiles.
constexpr int steps_processor_threads(bool two_tiles) { return two_tiles ? 512 : 1024; }

// t / d for t and d of up to 1024, by the reciprocal of d.
constexpr int kReciprocalBits = 20;
inline unsigned reciprocal(int64_t d) {
  return static_cast<unsigned>(ceil_div(int64_t{1} << kReciprocalBits, d));
}
__device__ inline int times_reciprocal(unsigned t, unsigned reciprocal) {
  return static_cast<int>((t * reciprocal) >> kReciprocalBits);
}

struct StepsArguments {
  Input input;
  AxisBands<int> axis[kAxes];
  AxisRuns runs[kAxes];
  int64_t batch;
  int64_t channels;
  unsigned tiles;  // of channels
  int positions;   // of a group
  int lanes;
  int groups;     // of a step
  int rows;       // of a step
  int images;     // of a block at the same time,
  int64_t turns;  // and one after the other
  int64_t all_turns;
  int split;  // log2 of the threads that share the terms of an output
  int cells;
  int step[kAxes];        // positions
  unsigned bytes[kAxes];  // from one position to the next
  int steps[kAxes];       // of a chunk
  int all_steps[kAxes];   // of an axis
  int count[kAxes];       // of chunks
  unsigned chunks;        // of an image
  unsigned over_lanes;    // reciprocals
  unsigned over_groups;
  unsigned over_rows;
  unsigned over_cells;
  int places[kAxes];  // StepsRoom tells this and the following
  int all_places;
  int pitch;
  int runs_at;
  int steps_at;
  int cells_at;
  int sums_at;
  int ahead;            // bytes that a block asks for before it lists its chunk,
  int64_t image_bytes;  // of an image without gaps
};

// What a block reads first comes to the cache while it lists its chunk, and while the kernel before
// ours ends. Blocks that differ in the tile of channels only ask for a part each.
template <typename T>
__device__ __forceinline__ void ask_ahead(const StepsArguments& p, const StepsChunk& own, int64_t n,
                                          int64_t tile) {
  int64_t at = tile * p.ahead;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) at += int64_t{own.begin[a]} * p.bytes[a];
  const int64_t end_at = min(at + p.ahead, p.image_bytes);
  const auto image =
      reinterpret_cast<uintptr_t>(static_cast<const T*>(p.input.data) + n * p.input.stride_n);
  const uintptr_t begin = (image + at + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  const uintptr_t end = (image + end_at) / kVectorBytes * kVectorBytes;
  if (begin < end) ask_for_cache(begin, static_cast<unsigned>(end - begin));
}

// The sum of a channel over the walkers of an image, of which 2^split threads add a share each.
template <typename T>
__device__ __forceinline__ AccumulateOf<T> sum_of_walkers(const StepsArguments& p,
                                                          const AccumulateOf<T>* sums, int image,
                                                          int channel, int part) {
  using Acc = AccumulateOf<T>;
  constexpr int kElements = Vector<T>::kSize;
  constexpr int kTogether = 8;
  const int walkers = p.rows * p.groups;
  const int apart = p.lanes << p.split;
  Acc sum = 0;
  Acc lost = 0;
  for (int position = 0; position < p.positions; ++position) {
    const int element = position * static_cast<int>(p.channels) + channel;
    const Acc* from = sums + element % kElements * p.pitch + (image * walkers + part) * p.lanes +
                      element / kElements;
    Acc of_position = 0;
    for (int left = walkers - part; left > 0; left -= kTogether << p.split) {
      Acc values[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        values[u] = u << p.split < left ? from[u * apart] : Acc(0);
      }
      from += kTogether * apart;
      // As in add_run(): results of 16 bits have no use for what is lost, and it takes time.
      if constexpr (sizeof(T) >= sizeof(float)) {
        add_exactly(sum, lost, halves_sum(values));
      } else {
        of_position += halves_sum(values);
      }
    }
    if constexpr (sizeof(T) < sizeof(float)) sum += of_position;
  }
  return settled(sum, lost);
}

template <bool kAligned, bool kTwoTiles, typename T>
__global__ void __launch_bounds__(kStepsThreads, steps_processor_threads(kTwoTiles) / kStepsThreads)
    stats_steps_kernel(const __grid_constant__ StepsArguments p,
                       const __grid_constant__ BesideFold fold, AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int kElements = Vector<T>::kSize;
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  if (folds_beside<T>(fold, shared)) return;
  Acc* sums_of_places = reinterpret_cast<Acc*>(shared + p.sums_at);
  __shared__ int first_band[kAxes];
  __shared__ int axis_counts[kAxes];
  const int thread = threadIdx.x;

  // Which part of which images.
  const unsigned block = blockIdx.x - fold.blocks;
  const unsigned turn_chunk = p.tiles == 1 ? block : block / p.tiles;
  const int64_t tile = block - turn_chunk * p.tiles;
  const int64_t tile_begin = tile * p.lanes * kElements;
  int64_t turn = p.chunks == 1 ? turn_chunk : turn_chunk / p.chunks;
  const int chunk = static_cast<int>(turn_chunk - turn * p.chunks);
  turn *= p.turns;
  const int64_t last_turn = min(turn + p.turns, p.all_turns);
  StepsChunk own;
  int rest = chunk;
#pragma unroll
  for (int a = kAxes - 1; a >= 0; --a) {
    const int up = p.count[a] == 1 ? rest : small_quotient(rest, p.count[a]);
    own.first[a] = (rest - up * p.count[a]) * p.steps[a];
    own.last[a] = min(own.first[a] + p.steps[a], p.all_steps[a]);
    own.begin[a] = own.first[a] * p.step[a];
    own.end[a] = min(own.last[a] * p.step[a], p.axis[a].size);
    rest = up;
  }
  if (p.ahead > 0 && thread == 0) ask_ahead<T>(p, own, turn * p.images, tile);
  StepsList list{reinterpret_cast<AxisRun*>(shared),
                 reinterpret_cast<StepsRun*>(shared + p.runs_at),
                 reinterpret_cast<unsigned*>(shared + p.steps_at),
                 reinterpret_cast<int*>(shared + p.cells_at),
                 first_band,
                 axis_counts};
  list.make(p.axis, p.runs, own, p.places, p.step, p.bytes);

  const int group = times_reciprocal(thread, p.over_lanes);
  const int first = (thread - group * p.lanes) * kElements;  // of a group's elements
  const int row_of_all = times_reciprocal(group, p.over_groups);
  const int column = (group - row_of_all * p.groups) * p.positions;  // of a step's
  const int image = times_reciprocal(row_of_all, p.over_rows);
  const int row = row_of_all - image * p.rows;
  const bool fits = image < p.images && tile_begin + first < p.channels * p.positions;
  const T* const corner =
      static_cast<const T*>(p.input.data) + tile_begin + first +
      (turn * p.images + image) * p.input.stride_n + own.begin[0] * p.input.stride[0] +
      (own.begin[1] + row) * p.input.stride[1] + (own.begin[2] + column) * p.input.stride[2];
  const unsigned char* from = reinterpret_cast<const unsigned char*>(corner);

  const int width =
      p.positions > 1 ? static_cast<int>(p.channels) : p.lanes * kElements;  // channels
  const int part = thread & ((1 << p.split) - 1);
  const int output_step = blockDim.x >> p.split;
  const int row_step = times_reciprocal(output_step, p.over_cells);
  const int cell_step = output_step - row_step * p.cells;
  ElementBands bands;
  int bands_at = kMixed;  // the column that they belong to
  const int last_row = (own.last[1] - 1) * p.rows;
  const int last_column = (own.last[2] - 1) * p.step[2];
  const auto zero_sums = [&] {
    for (int i = 0; i < p.all_places * kElements; ++i) sums_of_places[i * p.pitch + thread] = 0;
  };
  const unsigned skip = kNoStep | (last_row + row < own.end[1] ? 0 : kNoLastRow) |
                        (last_column + column < own.end[2] ? 0 : kNoLastColumn);
  const auto locate_bands = [&](int run_column) {
    bands_at = run_column;
    bands.locate<kElements>(p.axis[2], first_band[2], own.begin[2] + run_column + column,
                            own.end[2], first,
                            p.positions > 1 ? static_cast<int>(p.channels) : first + kElements);
  };
  for (int r = 0; r < list.run_count && bands_at == kMixed; ++r) {
    if (list.runs[r].column != kMixed) locate_bands(list.runs[r].column);
  }
  zero_sums();
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (;;) {
    const bool has = fits && turn * p.images + image < p.batch;
    const unsigned* steps = list.steps;
#pragma unroll 1
    for (int r = 0; r < list.run_count; ++r) {
      const StepsRun run = list.runs[r];
      bool counts = true;
      int place = run.place;
      if (run.row != kMixed) {
        const int at = own.begin[1] + run.row + row;
        const int band = p.axis[1].locate_inline(at).band;
        place += (band - first_band[1]) * p.places[2];
        counts = at < own.end[1] && p.axis[1].is_covered(band);
      }
      if (run.column != kMixed && run.column != bands_at) locate_bands(run.column);
      Acc sums[kElements] = {};
      add_run<kAligned, kTwoTiles, T>(from, reinterpret_cast<const uint4*>(steps), run.tiles,
                                      has && counts ? skip : skip | kNoThread, sums);
      steps += run.tiles * kStepLoads;
      if (!counts) continue;
      Acc* sums_of_place = sums_of_places + place * kElements * p.pitch + thread;
      if (run.column == kMixed) {
        Acc before[kElements];
#pragma unroll
        for (int j = 0; j < kElements; ++j) before[j] = sums_of_place[j * p.pitch];
#pragma unroll
        for (int j = 0; j < kElements; ++j) sums_of_place[j * p.pitch] = before[j] + sums[j];
      } else {
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          if (bands.of(j) == ElementBands::kUncovered) continue;
          sums_of_place[(bands.of(j) * kElements + j) * p.pitch] += sums[j];
        }
      }
    }
    __syncthreads();

    int output_row = times_reciprocal(thread >> p.split, p.over_cells);  // a channel of an image
    int cell = (thread >> p.split) - output_row * p.cells;
    for (int done = 0; done < p.images * width * p.cells; done += output_step) {
      const int its_image = p.images == 1 ? 0 : output_row / static_cast<unsigned>(width);
      const int channel = output_row - its_image * width;
      const int64_t n = turn * p.images + its_image;
      const bool real = its_image < p.images && n < p.batch && channel < width &&
                        tile_begin + channel < p.channels;
      const int place = real ? list.cell_places[cell] : -1;
      Acc sum = 0;
      if (place >= 0) {
        sum = sum_of_walkers<T>(p, sums_of_places + place * kElements * p.pitch, its_image, channel,
                                part);
      }
      for (int half = (1 << p.split) / 2; half > 0; half /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, half);
      }
      if (real && part == 0) {
        const int64_t plane = (int64_t{chunk} * p.batch + n) * p.channels + tile_begin + channel;
        cell_sums[plane * p.cells + cell] = sum;
      }
      output_row += row_step;
      cell += cell_step;
      if (cell >= p.cells) {
        cell -= p.cells;
        ++output_row;
      }
    }
    if (++turn == last_turn) break;
    from += p.images * p.input.stride_n * static_cast<int64_t>(sizeof(T));
    __syncthreads();
    zero_sums();
  }
}

// In stats_channels.cu.
cudaError_t launch_steps(const Problem& problem, const Cells& cells, const Input& input,
                         Dtype dtype, const StepsPlan& plan, const Queue& queue,
                         const BesideFold& fold, void* cell_sums);

}  // namespace convt_reduce::cuda
