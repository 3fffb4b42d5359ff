// What a block of stats_steps.cuh reads, in which order.
#pragma once

#include <algorithm>

#include "cuda/axis_bands.cuh"
#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kStepsThreads = 256;  // of a block, at most
constexpr int kStepLoads = 8;       // steps of a thread that are on their way together: a tile

// A step is listed as its offset in bytes, a multiple of 16, and as the threads that take no part.
enum StepFlags : unsigned {
  kNoLastRow = 1,     // those with rows behind the chunk's end, in its last step down,
  kNoLastColumn = 2,  // or columns, in its last step across
  kNoThread = 4,      // those that have nothing to read
  kNoStep = 8,        // all: it fills up a run's last tile
  kStepFlags = 15,
};

// Steps of one axis that are alike: all in one band, or a single one across a cut.
struct AxisRun {
  int begin;  // in the chunk
  int steps;
  int band;  // kMixed: as many as its positions are in
};
constexpr int kMixed = -1;
constexpr int kNoTap = -2;  // a band that no tap covers
constexpr int kMostAxisRuns = 2 * kInlineBands;
static_assert(kMostAxisRuns <= kWarp, "a lane takes a run");

// The runs of a whole axis, made on the host: a block only looks up which its chunk has.
struct AxisRuns {
  int count = 0;
  int begin[kMostAxisRuns + 1] = {};  // steps; a run ends where the next begins
  signed char band[kMostAxisRuns] = {};

  AxisRuns(const AxisCells& axis, int64_t step) {
    const int64_t size = axis.axis.size;
    for (int64_t at = 0, b = 0; at < size;) {
      while (axis.end(b) <= at) ++b;
      const int64_t band_end = axis.end(b);
      const int64_t whole = band_end == size ? ceil_div(size - at, step) : (band_end - at) / step;
      begin[count] = static_cast<int>(at / step);
      band[count++] = static_cast<signed char>(whole == 0 ? kMixed : axis.covered(b) ? b : kNoTap);
      at += std::max<int64_t>(whole, 1) * step;
    }
    begin[count] = static_cast<int>(ceil_div(size, step));
  }
};

// Steps that are alike on all axes.
struct alignas(kVectorBytes) StepsRun {
  int tiles;
  int place;   // of the sums of the first cell that its positions may be in
  int row;     // where the bands of its rows are not the same: its first row, else kMixed
  int column;  // the same for columns
};

// a / b for b > 0 and a of up to 2^20: half of an integer is far more than what the floats lose.
__device__ inline int small_quotient(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// Where a chunk lies, on every axis.
struct StepsChunk {
  int begin[kAxes];  // positions
  int end[kAxes];
  int first[kAxes];  // steps of the axis
  int last[kAxes];   // and one more
};

// The steps of a chunk, and where cells have their sums: all threads of a block make it together.
struct StepsList {
  AxisRun* axis_runs;  // [kAxes][kMostAxisRuns]
  StepsRun* runs;
  unsigned* steps;
  int* cell_places;  // -1: the chunk has nothing of the cell
  int* first_band;   // [kAxes], of the chunk
  int* axis_counts;  // [kAxes], of its runs
  int run_count = 0;

  // Lists a chunk, with sums for the cells of `places` bands. The bytes of an axis are those from
  // one of its positions to the next; a step has `size` of them.
  __device__ void make(const AxisBands<int> (&axis)[kAxes], const AxisRuns (&runs_of_axis)[kAxes],
                       const StepsChunk& chunk, const int (&places)[kAxes],
                       const int (&size)[kAxes], const unsigned (&bytes)[kAxes]) {
    const int thread = threadIdx.x;
    const int lane = thread % kWarp;
    const int warp = thread / kWarp;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      if (warp == a % warps) list_axis(axis[a], runs_of_axis[a], chunk, size[a], a);
    }
    __syncthreads();
    const int counts1 = axis_counts[1];
    const int counts2 = axis_counts[2];
    run_count = axis_counts[0] * counts1 * counts2;
    int tiles_before = 0;
    for (int base = 0; base < run_count; base += kWarp) {
      // A lane has a run of steps; then the warps share the steps of all of these.
      const int index = base + lane;
      const int across = small_quotient(index, counts2);
      const int at0 = small_quotient(across, counts1);
      const int at1 = kMostAxisRuns + across - at0 * counts1;
      const int at2 = 2 * kMostAxisRuns + index - across * counts2;
      const bool exists = index < run_count;
      int tiles = 0;
      if (exists) {
        const AxisRun slabs = axis_runs[at0];
        const AxisRun rows = axis_runs[at1];
        const AxisRun columns = axis_runs[at2];
        tiles = (slabs.steps * rows.steps * columns.steps + kStepLoads - 1) / kStepLoads;
        if (warp == 0) {
          const int band0 = slabs.band - first_band[0];
          const int band1 = max(rows.band - first_band[1], 0);
          const int band2 = max(columns.band - first_band[2], 0);
          runs[index] = {tiles, (band0 * places[1] + band1) * places[2] + band2,
                         rows.band == kMixed ? rows.begin : kMixed,
                         columns.band == kMixed ? columns.begin : kMixed};
        }
      }
      int tiles_end = tiles;
#pragma unroll
      for (int apart = 1; apart < kWarp; apart *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, tiles_end, apart);
        if (lane >= apart) tiles_end += other;
      }
      const int here = min(run_count - base, kWarp);
      const int share = here >= warps ? 1 : small_quotient(warps, here);  // warps of a run
      for (int item = warp; item < here * share; item += warps) {
        const int of = small_quotient(item, share);
        const int its_tiles = __shfl_sync(0xffffffffu, tiles, of);
        const int its_end = __shfl_sync(0xffffffffu, tiles_end, of);
        const AxisRun slabs = axis_runs[__shfl_sync(0xffffffffu, at0, of)];
        const AxisRun rows = axis_runs[__shfl_sync(0xffffffffu, at1, of)];
        const AxisRun columns = axis_runs[__shfl_sync(0xffffffffu, at2, of)];
        unsigned* const to = steps + (tiles_before + its_end - its_tiles) * kStepLoads;
        const int count = slabs.steps * rows.steps * columns.steps;
        for (int i = (item - of * share) * kWarp + lane; i < its_tiles * kStepLoads;
             i += share * kWarp) {
          unsigned step = kNoStep;
          if (i < count) {
            const int down = small_quotient(i, columns.steps);
            const int s0 = slabs.steps == 1 ? 0 : small_quotient(down, rows.steps);
            const int slab = slabs.begin + s0;
            const int row = rows.begin + (down - s0 * rows.steps) * size[1];
            const int column = columns.begin + (i - down * columns.steps) * size[2];
            step = (slab * bytes[0] + row * bytes[1] + column * bytes[2]) | kNoThread |
                   (chunk.begin[1] + row + size[1] > chunk.end[1] ? kNoLastRow : 0) |
                   (chunk.begin[2] + column + size[2] > chunk.end[2] ? kNoLastColumn : 0);
          }
          to[i] = step;
        }
      }
      tiles_before += __shfl_sync(0xffffffffu, tiles_end, kWarp - 1);
    }
    const int cells = axis[0].bands * axis[1].bands * axis[2].bands;
    // By the last threads, which have fewer steps to list.
    for (int cell = blockDim.x - 1 - thread; cell < cells; cell += blockDim.x) {
      const int across = small_quotient(cell, axis[2].bands);
      const int up = small_quotient(across, axis[1].bands);
      const int b0 = up - first_band[0];
      const int b1 = across - up * axis[1].bands - first_band[1];
      const int b2 = cell - across * axis[2].bands - first_band[2];
      const bool has =
          b0 >= 0 && b0 < places[0] && b1 >= 0 && b1 < places[1] && b2 >= 0 && b2 < places[2];
      cell_places[cell] = has ? (b0 * places[1] + b1) * places[2] + b2 : -1;
    }
    __syncthreads();
  }

 private:
  // What a chunk has of axis `a`, by one warp: a lane for each of the axis' runs.
  __device__ void list_axis(const AxisBands<int>& axis, const AxisRuns& all,
                            const StepsChunk& chunk, int step, int a) {
    const int lane = threadIdx.x % kWarp;
    const int r = min(lane, all.count - 1);
    const int run_begin = max(all.begin[r], chunk.first[a]);
    const int run_end = min(all.begin[r + 1], chunk.last[a]);
    const int band = all.band[r];
    const bool has = lane < all.count && run_begin < run_end && band != kNoTap;
    const unsigned those = __ballot_sync(0xffffffffu, has);
    if (has) {
      axis_runs[a * kMostAxisRuns + __popc(those & ((1u << lane) - 1))] = {
          (run_begin - chunk.first[a]) * step, run_end - run_begin, band};
    }
    if (lane == 0) {
      first_band[a] = axis.locate_inline(chunk.begin[a]).band;
      axis_counts[a] = __popc(those);
    }
  }
};

// The most bands that a chunk of `size` positions has.
inline int most_bands(const AxisCells& axis, int64_t size) {
  int most = 1;
  int bands = 1;
  int64_t chunk = 0;
  for (int64_t b = 1; b < axis.bands; ++b) {
    const int64_t cut = axis.band(b).begin;
    if (cut / size != chunk) bands = 1;
    chunk = cut / size;
    if (cut % size != 0) ++bands;
    most = std::max(most, bands);
  }
  return most;
}

// The shared memory of a block, in bytes: the runs of axes, those of steps, the steps, the places
// of cells, and sums [places][elements][pitch].
struct StepsRoom {
  int places[kAxes];  // bands that a chunk may have
  int all_places = 1;
  int pitch;
  int64_t runs_at;
  int64_t steps_at;
  int64_t cells_at;
  int64_t sums_at;
  int64_t all;

  StepsRoom(const StepsPlan& plan, const Cells& cells, int64_t element_bytes) {
    constexpr int kApart = 5;  // so that the elements of neighbouring cells lie in other banks
    const int64_t elements = kVectorBytes / element_bytes;
    const int64_t sum_bytes = std::max<int64_t>(element_bytes, sizeof(float));
    int64_t runs = 1;
    int64_t steps = 1;
    for (int a = 0; a < kAxes; ++a) {
      places[a] = most_bands(cells.axis[a], plan.size[a]);
      all_places *= places[a];
      // No step ends early at a cut, so this is room to spare.
      const int64_t cuts = plan.step[a] > 1 ? cells.axis[a].bands : 0;
      const int64_t most = ceil_div(plan.size[a], plan.step[a]) + cuts;
      steps *= most;
      runs *= std::min<int64_t>(most, places[a] + cuts);
    }
    pitch = plan.threads + kApart;
    runs_at = round_up(int64_t{kAxes} * kMostAxisRuns * static_cast<int64_t>(sizeof(AxisRun)),
                       kVectorBytes);
    steps_at = runs_at + runs * static_cast<int64_t>(sizeof(StepsRun));
    cells_at = steps_at + (steps + runs * kStepLoads) * static_cast<int64_t>(sizeof(unsigned));
    sums_at = round_up(cells_at + cells.count() * static_cast<int64_t>(sizeof(int)), kVectorBytes);
    all = sums_at + all_places * elements * pitch * sum_bytes;
  }
};

}  // namespace convt_reduce::cuda
