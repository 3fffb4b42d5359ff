// Combine for kernels with few taps to a cell: cell sums are added up over taps, which is little
// work for a few batch elements, and weights are multiplied where they lie. They are read once per
// eight batch elements, in the order of their addresses, and not folded; from three batch elements
// on, and where they do not lie side by side, they are copied first.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/element.h"
#include "cpu/fold.h"
#include "cpu/kernels.h"
#include "cpu/products.h"
#include "cpu/results.h"

namespace convt_reduce::cpu {
namespace {

constexpr int64_t kBatchBlock = 8;       // batch elements multiplied with a tile of weights
constexpr int64_t kBatchChunk = 128;     // batch elements whose tap sums are held
constexpr int64_t kTileWeights = 288;    // of one input channel, in a tile
constexpr int64_t kRowsHeld = 16;        // input channels whose weights are held in a copy
constexpr int64_t kCopyFrom = 3;         // batch elements from which a copy pays
constexpr int64_t kFoldedChannels = 64;  // whose cell sums are added over taps side by side
constexpr int64_t kThread = 4 * kPiece;  // products that are worth a thread

// How the weights of one input channel are multiplied: as [outer][o][inner], where outer or inner
// is 1 and the other is all taps.
struct Rows {
  int64_t outer;
  int64_t inner;
  bool dense;  // they lie like that

  Rows(const Problem& problem, const Weight& weight) {
    const bool one_out = problem.c_out == problem.groups;
    int64_t next = 1;
    dense = true;
    for (int a = kAxes - 1; a >= 0; --a) {
      dense = dense && (problem.axis[a].kernel == 1 || weight.stride[a] == next);
      next *= problem.axis[a].kernel;
    }
    dense = dense && (one_out || weight.stride_c_out == next);
    const bool channels_last = !dense && weight.stride_c_out == 1;
    outer = channels_last ? problem.taps() : 1;
    inner = channels_last ? 1 : problem.taps();
    dense = dense || channels_last;
  }

  int64_t padded() const { return inner == 1 ? 1 : inner + kVector - 1; }
};

// The tap sums of batch elements [n_begin, n_end) as [batch][groups][outer][group_in][inner],
// each row continued periodically as add_products wants it.
template <typename Acc>
void tap_sums_of(const Problem& problem, const Cells& cells, const Rows& rows, int64_t n_begin,
                 int64_t n_end, const ParallelFor& parallel_for, const Acc* cell_sums, Acc* out) {
  const int64_t group_in = problem.c_in / problem.groups;
  const int64_t taps = problem.taps();
  const int64_t count = cells.count();
  // Groups side by side, or those of few channels would leave folding nothing to make vectors of.
  const int64_t together =
      std::min(problem.groups, std::max<int64_t>(1, kFoldedChannels / group_in));
  const int64_t width = together * group_in;
  const int64_t parts = (problem.groups + together - 1) / together;
  const int64_t size = rows.outer * group_in * rows.padded();  // of a group's tap sums
  const int64_t grain = std::max<int64_t>(1, kPiece / (width * (count + taps)));
  parallel_for((n_end - n_begin) * parts, grain, [&](int64_t first, int64_t last) {
    Folder<Acc> folder(cells, width);
    std::vector<Acc> turned(width * count);  // channels become neighbours: vectors for folding
    std::vector<Acc> sums(width * taps);
    for (int64_t item = first; item < last; ++item) {
      const int64_t n = item / parts;
      const int64_t group = item % parts * together;
      const int64_t groups = std::min(together, problem.groups - group);
      const Acc* from = cell_sums + ((n_begin + n) * problem.c_in + group * group_in) * count;
      for (int64_t c = 0; c < groups * group_in; ++c) {
        for (int64_t cell = 0; cell < count; ++cell) turned[cell * width + c] = *from++;
      }
      folder.cells_to_taps(turned.data(), sums.data());
      Acc* to = out + (n * problem.groups + group) * size;
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t outer = 0; outer < rows.outer; ++outer) {
          for (int64_t c = 0; c < group_in; ++c, to += rows.padded()) {
            for (int64_t tap = 0; tap < rows.inner; ++tap) {
              to[tap] = sums[(outer * rows.inner + tap) * width + g * group_in + c];
            }
            for (int64_t i = rows.inner; i < rows.padded(); ++i) to[i] = to[i - rows.inner];
          }
        }
      }
    }
  });
}

// The products of a tile of output channels with a block of batch elements, by one thread.
template <typename T>
class Tile {
 public:
  using Acc = AccumulateOf<T>;

  Tile(const Problem& problem, const Weight& weight, const Rows& rows, int64_t outs, int64_t batch)
      : problem_(problem),
        weight_(weight),
        rows_(rows),
        taps_(problem.taps()),
        sum_(batch * outs * taps_),
        lost_(batch * outs * taps_),
        copy_(!rows.dense || batch >= kCopyFrom ? kRowsHeld * outs * rows.inner : 0) {}

  // `w`: the weights of the first of `outs` channels. `tap_sums`: those of its group of the first
  // of `batch` elements, which lie `stride` apart.
  void multiply(const T* w, int64_t outs, const Acc* tap_sums, int64_t stride, int64_t batch) {
    const int64_t group_in = problem_.c_in / problem_.groups;
    const int64_t columns = outs * rows_.inner;
    const bool copied = !rows_.dense || batch >= kCopyFrom;
    outs_ = outs;
    std::fill_n(sum_.begin(), batch * outs * taps_, Acc(0));
    std::fill_n(lost_.begin(), batch * outs * taps_, Acc(0));
    for (int64_t outer = 0; outer < rows_.outer; ++outer) {
      const T* w_outer = w + (rows_.outer == 1 ? 0 : offset_of_tap(outer));
      for (int64_t c = 0; c < group_in; c += kRowsHeld) {
        const int64_t count = std::min(kRowsHeld, group_in - c);
        const T* w_rows = w_outer + c * weight_.stride_c_in;
        if (copied) copy(w_rows, count, outs);
        for (int64_t n = 0; n < batch; ++n) {
          const Acc* p = tap_sums + n * stride + (outer * group_in + c) * rows_.padded();
          const int64_t to = (n * rows_.outer + outer) * columns;
          if (copied) {
            add(copy_.data(), columns, count, columns, p, to);
          } else {
            add(w_rows, weight_.stride_c_in, count, columns, p, to);
          }
        }
      }
    }
  }

  // The sum over taps of the n-th element's products with the o-th channel.
  Acc total(int64_t n, int64_t o) const {
    const int64_t step = rows_.inner == 1 ? outs_ : 1;
    const int64_t first = n * outs_ * taps_ + o * rows_.inner;
    Acc sum = 0;
    Acc lost = 0;
    int64_t tap = 0;
    const auto take = [&](auto number) {
      constexpr int kCount = decltype(number)::value;
      for (; tap + kCount <= taps_; tap += kCount) {
        const int64_t at = first + tap * step;
        add_exactly(sum, lost, halves_sum<kCount, Acc, Acc>(&sum_[at], step));
        lost += halves_sum<kCount, Acc, Acc>(&lost_[at], step);
      }
    };
    take(std::integral_constant<int, 8>{});
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 1>{});
    return settled(sum, lost);
  }

 private:
  int64_t offset_of_tap(int64_t tap) const {
    const int64_t k1 = problem_.axis[1].kernel;
    const int64_t k2 = problem_.axis[2].kernel;
    return tap / k2 / k1 * weight_.stride[0] + tap / k2 % k1 * weight_.stride[1] +
           tap % k2 * weight_.stride[2];
  }

  void copy(const T* w, int64_t count, int64_t outs) {
    Acc* to = copy_.data();
    for (int64_t c = 0; c < count; ++c, w += weight_.stride_c_in) {
      if (rows_.dense) {
        convert(w, outs * rows_.inner, to);
        to += outs * rows_.inner;
        continue;
      }
      for (int64_t o = 0; o < outs; ++o, to += taps_) {
        copy_taps(problem_.axis, w + o * weight_.stride_c_out, weight_.stride, to);
      }
    }
  }

  template <typename W>
  void add(const W* w, int64_t w_stride, int64_t count, int64_t columns, const Acc* p, int64_t to) {
    if (rows_.inner == 1) {
      add_rows_of_products<true, W, Acc>(w, w_stride, count, columns, p, 1, 1, &sum_[to],
                                         &lost_[to]);
    } else {
      add_rows_of_products<false, W, Acc>(w, w_stride, count, columns, p, rows_.padded(),
                                          rows_.inner, &sum_[to], &lost_[to]);
    }
  }

  const Problem& problem_;
  const Weight& weight_;
  const Rows& rows_;
  int64_t taps_;
  int64_t outs_ = 0;
  std::vector<Acc> sum_, lost_;  // [batch][outer][o][inner]
  std::vector<Acc> copy_;        // [kRowsHeld][o][inner] of one outer
};

template <typename T>
void combine_taps_of(const Problem& problem, const Cells& cells, const Weight& weight,
                     const Bias& bias, const ParallelFor& parallel_for, const void* cell_sums,
                     void* y) {
  using Acc = AccumulateOf<T>;
  const Rows rows(problem, weight);
  const Results<T> results(problem, cells, weight, bias, cell_sums, y);
  const Acc scale = static_cast<Acc>(problem.mean_scale());
  const int64_t group_in = problem.c_in / problem.groups;
  const int64_t group_out = problem.c_out / problem.groups;
  const int64_t unit = rows.inner == 1 ? kVector : 1;
  const int64_t tile =
      std::min(group_out, unit * std::max<int64_t>(1, kTileWeights / (unit * problem.taps())));
  const int64_t tiles = (group_out + tile - 1) / tile;
  const int64_t size = rows.outer * group_in * rows.padded();  // of a group's tap sums
  std::vector<Acc> tap_sums(std::min(problem.batch, kBatchChunk) * problem.groups * size);

  for (int64_t chunk = 0; chunk < problem.batch; chunk += kBatchChunk) {
    const int64_t chunk_end = std::min(chunk + kBatchChunk, problem.batch);
    const int64_t block = std::min(kBatchBlock, chunk_end - chunk);
    const int64_t blocks = (chunk_end - chunk + block - 1) / block;
    tap_sums_of<Acc>(problem, cells, rows, chunk, chunk_end, parallel_for,
                     static_cast<const Acc*>(cell_sums), tap_sums.data());
    const int64_t products = group_in * tile * problem.taps() * block;
    const int64_t grain = std::max<int64_t>(1, kThread / products);
    parallel_for(problem.groups * tiles * blocks, grain, [&](int64_t first, int64_t last) {
      Tile<T> sums(problem, weight, rows, tile, block);
      for (int64_t item = first; item < last; ++item) {
        const int64_t n = item % blocks * block;
        const int64_t group = item / blocks / tiles;
        const int64_t o = item / blocks % tiles * tile;
        const int64_t outs = std::min(tile, group_out - o);
        const int64_t batch = std::min(block, chunk_end - chunk - n);
        sums.multiply(results.weights(group * group_out + o), outs,
                      tap_sums.data() + (n * problem.groups + group) * size, problem.groups * size,
                      batch);
        for (int64_t i = 0; i < batch; ++i) {
          for (int64_t j = 0; j < outs; ++j) {
            results.put(chunk + n + i, group * group_out + o + j, scale * sums.total(i, j));
          }
        }
      }
    });
  }
}

}  // namespace

void combine_taps(const Problem& problem, const Cells& cells, const Weight& weight,
                  const Bias& bias, Dtype dtype, const ParallelFor& parallel_for,
                  const void* cell_sums, void* y) {
  dispatch(dtype, [&](auto element) {
    combine_taps_of<decltype(element)>(problem, cells, weight, bias, parallel_for, cell_sums, y);
  });
}

}  // namespace convt_reduce::cpu
