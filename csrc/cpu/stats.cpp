// Stats reads the input once, row by row, adding each stretch of a row to its cell.
//
// The inner loops keep a fixed number of independent sums, which compilers turn into vector code
// without leave to reorder floating-point additions; the order is part of the result.
#include <algorithm>
#include <vector>

#include "cpu/element.h"
#include "cpu/kernels.h"

namespace convt_reduce::cpu {
namespace {

constexpr int64_t kBlock = 4096;  // a lane adds at most kBlock / kLanes numbers in a row
constexpr int64_t kTile = 64;     // channels summed side by side where they are neighbours
constexpr int64_t kTileBlock = 256;
constexpr int64_t kPieceCells = 16;  // positions per cell below which a plane stays in one piece

template <typename T, typename Acc>
Acc sum_block(const T* x, int64_t count, int64_t stride) {
  Acc lanes[kLanes] = {};
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= count; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) lanes[j] += static_cast<Acc>(x[i + j]);
    }
  } else {
    for (; i + kLanes <= count; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) lanes[j] += static_cast<Acc>(x[(i + j) * stride]);
    }
  }
  for (int j = 0; i < count; ++i, ++j) lanes[j] += static_cast<Acc>(x[i * stride]);
  return add_lanes(lanes);
}

template <typename T, typename Acc>
Acc sum_stretch(const T* x, int64_t count, int64_t stride) {
  Acc sum = 0;
  for (int64_t i = 0; i < count; i += kBlock) {
    sum += sum_block<T, Acc>(x + i * stride, std::min(kBlock, count - i), stride);
  }
  return sum;
}

// sums[j] += the sum of `count` positions of channel j, for neighbouring channels.
template <typename T, typename Acc>
void add_channels(const T* x, int64_t count, int64_t stride, int64_t channels, Acc* sums) {
  for (int64_t block = 0; block < count; block += kTileBlock) {
    const int64_t end = std::min(block + kTileBlock, count);
    Acc lanes[kTile] = {};
    for (int64_t i = block; i < end; ++i) {
      const T* row = x + i * stride;
      if (channels == kTile) {
        for (int64_t j = 0; j < kTile; ++j) lanes[j] += static_cast<Acc>(row[j]);
      } else {
        for (int64_t j = 0; j < channels; ++j) lanes[j] += static_cast<Acc>(row[j]);
      }
    }
    for (int64_t j = 0; j < channels; ++j) sums[j] += lanes[j];
  }
}

// How the input is cut: channels in tiles, positions in pieces. A function of sizes and strides.
struct Cutting {
  int64_t tile;    // channels per item
  int64_t tiles;   // items per batch element and piece
  int64_t piece;   // positions per item
  int64_t pieces;  // items per tile

  Cutting(const Problem& problem, const Cells& cells, const Input& input) {
    const bool neighbours = input.stride_c == 1 && input.stride[2] != 1 && problem.c_in >= 4;
    tile = neighbours ? kTile : 1;
    tiles = (problem.c_in + tile - 1) / tile;
    piece = kPiece / tile;
    if (cells.count() > piece / kPieceCells) piece = problem.positions();
    pieces = (problem.positions() + piece - 1) / piece;
  }
};

// Adds positions [begin, end) of `channels` neighbouring planes to sums [channels][cells].
template <typename T, typename Acc>
void add_positions(const Problem& problem, const Cells& cells, const Input& input, const T* x,
                   int64_t channels, int64_t begin, int64_t end, Acc* sums) {
  const int64_t width = problem.axis[2].size;
  const int64_t height = problem.axis[1].size;
  const AxisCells& columns = cells.axis[2];
  Acc tile_sums[kTile];
  for (int64_t position = begin; position < end;) {
    const int64_t row = position / width;
    const int64_t b0 = cells.axis[0].band_of(row / height);
    const int64_t b1 = cells.axis[1].band_of(row % height);
    const T* x_row = x + (row / height) * input.stride[0] + (row % height) * input.stride[1];
    int64_t column = position - row * width;
    const int64_t column_end = std::min(width, end - row * width);
    int64_t b2 = columns.band_of(column);
    const bool row_covered = cells.axis[0].covered(b0) && cells.axis[1].covered(b1);
    while (row_covered && column < column_end) {
      const int64_t stop = std::min(columns.end(b2), column_end);
      if (columns.covered(b2)) {
        const int64_t cell = cells.index(b0, b1, b2);
        const T* stretch = x_row + column * input.stride[2];
        if (channels == 1) {
          sums[cell] += sum_stretch<T, Acc>(stretch, stop - column, input.stride[2]);
        } else {
          std::fill(tile_sums, tile_sums + channels, Acc(0));
          add_channels<T, Acc>(stretch, stop - column, input.stride[2], channels, tile_sums);
          for (int64_t j = 0; j < channels; ++j) sums[j * cells.count() + cell] += tile_sums[j];
        }
      }
      column = stop;
      ++b2;
    }
    position = (row + 1) * width;
  }
}

template <typename T>
void stats_of(const Problem& problem, const Cells& cells, const Input& input,
              const ParallelFor& parallel_for, void* out) {
  using Acc = AccumulateOf<T>;
  const Cutting cut(problem, cells, input);
  const int64_t sums_count = problem.planes() * cells.count();
  std::vector<Acc> parts;  // the pieces' sums [pieces][planes][cells], where there are several
  Acc* sums = static_cast<Acc*>(out);
  if (cut.pieces > 1) {
    parts.resize(cut.pieces * sums_count);
    sums = parts.data();
  }
  const int64_t items = problem.batch * cut.tiles * cut.pieces;
  const int64_t item_elements = std::min(cut.piece, problem.positions()) * cut.tile;
  parallel_for(
      items, std::max<int64_t>(1, kPiece / item_elements), [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; ++item) {
          const int64_t piece = item % cut.pieces;
          const int64_t c = item / cut.pieces % cut.tiles * cut.tile;
          const int64_t n = item / cut.pieces / cut.tiles;
          const int64_t channels = std::min(cut.tile, problem.c_in - c);
          Acc* part = sums + piece * sums_count + (n * problem.c_in + c) * cells.count();
          std::fill(part, part + channels * cells.count(), Acc(0));
          const T* x = static_cast<const T*>(input.data) + n * input.stride_n + c * input.stride_c;
          add_positions<T, Acc>(problem, cells, input, x, channels, piece * cut.piece,
                                std::min((piece + 1) * cut.piece, problem.positions()), part);
        }
      });
  if (cut.pieces == 1) return;
  parallel_for(sums_count, 4096, [&](int64_t first, int64_t last) {
    Acc* total = static_cast<Acc*>(out);
    for (int64_t i = first; i < last; ++i) {
      Acc sum = 0;
      for (int64_t piece = 0; piece < cut.pieces; ++piece) sum += sums[piece * sums_count + i];
      total[i] = sum;
    }
  });
}

}  // namespace

void stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype,
           const ParallelFor& parallel_for, void* cell_sums) {
  dispatch(dtype, [&](auto element) {
    stats_of<decltype(element)>(problem, cells, input, parallel_for, cell_sums);
  });
}

}  // namespace convt_reduce::cpu
