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
constexpr int kMostAxisRuns = 2 * kInlineBands;

// Steps that are alike on all axes.
struct alignas(kVectorBytes) StepsRun {
  int tiles;
  int place;   // of the sums of the first cell that its positions may be in
  int row;     // where the bands of its rows are not the same: its first row, else kMixed
  int column;  // the same for columns
};

__device__ inline int list_axis(const AxisBands<int>& axis, int begin, int end, int step,
                                AxisRun* runs) {
  int count = 0;
  for (int at = begin; at < end;) {
    const Found<int> found = axis.locate_inline(at);
    const int band_end = min(found.end, end);
    const int whole = static_cast<unsigned>(band_end - at) / static_cast<unsigned>(step);
    AxisRun run{at - begin, max(whole, 1), found.band};
    int next = at + run.steps * step;
    if (band_end == end) {
      run.steps = whole + (at + whole * step < end ? 1 : 0);
      next = end;
    } else if (whole == 0) {
      run.band = kMixed;
      next = min(next, end);
    }
    at = next;
    if (run.band == kMixed || axis.is_covered(run.band)) runs[count++] = run;
  }
  return count;
}

// The steps of a chunk, and where cells have their sums: all threads of a block make it together.
struct StepsList {
  AxisRun* axis_runs;  // [kAxes][kMostAxisRuns]
  StepsRun* runs;
  unsigned* steps;
  int* cell_places;  // -1: the chunk has nothing of the cell
  int* first_band;   // [kAxes], of the chunk
  int* axis_counts;  // [kAxes], of its runs
  int run_count = 0;

  // Lists a chunk, [begin, end) on every axis, with sums for the cells of `places` bands. The bytes
  // of an axis are those from one of its positions to the next; a step has `size` of them.
  __device__ void make(const AxisBands<int> (&axis)[kAxes], const int (&begin)[kAxes],
                       const int (&end)[kAxes], const int (&places)[kAxes],
                       const int (&size)[kAxes], const unsigned (&bytes)[kAxes]) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int a = 0; a < kAxes; ++a) {
      // By a warp each, if there are three.
      if (thread == a * kWarp % static_cast<int>(blockDim.x)) {
        first_band[a] = axis[a].locate_inline(begin[a]).band;
        axis_counts[a] =
            list_axis(axis[a], begin[a], end[a], size[a], axis_runs + a * kMostAxisRuns);
      }
    }
    __syncthreads();
    const int cells = axis[0].bands * axis[1].bands * axis[2].bands;
    for (int cell = thread; cell < cells; cell += blockDim.x) {
      const int across = cell / static_cast<unsigned>(axis[2].bands);
      const int b0 = across / static_cast<unsigned>(axis[1].bands) - first_band[0];
      const int b1 = across % static_cast<unsigned>(axis[1].bands) - first_band[1];
      const int b2 = cell - across * axis[2].bands - first_band[2];
      const bool has =
          b0 >= 0 && b0 < places[0] && b1 >= 0 && b1 < places[1] && b2 >= 0 && b2 < places[2];
      cell_places[cell] = has ? (b0 * places[1] + b1) * places[2] + b2 : -1;
    }
    unsigned* to = steps;
    for (int r0 = 0; r0 < axis_counts[0]; ++r0) {
      const AxisRun slabs = axis_runs[r0];
      for (int r1 = 0; r1 < axis_counts[1]; ++r1) {
        const AxisRun rows = axis_runs[kMostAxisRuns + r1];
        for (int r2 = 0; r2 < axis_counts[2]; ++r2) {
          const AxisRun columns = axis_runs[2 * kMostAxisRuns + r2];
          const int count = slabs.steps * rows.steps * columns.steps;
          const int tiles = (count + kStepLoads - 1) / kStepLoads;
          for (int i = thread; i < tiles * kStepLoads; i += blockDim.x) {
            unsigned step = kNoStep;
            if (i < count) {
              const int down = i / static_cast<unsigned>(columns.steps);
              const int s0 = slabs.steps == 1 ? 0 : down / static_cast<unsigned>(rows.steps);
              const int slab = slabs.begin + s0;
              const int row = rows.begin + (down - s0 * rows.steps) * size[1];
              const int column = columns.begin + (i - down * columns.steps) * size[2];
              step = (slab * bytes[0] + row * bytes[1] + column * bytes[2]) | kNoThread |
                     (begin[1] + row + size[1] > end[1] ? kNoLastRow : 0) |
                     (begin[2] + column + size[2] > end[2] ? kNoLastColumn : 0);
            }
            to[i] = step;
          }
          to += tiles * kStepLoads;
          if (thread == 0) {
            const int band0 = slabs.band - first_band[0];
            const int band1 = max(rows.band - first_band[1], 0);
            const int band2 = max(columns.band - first_band[2], 0);
            runs[run_count] = {tiles, (band0 * places[1] + band1) * places[2] + band2,
                               rows.band == kMixed ? rows.begin : kMixed,
                               columns.band == kMixed ? columns.begin : kMixed};
          }
          ++run_count;
        }
      }
    }
    __syncthreads();
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
