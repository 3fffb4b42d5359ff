// The gradients of the cells of a turn, for spread_periods.cuh: tap gradients are copied to shared
// memory and added up there.
#pragma once

#include "cuda/cell_grads.cuh"
#include "cuda/periods.cuh"
#include "cuda/staging.cuh"

namespace convt_reduce::cuda {

// Starts the copy of one number.
template <typename Acc>
__device__ inline void start_element(Acc* to, const Acc* from) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from),
               "n"(sizeof(Acc))
               : "memory");
#else
  *to = *from;
#endif
}

// Starts the copies of a turn's tap gradients. A warp copies those of a period.
template <typename T>
__device__ inline void copy_turn(const PeriodsArguments& p, const CellGradsArguments& g,
                                 const PeriodsChunk& chunk, const PeriodsShared<T>& shared,
                                 int turn) {
  using Acc = AccumulateOf<T>;
  const Acc* data = static_cast<const Acc*>(g.tap_grads.data);
  const int lane = threadIdx.x % kWarp;
  const int stage = (turn & 1) * p.turn;
  const bool stretches = p.dense && p.tap_step == p.taps;
  const Divider by_taps(p.taps);
#pragma unroll 1
  for (int i = threadIdx.x / kWarp; i < p.turn; i += kPeriodWarps) {
    const int64_t first = chunk.period(p, turn, i) * p.period + chunk.first_plane;
    const uintptr_t begin = address_of(data + first * p.taps);
    if (lane == 0) shared.phases[stage + i] = stretches ? phase_of(begin) : 0;
    if (first >= p.planes) continue;
    const int planes = static_cast<int>(min(int64_t{chunk.planes}, p.planes - first));
    unsigned char* to = shared.stages + (stage + i) * p.stage_bytes;
    if (stretches) {
      copy_stretch({begin, begin + planes * p.taps * sizeof(Acc), to}, address_of(data),
                   address_of(data + p.planes * p.taps), lane);
      continue;
    }
#pragma unroll 1
    for (int j = lane; j < planes * p.taps; j += kWarp) {
      const int of = by_taps(j);
      const int tap = j - of * p.taps;
      const Acc* from = data + first * p.taps + j;
      if (!p.dense) {
        const int t01 = tap / p.kernel[2];
        const int t0 = t01 / p.kernel[1];
        const int64_t plane = first + of;
        const int64_t n = quotient(plane, g.channels);
        from = data + n * g.tap_grads.stride_n + (plane - n * g.channels) * g.tap_grads.stride_c +
               t0 * g.tap_grads.stride[0] + (t01 - t0 * p.kernel[1]) * g.tap_grads.stride[1] +
               (tap - t01 * p.kernel[2]) * g.tap_grads.stride[2];
      }
      start_element(reinterpret_cast<Acc*>(to) + of * p.tap_step + tap, from);
    }
  }
}

// Adds up a turn's tap gradients. Threads of a warp make one cell of neighbouring planes, as far as
// there are planes.
template <typename T>
__device__ inline void make_grads(const PeriodsArguments& p, const PeriodsChunk& chunk,
                                  const PeriodsShared<T>& shared, int turn) {
  using Acc = AccumulateOf<T>;
  constexpr int kTogether = 4;  // loads
  const int planes = p.turn * chunk.planes;
  const Divider by_planes(planes);
  const Divider by_chunk(chunk.planes);
  const int stage = (turn & 1) * p.turn;
  T* to = shared.grads + (turn & 1) * shared.grads_size;
#pragma unroll 1
  for (int i = threadIdx.x; i < planes * p.cells; i += kPeriodThreads) {
    const int cell = by_planes(i);
    const int plane = i - cell * planes;
    const int period = by_chunk(plane);
    const unsigned char* from =
        shared.stages + (stage + period) * p.stage_bytes + shared.phases[stage + period];
    const Acc* taps =
        reinterpret_cast<const Acc*>(from) + (plane - period * chunk.planes) * p.tap_step;
    const TapBox box = shared.boxes[cell];
    const int begin = box.begin[2];
    const int end = box.end[2];
    Acc sum = 0;
#pragma unroll 1
    for (int t0 = box.begin[0]; t0 < box.end[0]; ++t0) {
      const Acc* row = taps + (t0 * p.kernel[1] + box.begin[1]) * p.kernel[2];
#pragma unroll 1
      for (int t1 = box.begin[1]; t1 < box.end[1]; ++t1) {
        int t2 = begin;
#pragma unroll 1
        do {
          Acc values[kTogether];
#pragma unroll
          for (int j = 0; j < kTogether; ++j) values[j] = t2 + j < end ? row[t2 + j] : Acc(0);
#pragma unroll
          for (int j = 0; j < kTogether; ++j) sum += values[j];
          t2 += kTogether;
        } while (t2 < end);
        row += p.kernel[2];
      }
    }
    to[plane * p.cells + cell] = narrow<T>(sum);
  }
}

}  // namespace convt_reduce::cuda
