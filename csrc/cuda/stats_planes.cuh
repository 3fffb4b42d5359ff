// Stats for inputs whose planes are contiguous: a warp, or the few warps of a block, per plane.
//
// `workers` warps take the tiles of a plane in turn and need nothing of each other until the end.
// A plane of more than a chunk is the work of several blocks, and combine or a second kernel adds
// their sums.
// Tiles pass through shared memory, where a warp has rooms for a few: all of them are on their way
// from the start, and one that has been added makes room for the next.
#pragma once

#include "cuda/fold_beside.cuh"
#include "cuda/stats_long_rows.cuh"
#include "cuda/stats_short_rows.cuh"

namespace convt_reduce::cuda {

// What a warp adds for a block: tiles [first, end) of a plane at `from`, each `workers` further.
// Memory in [limit_begin, limit_end) may be read.
template <typename T, typename Index>
struct PlaneShare {
  const T* from = nullptr;
  Index first = 0;
  Index end = 0;
  uintptr_t limit_begin = 0;
  uintptr_t limit_end = 0;
  int64_t row = -1;  // of the cell sums, if there is one

  __device__ PlaneShare(const PlanesArguments<Index>& p, int64_t block, int warp) {
    const int64_t item = block * (kPlaneWarps >> p.worker_bits) + (warp >> p.worker_bits);
    if (item >= p.planes * p.chunks) return;
    const int64_t plane = p.chunks == 1 ? item : quotient(item, p.chunks);
    const int64_t n = plane < p.channels ? 0 : quotient(plane, p.channels);
    const T* stretch = static_cast<const T*>(p.input.data) + n * p.input.stride_n;
    from = stretch + (plane - n * p.channels) * p.input.stride_c;
    const int64_t chunk = item - plane * p.chunks;
    row = chunk * p.planes + plane;
    const Index begin = static_cast<Index>(chunk) * p.chunk;
    end = p.tiles - begin < p.chunk ? p.tiles : begin + p.chunk;
    first = begin + (warp & ((1 << p.worker_bits) - 1));
    const T* limit = p.adjacent ? stretch : from;
    limit_begin = address_of(limit);
    limit_end = address_of(limit + (p.adjacent ? p.channels * p.positions : p.positions));
  }
};

// Adds them to the warp's places. `clear` makes these zeros, while the first tiles are on their
// way.
template <typename Sums, typename T, typename Index, typename Acc, typename Clear>
__device__ inline void add_share(const PlanesArguments<Index>& p, const PlaneShare<T, Index>& share,
                                 Loader& loader, unsigned char* rooms, Acc* places,
                                 const Clear& clear) {
  if (share.first >= share.end) {
    clear();
    return;
  }
  Sums sums(p, share.from);
  const int step = 1 << p.worker_bits;
  Index next = share.first;  // to load
  const auto load = [&](int room, int count) {
    loader.start_rooms(room, count, share.limit_begin, share.limit_end, [&](int i) {
      return sums.tile_at(next + (Index{i} << p.worker_bits), rooms + (room + i) * p.room_bytes);
    });
    next += Index{count} << p.worker_bits;
  };
  const Index all = (share.end - share.first + step - 1) >> p.worker_bits;
  load(0, static_cast<int>(min(Index{p.rooms}, all)));
  clear();
  sums.prepare(share.first);
  int room = 0;
  for (Index tile = share.first; tile < share.end; tile += step) {
    loader.wait(room, static_cast<int>((next - tile) >> p.worker_bits) - 1);
    sums.add_tile(tile, rooms + room * p.room_bytes, places);
    if (next < share.end) load(room, 1);
    if (++room == p.rooms) room = 0;
  }
  sums.finish(places);
}

// Blocks that a processor has registers for, at least: so that folding, beside, takes none from it.
template <int kSlots, typename T>
constexpr int plane_blocks() {
  if (sizeof(T) > sizeof(float)) return kSlots == kMostSlots ? 4 : 6;
  return kSlots == kMostSlots ? 6 : 8;
}

// kSlots is kLongRows for those. Shared memory: places [warps][cells] and tiles [warps][rooms].
template <int kSlots, typename T, typename Index>
__global__ void __launch_bounds__(kPlaneWarps* kWarp, plane_blocks<kSlots, T>())
    stats_planes_kernel(const __grid_constant__ PlanesArguments<Index> p,
                        const __grid_constant__ BesideFold fold, AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr bool kLong = kSlots == kLongRows;
  using Sums = std::conditional_t<kLong, LongRows<T, Index>,
                                  ShortRows<kLong ? kMostSlots : kSlots, T, Index>>;
  extern __shared__ __align__(kLineBytes) unsigned char shared[];
  __shared__ uint64_t barriers[kPlaneWarps * kMostRooms];
  __shared__ bool covered[kMostPlaneCells];
  __shared__ int64_t sums_rows[kPlaneWarps];  // of each group of workers
  if (folds_beside<T>(fold, shared)) return;
  Acc* places = reinterpret_cast<Acc*>(shared);
  const int warp = threadIdx.x / kWarp;
  Acc* mine = places + warp * p.cells;
  unsigned char* rooms = shared + p.rooms_at + warp * p.rooms * p.room_bytes;
  Loader loader(barriers + warp * kMostRooms, p.rooms, 1, p.passing);
  const int workers = 1 << p.worker_bits;
  const int groups = kPlaneWarps >> p.worker_bits;  // planes of a block
  int64_t block = blockIdx.x - static_cast<unsigned>(fold.blocks);
  PlaneShare<T, Index> share(p, block, warp);
  const auto clear = [&] {
#pragma unroll 1
    for (int i = threadIdx.x % kWarp; i < p.cells; i += kWarp) mine[i] = 0;
    sums_rows[warp >> p.worker_bits] = share.row;
#pragma unroll 1
    for (int cell = threadIdx.x; cell < p.cells; cell += kPlaneWarps * kWarp) {
      const int b01 = cell / p.columns.bands;
      const int b0 = b01 / p.rows.bands;
      covered[cell] = p.depths.is_covered(b0) && p.rows.is_covered(b01 - b0 * p.rows.bands) &&
                      p.columns.is_covered(cell - b01 * p.columns.bands);
    }
    __syncwarp();
  };
  // What a warp reads first is asked for before its wait. With 2 bytes to an element, more asked
  // for, or smaller inputs, calls become slower.
  if constexpr (std::is_same_v<T, float>) {
    constexpr uintptr_t kAheadBytes = 512;
    if (p.passing && threadIdx.x % kWarp == 0 && share.first < share.end) {
      const Stretch tile = Sums(p, share.from).tile_at(share.first, rooms);
      const uintptr_t begin = (tile.begin + kPiece - 1) / kPiece * kPiece;
      const uintptr_t end = min(tile.end, begin + kAheadBytes) / kPiece * kPiece;
      if (end > begin) ask_for_cache(begin, static_cast<unsigned>(end - begin));
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();

  while (true) {
    add_share<Sums>(p, share, loader, rooms, mine, clear);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < groups * p.cells; i += kPlaneWarps * kWarp) {
      const int group = groups == 1 ? 0 : i / p.cells;
      const int cell = i - group * p.cells;
      const Acc* of_group = places + group * workers * p.cells + cell;
      Acc sum = 0;
#pragma unroll
      for (int w = 0; w < kPlaneWarps; ++w) {
        if (w < workers) sum += of_group[w * p.cells];
      }
      const int64_t row = sums_rows[group];
      if (row < 0) continue;
      cell_sums[row * p.cells + cell] = covered[cell] ? sum : Acc(0);
    }
    block += gridDim.x - static_cast<unsigned>(fold.blocks);
    if (block >= p.blocks) break;
    __syncthreads();
    share = PlaneShare<T, Index>(p, block, warp);
  }
}

}  // namespace convt_reduce::cuda
