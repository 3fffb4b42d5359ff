// What a thread of stats_channels.cuh does: it adds its positions of a box.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/stats_boxes.cuh"

namespace convt_reduce::cuda {

// A thread's neighbouring channels at one position, as loaded. Those of 16 bits stay pairs until
// all loads are on their way: taken apart one by one, the first would be waited for.
template <int kChannels, typename T>
struct RawChannels {
  static constexpr int kPerWord = sizeof(T) == 2 && kChannels > 1 ? 2 : 1;
  using Word = std::conditional_t<sizeof(T) == 2, unsigned, T>;
  using Words = Channels<kChannels / kPerWord, Word>;

  template <bool kAligned>
  __device__ static Words load(const T* from) {
    if constexpr (sizeof(T) != 2) {
      return load_channels<kAligned, kChannels>(from);
    } else {
      const auto* halves = reinterpret_cast<const unsigned short*>(from);
      Words words;
      if constexpr (kChannels == 1) {
        words.at[0] = halves[0];
      } else if constexpr (kAligned) {
        words = *reinterpret_cast<const Words*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < kChannels / kPerWord; ++i) {
          words.at[i] = halves[2 * i] | unsigned{halves[2 * i + 1]} << 16;
        }
      }
      return words;
    }
  }

  __device__ static AccumulateOf<T> element(const Words& words, int j) {
    const Word word = words.at[j / kPerWord];
    if constexpr (sizeof(T) != 2) {
      return word;
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(j % kPerWord == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      const unsigned half = j % kPerWord == 0 ? word : word >> 16;
      return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    }
  }
};

// The part of a cell that a chunk has.
struct Box {
  int size[kAxes];
  unsigned stride[kAxes];  // elements
};

// Adds a walker's positions of a box. Its loads are on the same places of every tile: some whole
// slices or rows, or a piece of a row.
template <int kLoads, bool kAligned, int kChannels, typename T>
__device__ __forceinline__ void add_box(const T* from, const Box& box, int walker, int walkers,
                                        AccumulateOf<T> (&sums)[kChannels],
                                        AccumulateOf<T> (&lost)[kChannels]) {
  using Raw = RawChannels<kChannels, T>;
  const auto over = [](int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
  };
  const int width = box.size[2];
  const int slice = box.size[1] * width;
  const int most = kLoads * walkers;
  const int tile2 = min(width, most);
  const int tile1 = slice <= most ? box.size[1] : width <= most ? over(most, width) : 1;
  const int tile0 = slice <= most && box.size[0] > 1 ? over(most, slice) : 1;

  // In elements; those of places without a position may pass 2^32.
  unsigned offsets[kLoads];
  int column = walker;
  int row = 0;
  int step2 = walkers;
  int step1 = 0;
  unsigned offset = 0;
  unsigned jump = 0;
  if (walkers > width && width <= most) {
    row = over(walker, width);
    column -= row * width;
    step1 = over(walkers, width);
    step2 -= step1 * width;
    if (walkers > slice) {
      const int depth = over(row, box.size[1]);
      row -= depth * box.size[1];
      offset = depth * box.stride[0];
      const int step0 = over(step1, box.size[1]);
      step1 -= step0 * box.size[1];
      jump = step0 * box.stride[0];
    }
  }
  offset += row * box.stride[1] + column * box.stride[2];
  jump += step1 * box.stride[1] + step2 * box.stride[2];
  const unsigned carry2 = box.stride[1] - width * box.stride[2];
  const unsigned carry1 = box.stride[0] - box.size[1] * box.stride[1];
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
    offsets[k] = offset;
    offset += jump;
    column += step2;
    row += step1;
    if (column >= width && width <= most) {
      column -= width;
      ++row;
      offset += carry2;
    }
    if (row >= box.size[1] && slice <= most) {
      row -= box.size[1];
      offset += carry1;
    }
  }

  for (int at0 = 0; at0 < box.size[0]; at0 += tile0) {
    const int count0 = min(tile0, box.size[0] - at0);
    for (int at1 = 0; at1 < box.size[1]; at1 += tile1) {
      const int count1 = count0 * min(tile1, box.size[1] - at1);
      for (int at2 = 0; at2 < width; at2 += tile2) {
        const T* tile = from + (at0 * box.stride[0] + at1 * box.stride[1] + at2 * box.stride[2]);
        const int left = count1 * min(tile2, width - at2) - walker;
        typename Raw::Words loaded[kLoads];
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          if (k * walkers < left) {
            loaded[k] = Raw::template load<kAligned>(tile + offsets[k]);
          } else {
            loaded[k] = {};
          }
        }
#pragma unroll
        for (int j = 0; j < kChannels; ++j) {
          // Loads far apart meet first: so the compiler keeps all of them in flight.
          AccumulateOf<T> values[kLoads];
#pragma unroll
          for (int k = 0; k < kLoads; ++k) {
            values[k] = Raw::element(loaded[k / 2 + k % 2 * (kLoads / 2)], j);
          }
          // Results of 16 bits have no use for it, and it takes registers.
          if constexpr (sizeof(T) >= sizeof(float)) {
            add_exactly(sums[j], lost[j], halves_sum(values));
          } else {
            sums[j] += halves_sum(values);
          }
        }
      }
    }
  }
}

}  // namespace convt_reduce::cuda
