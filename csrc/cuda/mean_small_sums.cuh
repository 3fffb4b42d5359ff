// A small call's cell sums: mean_small.cuh. The additions are those of stats_small_tile.cuh, in the
// same order.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/mean_small_tiles.cuh"

namespace convt_reduce::cuda {

// order as list_elements() makes it, by all threads of a block.
__device__ inline void list_plane(const ListedPlane& plane, const MeanTiles& tiles,
                                  int element_bytes, unsigned short* order) {
  const int columns = plane.columns.size;
  const int rows = plane.rows.size;
  const int positions = plane.positions();
#pragma unroll 1
  for (int i = threadIdx.x; i < positions; i += blockDim.x) {
    const int of_rows = quotient_by(i, tiles.columns_inverse);
    const int column = i - of_rows * columns;
    const int depth = plane.depths.size == 1 ? 0 : quotient_by(of_rows, tiles.rows_inverse);
    const int row = of_rows - depth * rows;
    const Found<int> b0 = plane.depths.locate_inline(depth);
    const Found<int> b1 = plane.rows.locate_inline(row);
    const Found<int> b2 = plane.columns.locate_inline(column);
    const int before =
        b0.begin * rows * columns + b0.length() * (b1.begin * columns + b1.length() * b2.begin);
    const int own =
        ((depth - b0.begin) * b1.length() + row - b1.begin) * b2.length() + column - b2.begin;
    unsigned short* to = order + before + own;
#pragma unroll 1
    for (int channel = 0; channel < plane.channels; ++channel, to += positions) {
      *to = static_cast<unsigned short>((i * plane.channels + channel) * element_bytes);
    }
  }
}

// The cells of a plane, by all warps of a block.
__device__ inline void list_cells(const ListedPlane& plane, const MeanTiles& tiles, int warp,
                                  ListedCell* cells, int& wide_cells) {
  const int lane = threadIdx.x % kWarp;
  if (tiles.listed > 0) {
    // Arguments are read quickly where a warp reads the same.
    const int warps = blockDim.x / kWarp;
    for (int i = warp; i < tiles.listed; i += warps) {
      const ListedCell cell = tiles.cells[i];
      if (lane == 0) cells[i] = cell;
    }
    if (threadIdx.x == 0) wide_cells = tiles.wide;
  } else if (warp == 0) {
    const int wide = list_cells(plane, kNarrow, cells);
    if (lane == 0) wide_cells = wide;
  }
}

// As SmallTile::at(), for as few tiles as there are here.
template <typename T>
__device__ inline SmallTile mean_tile(const SmallArguments& p, const MeanTiles& tiles,
                                      uintptr_t data, int index) {
  const int plane_bytes = p.positions * static_cast<int>(sizeof(T));
  const int planes = static_cast<int>(p.planes);
  const int stretch = quotient_by(index, tiles.tiles_inverse);
  const int first = (index - stretch * static_cast<int>(p.tiles)) * p.per_tile;
  SmallTile tile;
  tile.limit_begin = data + stretch * p.stretch_bytes;
  tile.limit_end = tile.limit_begin + planes * plane_bytes;
  tile.begin = tile.limit_begin + first * plane_bytes;
  tile.first = stretch * planes + first;
  tile.planes = min(p.per_tile, planes - first);
  return tile;
}

// A warp's first load: as SmallLoad::start(), with all found out beforehand.
class FirstLoad {
 public:
  // For all lanes, of which `most` may copy.
  __device__ void prepare(const SmallArguments& p, const SmallTile& tile, const SmallLoad& copy,
                          int most) {
    const int lane = threadIdx.x % kWarp;
    most_ = most;
    bool whole = true;
    if (lane < copy.stretches(p, tile)) {
      const Stretch stretch = copy.stretch(p, tile, lane);
      from_ = stretch.begin - stretch.begin % kPiece;
      const uintptr_t last = (stretch.end + kPiece - 1) / kPiece * kPiece;
      whole = from_ >= tile.limit_begin && last <= tile.limit_end;
      bytes_ = static_cast<unsigned>(last - from_);
      to_ = shared_address(stretch.to);
    }
    // Else pieces reach over an end of what may be read, and SmallLoad::start() knows what to do.
    prepared_ = __all_sync(0xffffffffu, whole);
  }

  __device__ __forceinline__ void start(const SmallArguments& p, const SmallTile& tile,
                                        const SmallLoad& copy, Loader& loader,
                                        unsigned barrier) const {
    if (!prepared_) {
      copy.start(p, tile, loader);
      return;
    }
    if (static_cast<int>(threadIdx.x) % kWarp >= most_) return;
    expect_bytes(barrier, bytes_);
    if (bytes_ > 0) copy_bulk(to_, from_, bytes_, barrier);
  }

 private:
  uintptr_t from_ = 0;
  unsigned bytes_ = 0;  // 0: this lane copies nothing
  unsigned to_ = 0;
  int most_ = 0;
  bool prepared_ = false;
};

// Planes of a tile in shared memory.
struct MeanPlanes {
  const unsigned char* at;
  int plane_bytes;
  int group_bits;
  int gap;
  int count;
  unsigned inverse;  // of count

  template <typename T>
  __device__ static MeanPlanes of(const SmallArguments& p, const MeanTiles& tiles,
                                  const SmallTile& tile, const unsigned char* at) {
    return {at,           p.positions * static_cast<int>(sizeof(T)),
            p.group_bits, p.gap,
            tile.planes,  tile.planes == p.per_tile ? tiles.planes_inverse : tiles.last_inverse};
  }
  __device__ const unsigned char* plane(int number) const {
    return at + number * plane_bytes + (number >> group_bits) * gap;
  }
};

// The sums of wide cells: results [planes][cells].
template <int kLanes, int kTogether, typename T>
__device__ inline void sum_wide_cells(const MeanPlanes& planes, int all_cells,
                                      const ListedCell* cells, int wide,
                                      const unsigned short* order, float* results) {
  constexpr int kGroups = kWarp / kLanes;
  constexpr int kOwners = kLanes / kTogether;  // lanes that have a plane's sum
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int first = 0; first < planes.count; first += kGroups * kTogether) {
    const int plane = first + lane / kLanes * kTogether;
    const unsigned char* from[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) from[i] = planes.plane(min(plane + i, planes.count - 1));
    const int own = plane + lane % kLanes / kOwners;
#pragma unroll 1
    for (int i = 0; i < wide; ++i) {
      const ListedCell cell = cells[i];
      float sums[kTogether];
      sum_wide<kLanes, kTogether, T, 2>(from, order + cell.begin, cell.end - cell.begin,
                                        lane % kLanes, sums);
      const float sum = group_sum<kLanes>(sums, lane);
      if (lane % kOwners == 0 && own < planes.count) results[own * all_cells + cell.cell] = sum;
    }
  }
}

// The same where planes have at most half of a warp's lanes: what a lane would add at a time in
// sum_wide() are the parts that all lanes share, to be added in that order.
template <int kLanes, typename T>
__device__ inline void sum_wide_cells_in_parts(const MeanPlanes& planes, int all_cells,
                                               const ListedCell* cells, int wide,
                                               const unsigned short* order, float* parts,
                                               float* results) {
  constexpr int kFull = 8;
  constexpr int kRest = 4;
  const int lane = threadIdx.x % kWarp;
  const int own = lane % kLanes;
  const int lanes = planes.count * kLanes;
#pragma unroll 1
  for (int i = 0; i < wide; ++i) {
    const ListedCell cell = cells[i];
    const int count = cell.end - cell.begin;
    const int full = count / (kFull * kLanes);
    const int rest = (count - full * kFull * kLanes + kRest * kLanes - 1) / (kRest * kLanes);
#pragma unroll 1
    for (int at = lane; at < (full + rest) * lanes; at += kWarp) {
      const int part = quotient_by(at / kLanes, planes.inverse);
      const unsigned char* const from = planes.plane(at / kLanes - part * planes.count);
      const int begin =
          cell.begin + min(part, full) * (kFull * kLanes) + max(part - full, 0) * (kRest * kLanes);
      const int end = part < full ? cell.end : min(int{cell.end}, begin + kRest * kLanes);
      float values[kFull];
#pragma unroll
      for (int k = 0; k < kFull; ++k) {
        const int element = begin + own + k * kLanes;
        const float value = element_at<T>(from + order[min(element, end - 1)]);
        values[k] = element < end ? value : 0.0f;
      }
      parts[at] = halves_sum(values);
    }
    __syncwarp();
    float sum = 0;
#pragma unroll 4
    for (int part = 0; part < full + rest; ++part) {
      sum += parts[part * lanes + min(lane, lanes - 1)];
    }
#pragma unroll
    for (int half = kLanes / 2; half > 0; half /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, half);
    if (own == 0 && lane < lanes) results[lane / kLanes * all_cells + cell.cell] = sum;
    __syncwarp();
  }
}

// The sums of the other cells.
template <typename T>
__device__ inline void sum_narrow_cells(const MeanPlanes& planes, int all_cells,
                                        const ListedCell* cells, int wide,
                                        const unsigned short* order, float* results) {
  constexpr int kAhead = 8;
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < (all_cells - wide) * planes.count; i += kWarp) {
    const int of_cell = quotient_by(i, planes.inverse);
    const int plane = i - of_cell * planes.count;
    const ListedCell cell = cells[wide + of_cell];
    const unsigned char* const at = planes.plane(plane);
    float sum = 0;
#pragma unroll 1
    for (int begin = cell.begin; begin < cell.end; begin += kAhead) {
      float values[kAhead];
#pragma unroll
      for (int e = 0; e < kAhead; ++e) {
        values[e] = element_at<T>(at + order[min(begin + e, cell.end - 1)]);
      }
#pragma unroll
      for (int e = 0; e < kAhead; ++e) sum = begin + e < cell.end ? sum + values[e] : sum;
    }
    results[plane * all_cells + cell.cell] = sum;
  }
}

}  // namespace convt_reduce::cuda
