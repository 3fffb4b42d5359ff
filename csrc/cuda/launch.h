// The door between ops.cpp, which knows tensors, and the .cu files, which know pointers and sizes.
//
// Every function queues kernels on one stream and returns the launch's error; none waits, allocates
// or asks the device anything. cell_sums is [planes][cells] in the accumulate type (float, or
// double for float64), or [chunks][planes][cells] where stats has read planes in chunks.
#pragma once

#include <cuda_runtime_api.h>

#include "cells.h"
#include "problem.h"

namespace convt_reduce::cuda {

// Up to this batch size nothing depends on it that could change the order of additions, and so an
// element's bits are those that it has alone.
constexpr int64_t kLargeBatch = 128;

struct Queue {
  cudaStream_t stream = nullptr;
  // Whether a kernel may start while the one before it drains: programmatic dependent launch,
  // compute capability 9.0 and later.
  bool overlaps = false;
  // Whether the code that runs multiplies bfloat16 on tensor cores: compute capability 8.0 and
  // later.
  bool tensor_cores = false;
  // Whether it has products of warpgroups: compute capability 9.0 alone.
  bool warpgroup_products = false;
  int processors = 1;   // the device's multiprocessors
  int shared_kib = 48;  // shared memory that a block may ask for
};

// What the code that the current device runs was compiled for: 90 for 9.0, also where the driver
// compiled PTX of 9.0 for a later device; 0 where there is none.
int compiled_for();

// Whether that code has products of warpgroups, which of GPUs only those of 9.0 have, and of code
// only that for 9.0a.
bool compiled_for_warpgroups();

// How spread shares few large planes out among threads; planes.cuh explains it.
struct PlanesPlan {
  int threads = 0;      // per block
  int lanes = 0;        // threads on one plane
  int groups = 1;       // planes of one block
  bool columns = true;  // each thread stays on its own columns
  bool wide = false;    // positions need 64 bits
  int64_t chunk = 0;    // 16-byte vectors of one chunk of a plane
  int64_t chunks = 1;   // of a plane, each the work of one group
};

// How the cells of an input of any strides are shared out; stats_boxes.cuh explains it.
struct BoxesPlan {
  int threads = 0;
  int lanes = 1;       // threads on one position, with neighbouring channels
  int channels = 1;    // of a thread
  int64_t piece = 0;   // positions of a cell that are the work of one block
  int64_t pieces = 0;  // of all cells
  int64_t chunks = 1;  // the most pieces of a cell
};

// How stats shares out inputs whose channels are neighbours; stats_channels.cuh explains it.
struct ChannelsPlan {
  int channels = 1;  // of a thread
  int lanes = 1;     // threads on one position
  int walkers = 1;   // of an image
  int images = 1;    // of a block, at most
  int size[kAxes];   // of a chunk
  int count[kAxes];  // of chunks
  int64_t chunks = 1;
};

// How stats shares out such inputs in groups of positions; stats_steps.cuh explains it.
struct StepsPlan {
  int positions = 1;  // of a group
  int lanes = 1;      // threads on one group
  int groups = 1;     // of a step's row
  int images = 1;     // of a block, at the same time
  int threads = 0;    // of a block
  int64_t tiles = 1;  // of channels
  int step[kAxes];    // positions
  int size[kAxes];    // of a chunk
  int count[kAxes];   // of chunks
  int64_t chunks = 1;
};

// How stats shares out contiguous planes; stats_planes.cuh explains it.
struct RowsPlan {
  int slots = 0;             // of a lane for a row or a few, or kLongRows
  int step_rows = 0;         // short rows: those rows
  int tile = 0;              // rows
  int64_t columns_tile = 0;  // long rows: columns of a tile; all, where it has several rows
  int64_t row_tiles = 1;     // long rows: tiles of a row
  int workers = 1;           // warps on a plane, a power of two
  int rooms = 1;             // of a warp, at least
  int64_t tiles = 0;         // of a plane
  int64_t chunk = 0;         // tiles
  int64_t chunks = 1;        // of a plane
};

// How small planes are shared out; stats_small_tile.cuh explains it.
struct SmallPlan {
  int lanes = 1;     // on a plane
  int together = 1;  // planes that they walk at the same time
  int channels = 1;  // of a plane: all of an image's where they are neighbours in memory
};

// How stats reads one input. Depends on sizes and strides, on the batch only where that is larger
// than kLargeBatch, and never on alignment: so a batch element gives the same cell sums, to the
// bit, alone and among others, up to that.
struct StatsPlan {
  enum class Kind { kSmall, kPlanes, kSteps, kChannels, kBoxes } kind = Kind::kBoxes;
  SmallPlan small;
  RowsPlan planes;
  StepsPlan steps;
  ChannelsPlan channels;
  BoxesPlan boxes;
  int64_t chunks() const {
    switch (kind) {
      case Kind::kSmall:
        return 1;
      case Kind::kPlanes:
        return planes.chunks;
      case Kind::kSteps:
        return steps.chunks;
      case Kind::kChannels:
        return channels.chunks;
      case Kind::kBoxes:
        return boxes.chunks;
    }
    return 1;
  }
};

StatsPlan plan_stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype);

// Writes the bands of each axis that has more than fit inline to its `table`.
cudaError_t launch_fill_bands(const Cells& cells, const Queue& queue);

// Weights that stats folds for combine, in blocks of its own; fold_beside.cuh explains it.
struct BesideFold {
  int blocks = 0;  // none: it does not
  Weight weight;
  void* folded = nullptr;
  bool matrices = false;  // the form of what is folded
  int64_t group_in = 0;
  int64_t group_out = 0;
  int64_t steps = 0;
  int64_t columns8 = 0;
  int64_t chunks = 0;  // of input channels
  float scale = 0;
  int taps[kAxes] = {};
  int bands[kAxes] = {};
  unsigned char tap_begin[kAxes][kInlineBands] = {};
  unsigned char tap_end[kAxes][kInlineBands] = {};
};

// `scratch` is combine's.
BesideFold plan_beside(const Problem& problem, const Cells& cells, const Weight& weight,
                       Dtype dtype, const StatsPlan& plan, const Queue& queue, void* scratch);

// Writes plan.chunks() chunks of cell sums; none overlaps another.
cudaError_t launch_stats(const Problem& problem, const Cells& cells, const Input& input,
                         Dtype dtype, const StatsPlan& plan, const Queue& queue,
                         const BesideFold& fold, void* cell_sums);

// Adds the chunks into the first.
cudaError_t launch_merge(const Problem& problem, const Cells& cells, Dtype dtype, int64_t chunks,
                         const Queue& queue, void* cell_sums);

// Whether cell sums and output channels are such as tensor cores take them as they lie: whole
// vectors of terms, and groups that do not leave tiles mostly empty.
inline bool suits_tensor_tiles(int64_t depth, int64_t groups, int64_t group_out) {
  constexpr int64_t kTerms = 4;
  constexpr int64_t kLeastOfGroup = 8;  // output channels
  return depth % kTerms == 0 && (groups == 1 || group_out >= kLeastOfGroup);
}

// Chunks that are few, at most: combine may add these itself.
constexpr int64_t kMostMergedChunks = 8;

// Whether launch_combine adds so many chunks itself, with the same bits.
bool combine_merges(const Problem& problem, const Cells& cells, Dtype dtype, const Queue& queue,
                    int64_t chunks);

// Elements of the accumulate type that launch_combine wants as scratch; 0 where it folds as it
// goes.
int64_t combine_scratch(const Problem& problem, const Cells& cells, Dtype dtype,
                        const Queue& queue);

// y [batch][c_out], from `chunks` chunks of cell sums. Unless stats has `folded` its weights into
// scratch, it folds them while stats still runs.
cudaError_t launch_combine(const Problem& problem, const Cells& cells, const Weight& weight,
                           const Bias& bias, Dtype dtype, const Queue& queue, const void* cell_sums,
                           int64_t chunks, bool folded, void* scratch, void* y);

// Stats and combine in one kernel, for large batches of small planes: elements of the accumulate
// type that it wants as scratch, 0 where it does not serve.
int64_t stats_combine_scratch(const Problem& problem, const Cells& cells, const Input& input,
                              Dtype dtype, const StatsPlan& plan, const Queue& queue);

cudaError_t launch_stats_combine(const Problem& problem, const Cells& cells, const Input& input,
                                 const Weight& weight, const Bias& bias, Dtype dtype,
                                 const Queue& queue, void* scratch, void* y);

// The same for small calls, without scratch: mean_small.cuh.
bool mean_small_serves(const Problem& problem, const Cells& cells, Dtype dtype,
                       const StatsPlan& plan, const Queue& queue);

cudaError_t launch_mean_small(const Problem& problem, const Cells& cells, const Input& input,
                              const Weight& weight, const Bias& bias, Dtype dtype,
                              const StatsPlan& plan, const Queue& queue, void* y);

// Combine's derivative for small problems: those whose products take less time than a few launches.
cudaError_t launch_combine_backward(const Problem& problem, const CombineBackward& tensors,
                                    Dtype dtype, const Queue& queue);

// tap_sums [planes][taps] in the accumulate type.
cudaError_t launch_tap_sums(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue, const void* cell_sums, void* tap_sums);

// Elements of the accumulate type that launch_spread wants as scratch; 0 but for very many cells.
int64_t spread_scratch(const Problem& problem, const Cells& cells, Dtype dtype);

// grad [planes][positions]; tap_grads is strided like an input, over taps, in the accumulate type.
cudaError_t launch_spread(const Problem& problem, const Cells& cells, const Input& tap_grads,
                          Dtype dtype, const Queue& queue, void* scratch, void* grad);

}  // namespace convt_reduce::cuda
