// What a thread of stats_steps.cuh does with a run of steps.
#pragma once

#include "cuda/stats_channels_box.cuh"
#include "cuda/stats_steps_list.cuh"

namespace convt_reduce::cuda {

// The elements of a vector.
template <typename T>
using RawVector = RawChannels<Vector<T>::kSize, T>;

// A vector that nobody needs again soon.
template <bool kAligned, typename T>
__device__ __forceinline__ typename RawVector<T>::Words load_once(const unsigned char* from) {
  if constexpr (kAligned) {
    union {
      uint4 four;
      typename RawVector<T>::Words words;
    } loaded;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(loaded.four.x), "=r"(loaded.four.y), "=r"(loaded.four.z),
                   "=r"(loaded.four.w)
                 : "l"(from));
    return loaded.words;
  } else {
    return RawVector<T>::template load<false>(reinterpret_cast<const T*>(from));
  }
}

// Adds a thread's elements of a run. `kTwoTiles`: while it adds a tile, the next is on its way.
template <bool kAligned, bool kTwoTiles, typename T>
__device__ __forceinline__ void add_run(const unsigned char* from, const uint4* steps, int tiles,
                                        unsigned skip, AccumulateOf<T> (&sums)[Vector<T>::kSize]) {
  using Acc = AccumulateOf<T>;
  using Tile = typename RawVector<T>::Words[kStepLoads];
  constexpr int kElements = Vector<T>::kSize;
  constexpr int kFour = 4;
  Acc lost[kElements] = {};
  const auto load = [&](Tile& tile) {
    unsigned own[kStepLoads];
#pragma unroll
    for (int k = 0; k < kStepLoads; k += kFour) {
      const uint4 four = steps[k / kFour];
      own[k] = four.x;
      own[k + 1] = four.y;
      own[k + 2] = four.z;
      own[k + 3] = four.w;
    }
    steps += kStepLoads / kFour;
#pragma unroll
    for (int k = 0; k < kStepLoads; ++k) {
      if ((own[k] & skip) == 0) {
        tile[k] = load_once<kAligned, T>(from + (own[k] & ~unsigned{kStepFlags}));
      } else {
        tile[k] = {};
      }
    }
  };
  const auto add = [&](const Tile& tile) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      // Loads far apart meet first: so the compiler keeps all of them in flight.
      Acc values[kStepLoads];
#pragma unroll
      for (int k = 0; k < kStepLoads; ++k) {
        values[k] = RawVector<T>::element(tile[k / 2 + k % 2 * (kStepLoads / 2)], j);
      }
      // Results of 16 bits have no use for it, and it takes registers.
      if constexpr (sizeof(T) >= sizeof(float)) {
        add_exactly(sums[j], lost[j], halves_sum(values));
      } else {
        sums[j] += halves_sum(values);
      }
    }
  };
  if constexpr (kTwoTiles) {
    Tile even;
    Tile odd;
    load(even);
#pragma unroll 1
    for (; tiles > 2; tiles -= 2) {
      load(odd);
      add(even);
      load(even);
      add(odd);
    }
    if (tiles == 2) load(odd);
    add(even);
    if (tiles == 2) add(odd);
  } else {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      Tile tile;
      load(tile);
      add(tile);
    }
  }
  if constexpr (sizeof(T) >= sizeof(float)) {
#pragma unroll
    for (int j = 0; j < kElements; ++j) sums[j] = settled(sums[j], lost[j]);
  }
}

// The bands of columns that a thread's elements are in, from the chunk's first on, 4 bits each.
struct ElementBands {
  static constexpr unsigned kUncovered = 15;

  unsigned all = 0;

  __device__ unsigned of(int element) const { return (all >> (4 * element)) & kUncovered; }

  // `first`: the first of kElements elements, of a group that begins at `column`.
  template <int kElements>
  __device__ void locate(const AxisBands<int>& axis, int first_band, int column, int end, int first,
                         int channels) {
    constexpr unsigned kOnes = 0x11111111u;
    constexpr int kCodes = 8;  // in a word
    all = 0;
    int position = small_quotient(first, channels);
    int next = (position + 1) * channels - first;  // element of the next position
#pragma unroll 1
    for (int j = 0; j < kElements; next += channels) {
      const int count = min(next, kElements) - j;
      all |= band_at(axis, first_band, column + position++, end) *
             (kOnes >> (4 * (kCodes - count)) << (4 * j));
      j += count;
    }
  }

 private:
  __device__ static unsigned band_at(const AxisBands<int>& axis, int first_band, int column,
                                     int end) {
    const int band = axis.locate_inline(column).band;
    return column < end && axis.is_covered(band) ? band - first_band : kUncovered;
  }
};
static_assert(kInlineBands < ElementBands::kUncovered && Vector<__half>::kSize <= 8,
              "a band is 4 bits");

}  // namespace convt_reduce::cuda
