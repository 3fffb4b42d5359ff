// What a block of stats_groups.cuh reads, in which order.
#pragma once

#include <algorithm>

#include "cuda/axis_bands.cuh"
#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr int kStepLoads = 4;  // vectors of a thread in a step

// Steps that are on their way. Sums of vectors of 8 elements leave less room.
CONVT_HD constexpr int group_stages(int64_t element_bytes) { return element_bytes == 2 ? 3 : 4; }

// Some steps for one cell. The elements [begin, end) of each of their groups belong to it.
struct GroupsRun {
  int steps;
  int place;  // of the cell's sums
  int begin;
  int end;
};

// The groups of a chunk, in steps: all threads of a block make it together.
struct GroupsList {
  static constexpr unsigned kNothing = 0xffffffffu;

  struct Box {
    int begin[kAxes];
    int size[kAxes];
  };

  GroupsRun* runs;
  unsigned* offsets;  // [steps][walkers][kStepLoads], elements; kNothing where no group is left
  int walkers;
  unsigned stride[kAxes];  // of groups, in elements
  int run_count = 0;
  int steps = 0;

  __device__ void add(const Box& box, int place, int begin, int end) {
    if (box.size[2] <= 0) return;
    const int count = box.size[0] * box.size[1] * box.size[2];
    const int step = walkers * kStepLoads;
    const int own_steps = (count + step - 1) / static_cast<unsigned>(step);
    for (int i = threadIdx.x; i < own_steps * step; i += blockDim.x) {
      unsigned offset = kNothing;
      if (i < count) {
        const int row = i / static_cast<unsigned>(box.size[2]);
        const int depth = row / static_cast<unsigned>(box.size[1]);
        offset = (box.begin[0] + depth) * stride[0] +
                 (box.begin[1] + row - depth * box.size[1]) * stride[1] +
                 (box.begin[2] + i - row * box.size[2]) * stride[2];
      }
      const int load = i / static_cast<unsigned>(walkers);
      const int walker = i - load * walkers;
      offsets[((steps + load / kStepLoads) * walkers + walker) * kStepLoads + load % kStepLoads] =
          offset;
    }
    if (threadIdx.x == 0) runs[run_count] = {own_steps, place, begin, end};
    ++run_count;
    steps += own_steps;
  }

  // A cell with columns [first, last): the groups that have only such, then those with others too.
  __device__ void add_cell(Box box, int first, int last, int positions, int width, int place) {
    const int whole = (first + positions - 1) / positions;
    const int stop = last / positions;
    box.begin[2] = whole;
    box.size[2] = stop - whole;
    add(box, place, 0, positions * width);
    box.size[2] = 1;
    if (first < whole * positions) {
      box.begin[2] = whole - 1;
      const int before = box.begin[2] * positions;
      add(box, place, (first - before) * width, min(last - before, positions) * width);
    }
    if (stop >= whole && stop * positions < last) {
      box.begin[2] = stop;
      add(box, place, 0, (last - stop * positions) * width);
    }
  }
};

// The shared memory of a block, in bytes: the list, its runs, the places of cells [cells] (-1: no
// sums), sums [places][elements][pitch], and the ring [warps][stages][loads][lanes].
struct GroupsRoom {
  int pitch;
  int64_t runs_at;
  int64_t cells_at;
  int64_t sums_at;
  int64_t ring_at;
  int64_t all;

  GroupsRoom(const GroupsPlan& plan, const Cells& cells, int64_t element_bytes) {
    constexpr int kApart = 5;  // so that the elements of neighbouring cells lie in other banks
    const int64_t elements = kVectorBytes / element_bytes;
    const int64_t sum_bytes = std::max<int64_t>(element_bytes, sizeof(float));
    int64_t places = 1;
    for (int a = 0; a < kAxes; ++a) {
      places *= std::min<int64_t>(cells.axis[a].bands, plan.size[a]);
    }
    const int64_t edges = plan.positions > 1 ? 2 : 0;  // of a cell's rows
    const int64_t runs = places * (1 + edges);
    const int64_t groups = int64_t{plan.size[0]} * plan.size[1] *
                           (ceil_div(plan.size[2], plan.positions) + edges * cells.axis[2].bands);
    const int64_t step = int64_t{plan.walkers} * kStepLoads;
    pitch = plan.threads + kApart;
    runs_at = (groups / step + runs) * step * static_cast<int64_t>(sizeof(unsigned));
    cells_at = runs_at + runs * static_cast<int64_t>(sizeof(GroupsRun));
    sums_at = round_up(cells_at + cells.count() * static_cast<int64_t>(sizeof(int)), kVectorBytes);
    ring_at = round_up(sums_at + places * elements * pitch * sum_bytes, kVectorBytes);
    all = ring_at + int64_t{group_stages(element_bytes)} * kStepLoads * plan.threads * kVectorBytes;
  }
};

}  // namespace convt_reduce::cuda
