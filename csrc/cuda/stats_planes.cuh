// Stats for inputs whose planes are contiguous: a warp, or the few warps of a block, per plane.
//
// `workers` warps take the tiles of a plane in turn and need nothing of each other until the end.
// A plane of more than a chunk is the work of several blocks, and a second kernel adds their sums.
#pragma once

#include "cuda/stats_long_rows.cuh"
#include "cuda/stats_short_rows.cuh"

namespace convt_reduce::cuda {

// The tiles of one chunk of a plane that are a warp's, into its places.
template <int kSize, bool kWords, typename T, typename Index, typename Acc>
__device__ inline void add_long_rows(const PlanesArguments<Index>& p, const T* plane, Index tile,
                                     Index end, Acc* places) {
  LongRows<kSize, kWords, T, Index> sums(p, threadIdx.x % kWarp);
  const int step = 1 << p.worker_bits;
  for (; tile < end; tile += step) sums.add_tile(plane, tile, places);
  sums.finish(places);
}

// The same for short rows. Memory in [limit_begin, limit_end) may be read.
template <int kSlots, typename T, typename Acc>
__device__ inline void add_short_rows(const PlanesArguments<int>& p, const T* plane, int tile,
                                      int end, uintptr_t limit_begin, uintptr_t limit_end,
                                      Loader& loader, unsigned char* rooms, Acc* places) {
  ShortRows<kSlots, T> sums(p, plane, rooms);
  const int step = 1 << p.worker_bits;
  for (; tile < end; tile += p.rooms * step) {
    const int count = min(p.rooms, (end - tile + step - 1) >> p.worker_bits);
    loader.start(count, limit_begin, limit_end, [&](int i) { return sums.tile_at(tile, i); });
    loader.wait();
    for (int i = 0; i < count; ++i) sums.add_tile(tile, i, places);
  }
  sums.finish(places);
}

// kSlots is kLongRows for those. Shared memory: places [warps][cells], and for short rows
// tiles [warps][rooms].
template <int kSlots, int kSize, typename T, typename Index>
__global__ void __launch_bounds__(kPlaneWarps* kWarp)
    stats_planes_kernel(const __grid_constant__ PlanesArguments<Index> p,
                        AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t barriers[kPlaneWarps];
  Acc* places = reinterpret_cast<Acc*>(shared);
  const int warp = threadIdx.x / kWarp;
  unsigned char* rooms = shared + p.rooms_at + warp * p.rooms * p.room_bytes;
  Loader loader(barriers + warp, p.rooms);
  const int workers = 1 << p.worker_bits;
  const int groups = kPlaneWarps >> p.worker_bits;  // planes of a block
  const int64_t items = p.planes * p.chunks;
  for (int i = threadIdx.x; i < kPlaneWarps * p.cells; i += kPlaneWarps * kWarp) places[i] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    const int64_t item = block * groups + (warp >> p.worker_bits);
    if (item < items) {
      const int64_t plane = p.chunks == 1 ? item : quotient(item, p.chunks);
      const int64_t n = plane < p.channels ? 0 : quotient(plane, p.channels);
      const T* stretch = static_cast<const T*>(p.input.data) + n * p.input.stride_n;
      const T* from = stretch + (plane - n * p.channels) * p.input.stride_c;
      const Index begin = static_cast<Index>(item - plane * p.chunks) * p.chunk;
      const Index end = p.tiles - begin < p.chunk ? p.tiles : begin + p.chunk;
      const Index first = begin + (warp & (workers - 1));
      Acc* mine = places + warp * p.cells;
      if constexpr (kSlots != kLongRows) {
        const T* limit = p.adjacent ? stretch : from;
        const int64_t size = p.adjacent ? p.channels * p.positions : p.positions;
        add_short_rows<kSlots>(p, from, first, end, address_of(limit), address_of(limit + size),
                               loader, rooms, mine);
      } else if (kSize == 1 || reinterpret_cast<uintptr_t>(from) % sizeof(unsigned) == 0) {
        add_long_rows<kSize, true>(p, from, first, end, mine);
      } else {
        add_long_rows<kSize, false>(p, from, first, end, mine);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < groups * p.cells; i += kPlaneWarps * kWarp) {
      const int group = i / p.cells;
      const int cell = i - group * p.cells;
      Acc sum = 0;
      for (int w = 0; w < workers; ++w) {
        Acc& place = places[(group * workers + w) * p.cells + cell];
        sum += place;
        place = 0;
      }
      const int64_t of = block * groups + group;
      if (of >= items) continue;
      const int64_t plane = p.chunks == 1 ? of : quotient(of, p.chunks);
      const int64_t row = (of - plane * p.chunks) * p.planes + plane;
      const int b01 = cell / p.columns.bands;
      const int b0 = b01 / p.rows.bands;
      const bool covered = p.depths.is_covered(b0) && p.rows.is_covered(b01 - b0 * p.rows.bands) &&
                           p.columns.is_covered(cell - b01 * p.columns.bands);
      cell_sums[row * p.cells + cell] = covered ? sum : Acc(0);
    }
    __syncthreads();
  }
}

}  // namespace convt_reduce::cuda
