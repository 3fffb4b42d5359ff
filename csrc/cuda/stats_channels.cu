// The launches of stats' forms for inputs whose channels are neighbours in memory.
#include "cuda/stats_channels.cuh"

#include <algorithm>

#include "cuda/stats_steps.cuh"

namespace convt_reduce::cuda {
namespace {

template <typename T>
cudaError_t launch_of(const Problem& problem, const Cells& cells, const Input& input,
                      const ChannelsPlan& plan, const Queue& queue, const BesideFold& fold,
                      void* cell_sums) {
  using Acc = AccumulateOf<T>;
  ChannelsArguments p{.input = input,
                      .axis = {AxisBands<int>(cells.axis[0]), AxisBands<int>(cells.axis[1]),
                               AxisBands<int>(cells.axis[2])}};
  p.batch = problem.batch;
  p.channels = problem.c_in;
  p.channel_tiles = ceil_div(problem.c_in, plan.lanes * plan.channels);
  p.lanes = plan.lanes;
  p.walkers = plan.walkers;
  // The sums do not depend on the images of a block: fewer where processors would be without any.
  p.images = static_cast<int>(std::clamp<int64_t>(
      problem.batch * plan.chunks * p.channel_tiles / queue.processors, 1, plan.images));
  p.cells = static_cast<int>(cells.count());
  p.pitch = channels_pitch(plan, p.images);
  for (int a = 0; a < kAxes; ++a) {
    // The stride of an axis of one element may be any.
    p.stride[a] = problem.axis[a].size == 1 ? 0 : static_cast<unsigned>(input.stride[a]);
    p.size[a] = plan.size[a];
    p.count[a] = plan.count[a];
  }
  p.chunks = plan.chunks;
  p.items = ceil_div(p.batch, p.images) * p.chunks * p.channel_tiles;
  const int threads = static_cast<int>(round_up(p.lanes * p.walkers * p.images, kWarp));
  const int64_t shared =
      channels_shared_words(plan, cells, p.images) * static_cast<int64_t>(sizeof(Acc));
  const auto run = [&](auto aligned, auto channels) {
    return launch(&stats_channels_kernel<decltype(aligned)::value, decltype(channels)::value, T>,
                  p.items + fold.blocks, threads, std::max(shared, beside_bytes(fold)),
                  queue.stream, queue.overlaps, p, fold, static_cast<Acc*>(cell_sums));
  };
  if (plan.channels == 1) return run(std::true_type{}, std::integral_constant<int, 1>{});
  const bool aligned =
      alignment_of(input, sizeof(T)) % (plan.channels * static_cast<int64_t>(sizeof(T))) == 0;
  const auto with_channels = [&](auto channels) {
    return aligned ? run(std::true_type{}, channels) : run(std::false_type{}, channels);
  };
  if (plan.channels == 2) return with_channels(std::integral_constant<int, 2>{});
  if constexpr (sizeof(T) <= 4) {
    if (plan.channels == 4) return with_channels(std::integral_constant<int, 4>{});
  }
  if constexpr (sizeof(T) == 2) {
    if (plan.channels == 8) return with_channels(std::integral_constant<int, 8>{});
  }
  return cudaErrorInvalidValue;
}

// Whether the threads of a block have more on their way, and so a processor has fewer blocks: where
// these are few, or each has much to read. The sums do not depend on it.
bool has_two_tiles(int64_t blocks, int64_t block_bytes, bool folds, const Queue& queue) {
  constexpr int64_t kMuch = 384 * 1024;
  if (block_bytes >= kMuch) return true;
  // Two blocks leave few registers to those of combine, which come early to fold.
  return folds ? blocks <= 2 * queue.processors : 2 * blocks <= 3 * queue.processors;
}

// Bytes that a block asks for ahead: with more of all blocks, what is needed first comes later.
// `places` of blocks in a processor.
int ahead_of(int64_t blocks, int64_t places, int64_t processors) {
  constexpr int64_t kProcessorBytes = 48 * 1024;
  constexpr int64_t kMostBytes = 128 * 1024;  // of a block
  const int64_t at_once = std::min(blocks, places * processors);
  const int64_t bytes = std::min(kProcessorBytes * processors / at_once, kMostBytes);
  return static_cast<int>(bytes / kVectorBytes * kVectorBytes);
}

// Shared memory of a block with which a processor has room for its share of them and no more, and
// for some of combine's; 0 where registers see to it. The next call's stats starts while ours runs.
// If it took the places that our few blocks leave, its last blocks would be shared out unevenly:
// 256 of them took half as long again.
int64_t even_share(int64_t blocks, int64_t places, const Queue& queue) {
  constexpr int64_t kCombineBytes = 46 * 1024;
  constexpr int64_t kBlockOverhead = 1200;
  const int64_t share = ceil_div(blocks, queue.processors);
  if (!queue.overlaps || share >= places) return 0;
  return (most_shared(queue.shared_kib) - kCombineBytes) / share - kBlockOverhead;
}

template <typename T>
cudaError_t launch_steps_of(const Problem& problem, const Cells& cells, const Input& input,
                            const StepsPlan& plan, const Queue& queue, const BesideFold& fold,
                            void* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int64_t kBlocksPerProcessor = 16;
  constexpr int64_t kBlockBytes = 128 * 1024;
  StepsArguments p{
      .input = input,
      .axis = {AxisBands<int>(cells.axis[0]), AxisBands<int>(cells.axis[1]),
               AxisBands<int>(cells.axis[2])},
      .runs = {AxisRuns(cells.axis[0], plan.step[0]), AxisRuns(cells.axis[1], plan.step[1]),
               AxisRuns(cells.axis[2], plan.step[2])}};
  p.batch = problem.batch;
  p.channels = problem.c_in;
  p.tiles = static_cast<unsigned>(plan.tiles);
  p.positions = plan.positions;
  p.lanes = plan.lanes;
  p.groups = plan.groups;
  p.rows = plan.step[1];
  p.cells = static_cast<int>(cells.count());
  for (int a = 0; a < kAxes; ++a) {
    // The stride of an axis of one element may be any.
    if (problem.axis[a].size == 1) p.input.stride[a] = 0;
    p.step[a] = plan.step[a];
    p.bytes[a] = static_cast<unsigned>(p.input.stride[a] * static_cast<int64_t>(sizeof(T)));
    p.steps[a] = plan.size[a] / plan.step[a];
    p.all_steps[a] = p.runs[a].begin[p.runs[a].count];
    p.count[a] = plan.count[a];
  }
  p.chunks = static_cast<unsigned>(plan.chunks);
  // A block lists its chunk once, so it takes as many images as leave blocks enough for all
  // processors. The sums do not depend on it.
  const int64_t parts = plan.chunks * plan.tiles;
  p.images = static_cast<int>(
      std::clamp<int64_t>(problem.batch * parts / queue.processors, 1, plan.images));
  p.all_turns = ceil_div(p.batch, p.images);
  const int64_t turn_bytes =
      problem.positions() * problem.c_in * static_cast<int64_t>(sizeof(T)) / parts * p.images;
  const int64_t most_turns = p.all_turns * parts / (queue.processors * kBlocksPerProcessor);
  p.turns = std::max<int64_t>({std::min(kBlockBytes / turn_bytes, most_turns),
                               ceil_div(p.all_turns * parts, kMaxGrid / 2), 1});
  const int64_t width = plan.positions > 1 ? problem.c_in : plan.lanes * Vector<T>::kSize;
  while ((1 << p.split) < kWarp && (2 << p.split) * width * plan.images * p.cells <= plan.threads) {
    ++p.split;
  }
  p.over_lanes = reciprocal(p.lanes);
  p.over_groups = reciprocal(p.groups);
  p.over_rows = reciprocal(p.rows);
  p.over_cells = reciprocal(p.cells);
  const int threads =
      static_cast<int>(round_up(int64_t{p.lanes} * p.groups * p.rows * p.images, kWarp));
  const StepsRoom room(plan, cells, sizeof(T));
  for (int a = 0; a < kAxes; ++a) p.places[a] = room.places[a];
  p.all_places = room.all_places;
  p.pitch = room.pitch;
  p.runs_at = static_cast<int>(room.runs_at);
  p.steps_at = static_cast<int>(room.steps_at);
  p.cells_at = static_cast<int>(room.cells_at);
  p.sums_at = static_cast<int>(room.sums_at);
  // Every group begins with a vector: where positions in one begin does not matter.
  Input in_groups = p.input;
  in_groups.stride[2] *= plan.positions;
  const bool aligned = alignment_of(in_groups, sizeof(T)) == kVectorBytes;
  const int64_t blocks = ceil_div(p.all_turns, p.turns) * parts;
  const bool two_tiles = aligned && has_two_tiles(blocks, turn_bytes, fold.blocks > 0, queue);
  const int64_t places = steps_processor_threads(two_tiles) / threads;
  p.image_bytes = problem.positions() * problem.c_in * static_cast<int64_t>(sizeof(T));
  p.ahead = image_is_dense(problem, input) ? ahead_of(blocks, places, queue.processors) : 0;
  int64_t shared = std::max<int64_t>(room.all, beside_bytes(fold));
  // Combine needs the room where it folds itself.
  if (fold.blocks > 0) shared = std::max(shared, even_share(blocks, places, queue));
  const auto kernel = two_tiles ? &stats_steps_kernel<true, true, T>
                      : aligned ? &stats_steps_kernel<true, false, T>
                                : &stats_steps_kernel<false, false, T>;
  if (shared > kSharedPerBlock) {
    const cudaError_t error = allow_most_shared(kernel, queue.shared_kib);
    if (error != cudaSuccess) return error;
  }
  return launch(kernel, blocks + fold.blocks, threads, shared, queue.stream, queue.overlaps, p,
                fold, static_cast<Acc*>(cell_sums));
}

}  // namespace

cudaError_t launch_channels(const Problem& problem, const Cells& cells, const Input& input,
                            Dtype dtype, const ChannelsPlan& plan, const Queue& queue,
                            const BesideFold& fold, void* cell_sums) {
  return dispatch(dtype, [&](auto element) {
    return launch_of<decltype(element)>(problem, cells, input, plan, queue, fold, cell_sums);
  });
}

cudaError_t launch_steps(const Problem& problem, const Cells& cells, const Input& input,
                         Dtype dtype, const StepsPlan& plan, const Queue& queue,
                         const BesideFold& fold, void* cell_sums) {
  return dispatch(dtype, [&](auto element) {
    return launch_steps_of<decltype(element)>(problem, cells, input, plan, queue, fold, cell_sums);
  });
}

}  // namespace convt_reduce::cuda
