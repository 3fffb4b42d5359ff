// Stats for inputs whose channels are neighbours in memory (channels_last): a block has a chunk of
// some images' channels, with all cells.
//
// `lanes` threads read the channels of one position, several each where their number allows, and
// the `walkers` of an image take the positions of one cell after the other in turn. Large images
// have many walkers, so that loads are long stretches; small ones have one, or few, so that little
// is left to add between threads, and the block has several images instead.
#pragma once

#include "cuda/axis_bands.cuh"
#include "cuda/device.cuh"
#include "cuda/fold_beside.cuh"
#include "cuda/stats_channels_box.cuh"

namespace convt_reduce::cuda {

constexpr int kChannelsThreads = 128;  // of a block, at most

// On their way together, per thread. Elements of 16 bits in vectors have twice as many sums.
template <typename T>
CONVT_HD constexpr int channels_loads(int channels) {
  const int bytes = channels * static_cast<int>(sizeof(T));
  if (bytes == kVectorBytes) return sizeof(T) == 2 ? 4 : 8;
  return bytes == 8 ? 8 : 16;
}

struct ChannelsArguments {
  Input input;
  AxisBands<int> axis[kAxes];
  int64_t batch;
  int64_t channels;
  int64_t channel_tiles;
  int lanes;
  int walkers;
  int images;  // of a block
  int cells;
  unsigned stride[kAxes];  // the input's, in elements
  int pitch;               // of a cell's sums in shared memory
  int size[kAxes];         // of a chunk
  int count[kAxes];        // of chunks
  int64_t chunks;          // of an image
  int64_t items;
};

// The blocks of a processor that the registers have room for: without it, the compiler gives up
// loads in flight for more.
template <typename T>
constexpr int channels_blocks(int channels) {
  constexpr int kRegisters = 64 * 1024;
  constexpr int kRest = 44;
  const int load = static_cast<int>(channels * sizeof(T) + 3) / 4;
  const int sums = static_cast<int>(channels * sizeof(AccumulateOf<T>)) / 4;
  const int own =
      channels_loads<T>(channels) * (load + 1) + sums * (sizeof(T) >= sizeof(float) ? 2 : 1);
  return kRegisters / kChannelsThreads / (own + kRest);
}

// Words of the accumulate type in shared memory: of a cell's sums, and of all.
inline int channels_pitch(const ChannelsPlan& plan, int images) {
  constexpr int kApart = 4;  // so that neighbouring cells lie in other banks
  return static_cast<int>(round_up(images * plan.lanes * plan.channels, kApart)) + kApart;
}
inline int64_t channels_shared_words(const ChannelsPlan& plan, const Cells& cells, int images) {
  const int64_t threads = round_up(int64_t{plan.lanes} * plan.walkers * images, kWarp);
  const int64_t places = plan.walkers > 1 ? cells.axis[2].bands * plan.channels * threads : 0;
  return cells.count() * channels_pitch(plan, images) + places;
}

// Shared memory: sums [cells][pitch >= channels of images], places [column bands][kChannels]
// [threads] where there are several walkers.
template <bool kAligned, int kChannels, typename T>
__global__ void __launch_bounds__(kChannelsThreads, channels_blocks<T>(kChannels))
    stats_channels_kernel(const __grid_constant__ ChannelsArguments p,
                          const __grid_constant__ BesideFold fold, AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int kLoads = channels_loads<T>(kChannels);
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  if (folds_beside<T>(fold, shared)) return;
  Acc* sums_of_cells = reinterpret_cast<Acc*>(shared);
  Acc* places = sums_of_cells + p.cells * p.pitch;
  const int width = p.lanes * kChannels;
  const int image = threadIdx.x / (p.lanes * p.walkers);
  const int in_image = threadIdx.x - image * (p.lanes * p.walkers);
  const int walker = in_image / p.lanes;
  const int lane = in_image - walker * p.lanes;
  const bool real = image < p.images;
  const int column_bands = p.axis[2].bands;
  wait_for_previous_kernel();
  let_next_kernel_start();

  for (int64_t item = static_cast<int64_t>(blockIdx.x) - fold.blocks; item < p.items;
       item += gridDim.x - static_cast<unsigned>(fold.blocks)) {
    const int64_t image_chunk = p.channel_tiles == 1 ? item : quotient(item, p.channel_tiles);
    const int64_t tile = item - image_chunk * p.channel_tiles;
    const int64_t images = p.chunks == 1 ? image_chunk : quotient(image_chunk, p.chunks);
    const int64_t chunk = image_chunk - images * p.chunks;
    int begin[kAxes];
    int end[kAxes];
    locate_chunk(static_cast<unsigned>(chunk), p.count, p.size, p.axis, begin, end);
    const int64_t n = images * p.images + image;
    const int64_t c = tile * width + lane * kChannels;
    const bool has = real && n < p.batch && c < p.channels;
    const T* plane = static_cast<const T*>(p.input.data) + n * p.input.stride_n + c;
    Acc* mine = sums_of_cells + image * width + lane * kChannels;
    for (int b0 = 0; b0 < p.axis[0].bands; ++b0) {
      const int first = max(p.axis[0].begin[b0], begin[0]);
      const int depths = p.axis[0].is_covered(b0) ? min(p.axis[0].end(b0), end[0]) - first : 0;
      for (int b1 = 0; b1 < p.axis[1].bands; ++b1) {
        const int row = max(p.axis[1].begin[b1], begin[1]);
        const int rows = p.axis[1].is_covered(b1) ? min(p.axis[1].end(b1), end[1]) - row : 0;
        const int cell = (b0 * p.axis[1].bands + b1) * column_bands;
        if (depths <= 0 || rows <= 0) {
          if (walker == 0 && real) {
            for (int i = 0; i < column_bands * kChannels; ++i) {
              mine[(cell + i / kChannels) * p.pitch + i % kChannels] = 0;
            }
          }
          continue;
        }
        const T* slab = plane + first * p.input.stride[0] + row * p.input.stride[1];
        for (int b2 = 0; b2 < column_bands; ++b2) {
          const int column = max(p.axis[2].begin[b2], begin[2]);
          const int columns = min(p.axis[2].end(b2), end[2]) - column;
          Acc sums[kChannels] = {};
          Acc lost[kChannels] = {};
          if (has && columns > 0 && p.axis[2].is_covered(b2)) {
            const Box box{{depths, rows, columns}, {p.stride[0], p.stride[1], p.stride[2]}};
            add_box<kLoads, kAligned, kChannels>(slab + column * p.input.stride[2], box, walker,
                                                 p.walkers, sums, lost);
          }
#pragma unroll
          for (int j = 0; j < kChannels; ++j) {
            const Acc sum = settled(sums[j], lost[j]);
            if (p.walkers > 1) {
              places[(b2 * kChannels + j) * blockDim.x + threadIdx.x] = sum;
            } else if (real) {
              mine[(cell + b2) * p.pitch + j] = sum;
            }
          }
        }
        if (p.walkers == 1) continue;
        for (int parts = p.walkers; parts > 1;) {
          constexpr int kTogether = 4;
          const int next = (parts + kTogether - 1) / kTogether;
          __syncthreads();
          if (walker < next && real) {
            for (int i = 0; i < column_bands * kChannels; ++i) {
              Acc* place = places + i * blockDim.x + threadIdx.x;
              Acc values[kTogether];
#pragma unroll
              for (int u = 0; u < kTogether; ++u) {
                values[u] = walker + u * next < parts ? place[u * next * p.lanes] : Acc(0);
              }
              const Acc sum = halves_sum(values);
              if (next > 1) {
                *place = sum;
              } else {
                mine[(cell + i / kChannels) * p.pitch + i % kChannels] = sum;
              }
            }
          }
          parts = next;
        }
        __syncthreads();
      }
    }
    __syncthreads();

    // Where a tile has all channels, its images' results are one stretch.
    const bool whole = p.channel_tiles == 1;
    const int stretches = whole ? 1 : p.images;
    const int64_t left = p.batch - images * p.images;
    const int stretch_channels =
        whole ? static_cast<int>(min(left, int64_t{p.images})) * width
              : static_cast<int>(min(p.channels - tile * width, int64_t{width}));
    const int channel_step = blockDim.x / p.cells;
    const int cell_step = blockDim.x - channel_step * p.cells;
    for (int s = 0; s < stretches; ++s) {
      if (s >= left) break;
      const int64_t plane_number =
          (chunk * p.batch + images * p.images + s) * p.channels + tile * width;
      Acc* to = cell_sums + plane_number * p.cells + threadIdx.x;
      int channel = threadIdx.x / p.cells;
      int cell = threadIdx.x - channel * p.cells;
      while (channel < stretch_channels) {
        *to = sums_of_cells[cell * p.pitch + s * width + channel];
        to += blockDim.x;
        channel += channel_step;
        cell += cell_step;
        if (cell >= p.cells) {
          cell -= p.cells;
          ++channel;
        }
      }
    }
    __syncthreads();
  }
}

// In stats_channels.cu.
cudaError_t launch_channels(const Problem& problem, const Cells& cells, const Input& input,
                            Dtype dtype, const ChannelsPlan& plan, const Queue& queue,
                            const BesideFold& fold, void* cell_sums);

// Whether an image whose channels are neighbours has no gaps.
inline bool image_is_dense(const Problem& problem, const Input& input) {
  int64_t stride = problem.c_in;
  for (int a = kAxes - 1; a >= 0; --a) {
    if (problem.axis[a].size > 1 && input.stride[a] != stride) return false;
    stride *= problem.axis[a].size;
  }
  return true;
}

}  // namespace convt_reduce::cuda
