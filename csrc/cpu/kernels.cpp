// Stats reads the input once, row by row, adding each stretch of a row to its cell. The inner loops
// keep a fixed number of independent sums, which compilers turn into vector code without leave to
// reorder floating-point additions; the order is part of the result. Combine, tap sums and spread
// are small next to it. Parts: element types, stats, combine, tap sums and spread, dispatch.
#include "cpu/kernels.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "cpu/fold.h"

namespace convt_reduce::cpu {
namespace {

template <typename T>
using AccumulateOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// ---- stats --------------------------------------------------------------------------------------

constexpr int kLanes = 16;         // independent sums of a contiguous stretch
constexpr int64_t kBlock = 4096;   // a lane adds at most kBlock / kLanes numbers in a row
constexpr int64_t kPiece = 65536;  // elements that one thread sums before it hands its part over
constexpr int64_t kTile = 64;      // channels summed side by side where they are neighbours
constexpr int64_t kTileBlock = 256;
constexpr int64_t kMaxPieceCells = 4096;  // with more cells a plane stays in one piece

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
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
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
    if (cells.count() > kMaxPieceCells) piece = problem.positions();
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

// ---- combine ------------------------------------------------------------------------------------

constexpr int64_t kBatchBlock = 64;  // batch elements that share one folding of the weights

template <typename Acc>
Acc dot(const Acc* a, const Acc* b, int64_t count) {
  Acc lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (int j = 0; i < count; ++i, ++j) lanes[j] += a[i] * b[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

// The sum over taps one by one. Folding adds weights before they meet a cell sum, and so would turn
// inf*1 + inf*(-1), a NaN in the convolution, into inf*0.5 or the like: where a folded sum is not
// finite this one decides.
template <typename Acc>
Acc tap_by_tap(const Cells& cells, const std::vector<Acc>& taps, const Acc* sums, int64_t channels,
               Acc scale) {
  const int64_t k1 = cells.axis[1].axis.kernel;
  const int64_t k2 = cells.axis[2].axis.kernel;
  const int64_t tap_count = cells.axis[0].axis.kernel * k1 * k2;
  Acc total = 0;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t cell = 0; cell < cells.count(); ++cell) {
      const CellBands bands = bands_of(cells, cell);
      const Band& band0 = cells.axis[0].band(bands.b[0]);
      const Band& band1 = cells.axis[1].band(bands.b[1]);
      const Band& band2 = cells.axis[2].band(bands.b[2]);
      const Acc sum = sums[c * cells.count() + cell];
      for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
        for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
          for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
            total += taps[c * tap_count + (t0 * k1 + t1) * k2 + t2] * scale * sum;
          }
        }
      }
    }
  }
  return total;
}

template <typename T>
void combine_of(const Problem& problem, const Cells& cells, const Weight& weight, const Bias& bias,
                const ParallelFor& parallel_for, const void* cell_sums, void* y) {
  using Acc = AccumulateOf<T>;
  const int64_t group_in = problem.c_in / problem.groups;
  const int64_t group_out = problem.c_out / problem.groups;
  const int64_t tap_count = problem.taps();
  const int64_t depth = group_in * cells.count();  // terms of one result
  const Acc scale = static_cast<Acc>(problem.mean_scale());
  const Acc multiplier = static_cast<Acc>(problem.multiplier);
  const int64_t batch_blocks = (problem.batch + kBatchBlock - 1) / kBatchBlock;
  const int64_t grain = std::max<int64_t>(1, kPiece / (depth + group_in * tap_count));

  parallel_for(problem.c_out * batch_blocks, grain, [&](int64_t first, int64_t last) {
    Folder<Acc> folder(cells);
    std::vector<Acc> taps(group_in * tap_count);
    std::vector<Acc> folded(depth);
    for (int64_t item = first; item < last; ++item) {
      const int64_t o = item / batch_blocks;
      const int64_t n_begin = item % batch_blocks * kBatchBlock;
      const int64_t n_end = std::min(n_begin + kBatchBlock, problem.batch);
      const int64_t c_begin = o / group_out * group_in;
      const T* w = static_cast<const T*>(weight.data) + o % group_out * weight.stride_c_out +
                   c_begin * weight.stride_c_in;
      Acc* tap = taps.data();
      for (int64_t c = 0; c < group_in; ++c) {
        for (int64_t t0 = 0; t0 < problem.axis[0].kernel; ++t0) {
          for (int64_t t1 = 0; t1 < problem.axis[1].kernel; ++t1) {
            for (int64_t t2 = 0; t2 < problem.axis[2].kernel; ++t2) {
              *tap++ = static_cast<Acc>(w[c * weight.stride_c_in + t0 * weight.stride[0] +
                                          t1 * weight.stride[1] + t2 * weight.stride[2]]);
            }
          }
        }
        folder.taps_to_cells(taps.data() + c * tap_count, folded.data() + c * cells.count());
      }
      for (Acc& value : folded) value *= scale;
      const Acc b = bias.data == nullptr
                        ? Acc(0)
                        : static_cast<Acc>(static_cast<const T*>(bias.data)[o * bias.stride]);
      for (int64_t n = n_begin; n < n_end; ++n) {
        const Acc* sums =
            static_cast<const Acc*>(cell_sums) + (n * problem.c_in + c_begin) * cells.count();
        Acc mean = dot(folded.data(), sums, depth);
        if (!std::isfinite(mean)) mean = tap_by_tap(cells, taps, sums, group_in, scale);
        static_cast<T*>(y)[n * problem.c_out + o] = static_cast<T>(multiplier * (mean + b));
      }
    }
  });
}

// ---- tap sums and spread
// --------------------------------------------------------------------------

template <typename Acc>
void tap_sums_of(const Problem& problem, const Cells& cells, const ParallelFor& parallel_for,
                 const void* cell_sums, void* out) {
  const int64_t grain = std::max<int64_t>(1, kBlock / (problem.taps() + cells.count()));
  parallel_for(problem.planes(), grain, [&](int64_t first, int64_t last) {
    Folder<Acc> folder(cells);
    for (int64_t plane = first; plane < last; ++plane) {
      folder.cells_to_taps(static_cast<const Acc*>(cell_sums) + plane * cells.count(),
                           static_cast<Acc*>(out) + plane * problem.taps());
    }
  });
}

template <typename T>
void spread_of(const Problem& problem, const Cells& cells, const Input& tap_grads,
               const ParallelFor& parallel_for, void* out) {
  using Acc = AccumulateOf<T>;
  const Axis* axis = problem.axis;
  const int64_t positions = problem.positions();
  parallel_for(problem.planes(), std::max<int64_t>(1, kPiece / positions),
               [&](int64_t first, int64_t last) {
                 Folder<Acc> folder(cells);
                 std::vector<Acc> taps(problem.taps());
                 std::vector<Acc> values(cells.count());
                 for (int64_t plane = first; plane < last; ++plane) {
                   const Acc* g = static_cast<const Acc*>(tap_grads.data) +
                                  plane / problem.c_in * tap_grads.stride_n +
                                  plane % problem.c_in * tap_grads.stride_c;
                   Acc* tap = taps.data();
                   for (int64_t t0 = 0; t0 < axis[0].kernel; ++t0) {
                     for (int64_t t1 = 0; t1 < axis[1].kernel; ++t1) {
                       for (int64_t t2 = 0; t2 < axis[2].kernel; ++t2) {
                         *tap++ = g[t0 * tap_grads.stride[0] + t1 * tap_grads.stride[1] +
                                    t2 * tap_grads.stride[2]];
                       }
                     }
                   }
                   folder.taps_to_cells(taps.data(), values.data());
                   T* row = static_cast<T*>(out) + plane * positions;
                   for (int64_t b0 = 0, d = 0; d < axis[0].size; ++d) {
                     if (d == cells.axis[0].end(b0)) ++b0;
                     for (int64_t b1 = 0, h = 0; h < axis[1].size; ++h, row += axis[2].size) {
                       if (h == cells.axis[1].end(b1)) ++b1;
                       for (int64_t b2 = 0; b2 < cells.axis[2].bands; ++b2) {
                         std::fill(row + cells.axis[2].band(b2).begin, row + cells.axis[2].end(b2),
                                   static_cast<T>(values[cells.index(b0, b1, b2)]));
                       }
                     }
                   }
                 }
               });
}

// ---- dispatch -----------------------------------------------------------------------------------

template <typename Body>
void dispatch(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::kFloat32:
      return body(float{});
    case Dtype::kFloat64:
      return body(double{});
    case Dtype::kFloat16:
      return body(c10::Half{});
    case Dtype::kBFloat16:
      return body(c10::BFloat16{});
  }
  throw std::logic_error("convt_reduce: unknown dtype");
}

}  // namespace

void stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype,
           const ParallelFor& parallel_for, void* cell_sums) {
  dispatch(dtype, [&](auto element) {
    stats_of<decltype(element)>(problem, cells, input, parallel_for, cell_sums);
  });
}

void combine(const Problem& problem, const Cells& cells, const Weight& weight, const Bias& bias,
             Dtype dtype, const ParallelFor& parallel_for, const void* cell_sums, void* y) {
  dispatch(dtype, [&](auto element) {
    combine_of<decltype(element)>(problem, cells, weight, bias, parallel_for, cell_sums, y);
  });
}

void tap_sums(const Problem& problem, const Cells& cells, Dtype dtype,
              const ParallelFor& parallel_for, const void* cell_sums, void* tap_sums) {
  dispatch(dtype, [&](auto element) {
    tap_sums_of<AccumulateOf<decltype(element)>>(problem, cells, parallel_for, cell_sums, tap_sums);
  });
}

void spread(const Problem& problem, const Cells& cells, const Input& tap_grads, Dtype dtype,
            const ParallelFor& parallel_for, void* grad) {
  dispatch(dtype, [&](auto element) {
    spread_of<decltype(element)>(problem, cells, tap_grads, parallel_for, grad);
  });
}

}  // namespace convt_reduce::cpu
