// Stats reads the input once, rows that share their cells column by column, others row by row.
//
// The inner loops keep a fixed number of independent sums, which compilers turn into vector code
// as they are. Short runs are added plainly, their sums with the error of each addition kept.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/columns.h"
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/row_of_cells.h"

namespace convt_reduce::cpu {
namespace {

constexpr int64_t kBlock = kLanes * kRun * kRun;
constexpr int64_t kTile = 64;        // channels summed side by side where they are neighbours,
constexpr int64_t kWholeTile = 128;  // but up to these all of them
constexpr int64_t kChannelRun = 2 * kRun;
constexpr int64_t kColumnRows = 4;      // rows from which they are added column by column
constexpr int64_t kMostColumns = 8192;  // whose sums stay in the nearest caches
constexpr int64_t kPieceCells = 16;     // positions per cell below which a plane stays in one piece
constexpr int64_t kTurned = 256;        // positions up to which planes are turned
constexpr int64_t kTurnedCells = 32;    // and these per cell

// lanes[j] += the sum of x[j], x[j + kLanes], .. of `rows` rows of kLanes elements.
template <typename T, typename Acc>
void add_rows(const T* x, int64_t rows, int64_t stride, Acc (&lanes)[kLanes]) {
  constexpr int64_t kAheadElements = kAhead / static_cast<int64_t>(sizeof(T));
  Acc run[kLanes] = {};
  if (stride == 1) {
    for (int64_t i = 0; i < rows; ++i, x += kLanes) {
      prefetch<kLanes>(x + kAheadElements);
      for (int j = 0; j < kLanes; ++j) run[j] += static_cast<Acc>(x[j]);
    }
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      for (int j = 0; j < kLanes; ++j) run[j] += static_cast<Acc>(x[(i * kLanes + j) * stride]);
    }
  }
  for (int j = 0; j < kLanes; ++j) lanes[j] += run[j];
}

// The sum of up to kBlock elements. The last ones have accumulators of their own: an index that
// only the run knows would keep the lanes out of registers.
template <typename T, typename Acc>
Acc sum_block(const T* x, int64_t count, int64_t stride) {
  Acc sum = 0;
  const int64_t rows = count / kLanes;
  if (rows > 0) {
    Acc lanes[kLanes] = {};
    for (int64_t row = 0; row < rows; row += kRun) {
      add_rows<T, Acc>(x + row * kLanes * stride, std::min(kRun, rows - row), stride, lanes);
    }
    sum = add_lanes(lanes);
  }
  int64_t i = rows * kLanes;
  Acc four[4] = {};
  if (stride == 1) {
    for (; i + 4 <= count; i += 4) {
      for (int j = 0; j < 4; ++j) four[j] += static_cast<Acc>(x[i + j]);
    }
  } else {
    for (; i + 4 <= count; i += 4) {
      for (int j = 0; j < 4; ++j) four[j] += static_cast<Acc>(x[(i + j) * stride]);
    }
  }
  Acc last = 0;
  for (; i < count; ++i) last += static_cast<Acc>(x[i * stride]);
  return sum + (((four[0] + four[2]) + (four[1] + four[3])) + last);
}

// Adds `count` positions of one plane to a band.
template <typename T, typename Acc>
void add_stretch(const T* x, int64_t count, int64_t stride, int64_t band, RowOfCells<Acc>& row) {
  for (int64_t i = 0; i < count; i += kBlock) {
    const Acc sum = sum_block<T, Acc>(x + i * stride, std::min(kBlock, count - i), stride);
    row.add(band, &sum);
  }
}

// The sums of up to kChannelRun positions of neighbouring channels, as many as registers hold at a
// time. Asks for what is read kAhead bytes later, at least the next such run.
template <typename T, typename Acc>
CONVT_WIDE static void sum_positions(const T* __restrict__ x, int64_t count, int64_t stride,
                                     int64_t channels, Acc* __restrict__ lanes) {
  const int64_t row_bytes = channels * sizeof(T);
  // One position's stride may be any number.
  const int64_t ahead = count > 1 ? std::max(kChannelRun, kAhead / row_bytes) * stride : 0;
  int64_t c = 0;
  const auto take = [&](auto number) {
    constexpr int kChannels = decltype(number)::value;
    for (; c + kChannels <= channels; c += kChannels) {
      Acc run[kChannels] = {};
      const T* position = x + c;
      for (int64_t i = 0; i < count; ++i, position += stride) {
        prefetch<kChannels>(position + ahead);
        for (int64_t j = 0; j < kChannels; ++j) run[j] += static_cast<Acc>(position[j]);
      }
      for (int64_t j = 0; j < kChannels; ++j) lanes[c + j] = run[j];
    }
  };
  take(std::integral_constant<int, 128>{});
  take(std::integral_constant<int, 64>{});
  take(std::integral_constant<int, 16>{});
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 1>{});
}

// Adds `count` positions of neighbouring channels to a band.
template <typename T, typename Acc>
void add_channels(const T* x, int64_t count, int64_t stride, int64_t channels, int64_t band,
                  RowOfCells<Acc>& row) {
  Acc lanes[kWholeTile];
  for (int64_t i = 0; i < count; i += kChannelRun) {
    sum_positions<T, Acc>(x + i * stride, std::min(kChannelRun, count - i), stride, channels,
                          lanes);
    row.add(band, lanes);
  }
}

// Adds whole rows of one plane, which share their bands on the outer axes.
template <typename T, typename Acc>
void add_run(const AxisCells& columns, const T* x, int64_t rows, int64_t stride,
             ColumnSums<Acc>& run, RowOfCells<Acc>& row) {
  run.add(x, rows, stride, columns.axis.size);
  for (int64_t b2 = 0; b2 < columns.bands; ++b2) {
    if (!columns.covered(b2)) continue;
    const int64_t begin = columns.band(b2).begin;
    const int64_t end = columns.end(b2);
    add_stretch<Acc, Acc>(run.sums() + begin, end - begin, 1, b2, row);
    // Infinite and NaN sums have said all there is to say.
    for (int64_t w = begin; w < end; w += kBlock) {
      const Acc lost = sum_block<Acc, Acc>(run.lost() + w, std::min(kBlock, end - w), 1);
      if (lost == lost) row.add(b2, &lost);
    }
  }
}

// How the input is cut: channels in tiles, positions in pieces. A function of sizes and strides.
struct Cutting {
  bool turned;     // planes become neighbours by a copy: adding up small ones is mostly overhead
  int64_t tile;    // channels per item
  int64_t tiles;   // items per batch element and piece
  int64_t piece;   // positions per item
  int64_t pieces;  // items per tile

  Cutting(const Problem& problem, const Cells& cells, const Input& input) {
    const bool neighbours = input.stride_c == 1 && input.stride[2] != 1 && problem.c_in >= 4;
    turned = !neighbours && problem.c_in >= 4 && problem.positions() <= kTurned &&
             problem.positions() <= kTurnedCells * cells.count();
    tile = neighbours || turned ? std::min(kTile, problem.c_in) : 1;
    if (neighbours && problem.c_in <= kWholeTile) tile = problem.c_in;
    tiles = (problem.c_in + tile - 1) / tile;
    piece = kPiece / tile;
    if (cells.count() > piece / kPieceCells) piece = problem.positions();
    pieces = (problem.positions() + piece - 1) / piece;
  }
};

// Adds positions [begin, end) of `channels` neighbouring planes to sums and lost, both
// [channels][cells].
template <typename T, typename Acc>
void add_positions(const Problem& problem, const Cells& cells, const Input& input, const T* x,
                   int64_t channels, int64_t begin, int64_t end, ColumnSums<Acc>& run,
                   RowOfCells<Acc>& row_sums, Acc* sums, Acc* lost) {
  const int64_t width = problem.axis[2].size;
  const int64_t height = problem.axis[1].size;
  const AxisCells& columns = cells.axis[2];
  row_sums.serve(channels);
  const bool by_column = channels == 1 && input.stride[2] == 1 && width <= kMostColumns;
  int64_t row_cell = -1;  // the first cell of the row of cells that row_sums holds
  for (int64_t position = begin; position < end;) {
    const int64_t row = position / width;
    const int64_t b0 = cells.axis[0].band_of(row / height);
    const int64_t b1 = cells.axis[1].band_of(row % height);
    if (cells.axis[0].covered(b0) && cells.axis[1].covered(b1)) {
      const int64_t first_cell = cells.index(b0, b1, 0);
      if (first_cell != row_cell) {
        if (row_cell >= 0) row_sums.move_to(sums, lost, row_cell, cells.count());
        row_cell = first_cell;
      }
      const T* x_row = x + (row / height) * input.stride[0] + (row % height) * input.stride[1];
      int64_t column = position - row * width;
      const int64_t run_rows = std::min(cells.axis[1].end(b1) - row % height, end / width - row);
      if (by_column && column == 0 && run_rows >= kColumnRows) {
        add_run<T, Acc>(columns, x_row, run_rows, input.stride[1], run, row_sums);
        position = (row + run_rows) * width;
        continue;
      }
      const int64_t column_end = std::min(width, end - row * width);
      for (int64_t b2 = columns.band_of(column); column < column_end; ++b2) {
        const int64_t stop = std::min(columns.end(b2), column_end);
        if (columns.covered(b2)) {
          const T* stretch = x_row + column * input.stride[2];
          if (channels == 1) {
            add_stretch<T, Acc>(stretch, stop - column, input.stride[2], b2, row_sums);
          } else {
            add_channels<T, Acc>(stretch, stop - column, input.stride[2], channels, b2, row_sums);
          }
        }
        column = stop;
      }
    }
    position = (row + 1) * width;
  }
  if (row_cell >= 0) row_sums.move_to(sums, lost, row_cell, cells.count());
}

// Copies `channels` planes to [positions][channels], whose strides it returns. Few at a time: more
// would have the same places in the nearest cache.
template <typename T>
Input turn(const Problem& problem, const Input& input, const T* x, int64_t channels, T* out) {
  const Axis* axis = problem.axis;
  for (int64_t first = 0; first < channels; first += kLanes) {
    const int64_t end = std::min<int64_t>(first + kLanes, channels);
    T* to = out;
    for (int64_t d = 0; d < axis[0].size; ++d) {
      for (int64_t h = 0; h < axis[1].size; ++h) {
        const T* row = x + d * input.stride[0] + h * input.stride[1];
        for (int64_t w = 0; w < axis[2].size; ++w, row += input.stride[2], to += channels) {
          for (int64_t c = first; c < end; ++c) to[c] = row[c * input.stride_c];
        }
      }
    }
  }
  Input turned;
  turned.stride_c = 1;
  turned.stride[2] = channels;
  turned.stride[1] = axis[2].size * channels;
  turned.stride[0] = axis[1].size * axis[2].size * channels;
  return turned;
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
        std::vector<T> turned(cut.turned ? problem.positions() * cut.tile : 0);
        ColumnSums<Acc> run;
        RowOfCells<Acc> row_sums(cells.axis[2].bands, cut.tile);
        std::vector<Acc> lost(cut.tile * cells.count());
        for (int64_t item = first; item < last; ++item) {
          const int64_t piece = item % cut.pieces;
          const int64_t c = item / cut.pieces % cut.tiles * cut.tile;
          const int64_t n = item / cut.pieces / cut.tiles;
          const int64_t channels = std::min(cut.tile, problem.c_in - c);
          Acc* part = sums + piece * sums_count + (n * problem.c_in + c) * cells.count();
          const int64_t part_size = channels * cells.count();
          std::fill(part, part + part_size, Acc(0));
          std::fill(lost.begin(), lost.end(), Acc(0));
          const T* x = static_cast<const T*>(input.data) + n * input.stride_n + c * input.stride_c;
          Input strides = input;
          if (cut.turned) {
            strides = turn(problem, input, x, channels, turned.data());
            x = turned.data();
          }
          add_positions<T, Acc>(problem, cells, strides, x, channels, piece * cut.piece,
                                std::min((piece + 1) * cut.piece, problem.positions()), run,
                                row_sums, part, lost.data());
          for (int64_t i = 0; i < part_size; ++i) part[i] = settled(part[i], lost[i]);
        }
      });
  if (cut.pieces == 1) return;
  parallel_for(sums_count, 4096, [&](int64_t first, int64_t last) {
    Acc* total = static_cast<Acc*>(out);
    for (int64_t i = first; i < last; ++i) {
      Acc sum = 0;
      Acc lost = 0;
      for (int64_t piece = 0; piece < cut.pieces; ++piece) {
        add_exactly(sum, lost, sums[piece * sums_count + i]);
      }
      total[i] = settled(sum, lost);
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
