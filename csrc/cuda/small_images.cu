// Small images: stats and combine as one kernel, because for them the launches take longer than
// either.
//
// A block has one batch element's channels of one group, and some of the group's output channels.
// It brings those channels to shared memory cell by cell, adds the cells up and the cells of each
// tap. A result is then a product of the weight as it lies in memory with those tap sums; folding
// it first would be a chain of short reads. What a block computes of an element depends on no other
// element and not on how the output channels are shared out, so neither do the bits.
#include <algorithm>
#include <cmath>

#include "cuda/axis_bands.cuh"
#include "cuda/block_sums.cuh"
#include "cuda/combine.cuh"
#include "cuda/tap_bands.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 4;  // output channels at a time
constexpr int kLoads = 8;     // on their way together, per thread
// What is small. Every image reads all of its group's weights, so those are limited as well.
constexpr int64_t kMostElements = 4096;  // of a group's channels
constexpr int64_t kMostSums = 2048;      // of their cells, and of their taps
constexpr int64_t kMostSharedBytes = 46 * 1024;
constexpr int64_t kMostWeights = int64_t{1} << 17;
constexpr int64_t kPositionsPerLane = 8;
constexpr int64_t kBlocksPerProcessor = 4;

struct Arguments {
  Input input;
  AxisBands<int> depths;
  AxisBands<int> rows;
  AxisBands<int> columns;
  int positions;
  int stride;  // between channels in shared memory; odd, for its banks
  int cell_count;
  int lanes;           // threads on one cell of one channel, a power of two
  bool channels_last;  // neighbouring threads load neighbouring channels, not positions
  int64_t tiles;       // of a group's output channels
  int64_t tile;        // output channels
  int64_t blocks;
  int64_t groups;
  int taps;
  // Where in shared memory what lies behind the cell sums begins, in bytes.
  int values_at;  // and, later, the tap sums
  int taps_at;
  int begin_at;
  int order_at;
  int64_t shared_bytes;
};

// A tap: its place in a channel's weight, and the bands that it covers on each axis.
struct alignas(16) Tap {
  int64_t offset;
  unsigned char begin[kAxes];
  unsigned char end[kAxes];
};

__device__ inline void list_taps(const Arguments& p, const CombineArguments& combine, Tap* taps) {
  for (int i = threadIdx.x; i < p.taps; i += kThreads) {
    Tap tap;
    tap.offset = 0;
    int rest = i;
    for (int a = kAxes - 1; a >= 0; --a) {
      const AxisCells& axis = combine.cells.axis[a];
      const int kernel = static_cast<int>(axis.axis.kernel);
      const int along = rest % kernel;
      rest /= kernel;
      const Range bands = bands_of_tap(axis, along);
      tap.begin[a] = static_cast<unsigned char>(bands.begin);
      tap.end[a] = static_cast<unsigned char>(bands.end);
      tap.offset += along * combine.weight.stride[a];
    }
    taps[i] = tap;
  }
}

// order[position]: where it goes, so that cells lie one behind the other, from cell_begin[cell].
__device__ inline void order_positions(const Arguments& p, unsigned short* order, int* cell_begin) {
  for (int position = threadIdx.x; position < p.positions; position += kThreads) {
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
    order[position] = static_cast<unsigned short>(begin + in_cell);
    if (in_cell == 0) {
      cell_begin[(b0.band * p.rows.bands + b1.band) * p.columns.bands + b2.band] = begin;
    }
  }
  if (threadIdx.x == 0) cell_begin[p.cell_count] = p.positions;
}

template <typename T>
__device__ inline void bring_channels(const Arguments& p, const T* image, int channels,
                                      const unsigned short* order, AccumulateOf<T>* values) {
  const int count = channels * p.positions;
  const int inner = p.channels_last ? channels : p.positions;
  for (int base = threadIdx.x; base < count; base += kLoads * kThreads) {
    T loaded[kLoads];
    int to[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = min(base + i * kThreads, count - 1);  // past the end: the last one again
      const int outer = at / inner;
      const int rest = at - outer * inner;
      const int c = p.channels_last ? rest : outer;
      const int position = p.channels_last ? outer : rest;
      const int row = position / p.columns.size;
      const int depth = row / p.rows.size;
      loaded[i] = image[c * p.input.stride_c + depth * p.input.stride[0] +
                        (row - depth * p.rows.size) * p.input.stride[1] +
                        (position - row * p.columns.size) * p.input.stride[2]];
      to[i] = c * p.stride + order[position];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) values[to[i]] = widen(loaded[i]);
  }
}

// sums [channels][cells]
template <typename Acc>
__device__ inline void add_cells(const Arguments& p, const Cells& cells, int channels,
                                 const int* cell_begin, const Acc* values, Acc* sums) {
  const int lane = threadIdx.x & (p.lanes - 1);
  const int units = channels * p.cell_count;  // a warp's are of one cell where channels allow
  const int groups = kThreads / p.lanes;
  // Every thread takes every turn, since the shuffles need whole warps.
  for (int base = 0; base < units; base += groups) {
    const int unit = min(base + static_cast<int>(threadIdx.x) / p.lanes, units - 1);
    const int cell = unit / channels;
    const int c = unit - cell * channels;
    Acc sum = 0;
    Acc lost = 0;
    if (covered(cells, bands_of(cells, cell))) {
      for (int at = cell_begin[cell] + lane; at < cell_begin[cell + 1]; at += p.lanes) {
        add_exactly(sum, lost, values[c * p.stride + at]);
      }
    }
    sum = settled(sum, lost);
    for (int half = p.lanes / 2; half > 0; half /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, half);
    }
    if (lane == 0) sums[c * p.cell_count + cell] = sum;
  }
}

// tap_sums [channels][taps] of one batch element, times scale in shared memory.
template <typename Acc>
__device__ inline void add_taps(const Arguments& p, int channels, const Tap* taps, const Acc* sums,
                                Acc scale, Acc* scaled, Acc* tap_sums) {
  for (int i = threadIdx.x; i < channels * p.taps; i += kThreads) {
    const int c = i / p.taps;
    const Tap tap = taps[i - c * p.taps];
    const Acc* from = sums + c * p.cell_count;
    Acc sum = 0;
    for (int b0 = tap.begin[0]; b0 < tap.end[0]; ++b0) {
      for (int b1 = tap.begin[1]; b1 < tap.end[1]; ++b1) {
        for (int b2 = tap.begin[2]; b2 < tap.end[2]; ++b2) {
          sum += from[(b0 * p.rows.bands + b1) * p.columns.bands + b2];
        }
      }
    }
    scaled[i] = sum * scale;
    if (tap_sums != nullptr) tap_sums[i] = sum;
  }
}

// Up to kTogether results of one batch element.
template <typename T>
__device__ inline void combine_some(const Arguments& p, const CombineArguments& combine, int64_t n,
                                    int64_t o_begin, int count, const Tap* taps,
                                    const AccumulateOf<T>* sums, const AccumulateOf<T>* scaled,
                                    AccumulateOf<T> (*warp_sums)[kTogether],
                                    AccumulateOf<T>* totals, T* y) {
  using Acc = AccumulateOf<T>;
  const T* weight = static_cast<const T*>(combine.weight.data);
  const T* of[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    // Past the last one, the last one again, which nobody keeps.
    of[i] = weight + Channel(combine, o_begin + min(i, count - 1)).weight_offset;
  }
  Acc values[kTogether] = {};
  const int terms = static_cast<int>(combine.group_in) * p.taps;
#pragma unroll 4
  for (int term = threadIdx.x; term < terms; term += kThreads) {
    const int c = term / p.taps;
    const int64_t at = c * combine.weight.stride_c_in + taps[term - c * p.taps].offset;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) values[i] += widen(of[i][at]) * scaled[term];
  }
  block_sums(values, warp_sums, totals);
  for (int i = 0; i < count; ++i) {
    if (isfinite(totals[i])) continue;  // the same for the whole block
    __syncthreads();
    const Channel channel(combine, o_begin + i);
    Acc careful[1] = {};
    for (int64_t term = threadIdx.x; term < combine.depth; term += kThreads) {
      careful[0] += careful_term<T>(combine, channel, term, sums[term]);
    }
    block_sums(careful, warp_sums, totals + i);
  }
  if (threadIdx.x < count) {
    const int64_t o = o_begin + threadIdx.x;
    y[n * combine.c_out + o] = result<T>(combine, o, totals[threadIdx.x]);
  }
  __syncthreads();
}

// tap_sums: null, or where [N][C_in][taps] is wanted as well.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    small_images_kernel(const __grid_constant__ Arguments p,
                        const __grid_constant__ CombineArguments combine, AccumulateOf<T>* tap_sums,
                        T* y) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Acc warp_sums[kThreads / kWarp][kTogether];
  __shared__ Acc totals[kTogether];
  Acc* sums = reinterpret_cast<Acc*>(shared);
  Acc* values = reinterpret_cast<Acc*>(shared + p.values_at);
  Tap* taps = reinterpret_cast<Tap*>(shared + p.taps_at);
  int* cell_begin = reinterpret_cast<int*>(shared + p.begin_at);
  unsigned short* order = reinterpret_cast<unsigned short*>(shared + p.order_at);
  const int channels = static_cast<int>(combine.group_in);
  order_positions(p, order, cell_begin);
  list_taps(p, combine, taps);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    const int64_t group_at = quotient(block, p.tiles);
    const int64_t n = quotient(group_at, p.groups);
    const int64_t group = group_at - n * p.groups;
    const int64_t tile_begin = (block - group_at * p.tiles) * p.tile;
    const int64_t tile_end = min(tile_begin + p.tile, combine.group_out);
    const int64_t c_begin = group * combine.group_in;
    const T* image =
        static_cast<const T*>(p.input.data) + n * p.input.stride_n + c_begin * p.input.stride_c;
    bring_channels<T>(p, image, channels, order, values);
    __syncthreads();
    add_cells(p, combine.cells, channels, cell_begin, values, sums);
    __syncthreads();
    const bool writes = tap_sums != nullptr && tile_begin == 0;
    add_taps(p, channels, taps, sums, static_cast<Acc>(combine.scale), values,
             writes ? tap_sums + (n * combine.c_in + c_begin) * p.taps : nullptr);
    __syncthreads();
    for (int64_t o = tile_begin; o < tile_end; o += kTogether) {
      combine_some<T>(p, combine, n, group * combine.group_out + o,
                      static_cast<int>(min(int64_t{kTogether}, tile_end - o)), taps, sums, values,
                      warp_sums, totals, y);
    }
  }
}

Arguments plan_small_images(const Problem& problem, const Cells& cells, int64_t sum_bytes) {
  const int64_t channels = problem.c_in / problem.groups;
  Arguments p{.depths = AxisBands<int>(cells.axis[0]),
              .rows = AxisBands<int>(cells.axis[1]),
              .columns = AxisBands<int>(cells.axis[2])};
  p.positions = static_cast<int>(problem.positions());
  p.stride = p.positions | 1;
  p.cell_count = static_cast<int>(cells.count());
  p.taps = static_cast<int>(problem.taps());
  p.lanes = static_cast<int>(
      largest_power_of_two(std::clamp<int64_t>(p.positions / kPositionsPerLane, 1, kWarp)));
  const auto behind = [](int64_t at, int64_t bytes) {
    return static_cast<int>(round_up(at + bytes, alignof(Tap)));
  };
  p.values_at = behind(0, channels * p.cell_count * sum_bytes);
  p.taps_at = behind(p.values_at, channels * std::max(p.stride, p.taps) * sum_bytes);
  p.begin_at = behind(p.taps_at, p.taps * sizeof(Tap));
  p.order_at = behind(p.begin_at, (p.cell_count + 1) * sizeof(int));
  p.shared_bytes = p.order_at + p.positions * sizeof(short);
  return p;
}

int64_t sum_bytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float); }

}  // namespace

bool images_are_small(const Problem& problem, const Cells& cells, Dtype dtype) {
  const int64_t group_in = problem.c_in / problem.groups;
  const int64_t group_out = problem.c_out / problem.groups;
  // Quotients and not products, which could be too large for an int64.
  return problem.batch > 0 && problem.batch <= kLargeBatch && !needs_table(cells) &&
         problem.positions() <= kMostElements / group_in &&
         problem.taps() <= kMostSums / group_in && cells.count() <= kMostSums / group_in &&
         group_out <= kMostWeights / (problem.c_in * problem.taps()) &&
         plan_small_images(problem, cells, sum_bytes(dtype)).shared_bytes <= kMostSharedBytes;
}

cudaError_t launch_small_images(const Problem& problem, const Cells& cells, const Input& input,
                                const Weight& weight, const Bias& bias, Dtype dtype,
                                const Queue& queue, void* tap_sums, void* y) {
  const CombineArguments combine = combine_arguments(problem, cells, weight, bias);
  Arguments p = plan_small_images(problem, cells, sum_bytes(dtype));
  p.input = input;
  p.channels_last = input.stride_c == 1 && input.stride[2] != 1;
  p.groups = problem.groups;
  const int64_t images = problem.batch * problem.groups;
  const int64_t wanted = ceil_div(kBlocksPerProcessor * queue.processors, images);
  p.tile = ceil_div(combine.group_out, std::min(wanted, combine.group_out));
  p.tiles = ceil_div(combine.group_out, p.tile);
  p.blocks = images * p.tiles;
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    return launch(&small_images_kernel<T>, p.blocks, kThreads, p.shared_bytes, queue.stream,
                  queue.overlaps, p, combine, static_cast<AccumulateOf<T>*>(tap_sums),
                  static_cast<T*>(y));
  });
}

}  // namespace convt_reduce::cuda
