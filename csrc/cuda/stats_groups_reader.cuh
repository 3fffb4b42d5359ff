// How a thread of stats_groups.cuh reads its vectors.
#pragma once

#include "cuda/staging.cuh"
#include "cuda/stats_channels_box.cuh"
#include "cuda/stats_groups_list.cuh"

namespace convt_reduce::cuda {

constexpr int kMostGroupsThreads = 128;

struct GroupsArguments {
  Input input;
  AxisBands<int> axis[kAxes];
  int64_t batch;
  int channels;
  int positions;  // of a group
  int lanes;
  int walkers;
  int images;     // of a block at the same time,
  int64_t turns;  // and one after the other
  int split;      // log2 of the threads that share the terms of an output
  int cells;
  int size[kAxes];   // of a chunk
  int count[kAxes];  // of chunks
  int64_t chunks;    // of an image
  int pitch;         // GroupsRoom tells this and the following
  int runs_at;
  int cells_at;
  int sums_at;
  int ring_at;
};

// The elements of a vector.
template <typename T>
using RawVector = RawChannels<Vector<T>::kSize, T>;

// Copies a thread's vectors to its places in a ring, step by step.
template <bool kAligned, typename T>
class GroupsReader {
 public:
  using Words = typename RawVector<T>::Words;
  static constexpr int kStages = group_stages(sizeof(T));

  // `from`: the thread's first vector of the chunk, in image n, if it has one.
  __device__ GroupsReader(const GroupsArguments& p, const GroupsList& list, int walker, int64_t n,
                          bool has, const T* from, int64_t turns, Words* ring)
      : offsets_(reinterpret_cast<const uint4*>(list.offsets) + walker),
        walkers_(list.walkers),
        steps_(list.steps),
        left_(turns * list.steps),
        images_left_(has ? p.batch - n : 0),
        images_(p.images),
        image_step_(p.images * p.input.stride_n),
        from_(from),
        ring_(ring) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) start_next(ring + stage * kStagePlaces);
  }

  // Waits for the oldest step and starts another in its place.
  __device__ void next(Words (&loaded)[kStepLoads]) {
    wait_for_batches<kStages - 1>();
#pragma unroll
    for (int u = 0; u < kStepLoads; ++u) loaded[u] = ring_[u * kWarp];
    start_next(ring_);
    ring_ += kStagePlaces;
    if (++stage_ == kStages) {
      stage_ = 0;
      ring_ -= kStages * kStagePlaces;
    }
  }

 private:
  static constexpr int kStagePlaces = kStepLoads * kWarp;

  __device__ void start_next(Words* to) {
    if (left_ > 0) {
      const uint4 four = *offsets_;
      const unsigned own[kStepLoads] = {four.x, four.y, four.z, four.w};
      const bool valid = images_left_ > 0;
#if __CUDA_ARCH__ >= 800
      constexpr bool kCopies = kAligned;
#else
      constexpr bool kCopies = false;
#endif
      if constexpr (kCopies) {
#pragma unroll
        for (int u = 0; u < kStepLoads; ++u) {
          const bool wanted = valid && own[u] != GroupsList::kNothing;
          copy_async<kVectorBytes>(to + u * kWarp, from_ + own[u], wanted ? kVectorBytes : 0);
        }
      } else {
        Words loaded[kStepLoads] = {};
#pragma unroll
        for (int u = 0; u < kStepLoads; ++u) {
          if (valid && own[u] != GroupsList::kNothing) {
            loaded[u] = RawVector<T>::template load<kAligned>(from_ + own[u]);
          }
        }
#pragma unroll
        for (int u = 0; u < kStepLoads; ++u) to[u * kWarp] = loaded[u];
      }
      --left_;
      offsets_ += walkers_;
      if (++at_ == steps_) {
        at_ = 0;
        offsets_ -= steps_ * walkers_;
        from_ += image_step_;
        images_left_ -= images_;
      }
    }
    close_batch();
  }

  const uint4* offsets_;
  int walkers_;
  int steps_;
  int at_ = 0;  // step of the list
  int64_t left_;
  int64_t images_left_;
  int images_;
  int64_t image_step_;
  const T* from_;
  Words* ring_;
  int stage_ = 0;
};

}  // namespace convt_reduce::cuda
