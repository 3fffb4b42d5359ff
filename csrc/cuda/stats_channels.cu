// The launches of stats' forms for inputs whose channels are neighbours in memory.
#include "cuda/stats_channels.cuh"

#include <algorithm>

#include "cuda/stats_groups.cuh"

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

template <typename T>
cudaError_t launch_groups_of(const Problem& problem, const Cells& cells, const Input& input,
                             const GroupsPlan& plan, const Queue& queue, const BesideFold& fold,
                             void* cell_sums) {
  using Acc = AccumulateOf<T>;
  constexpr int64_t kBlocksPerProcessor = 8;
  GroupsArguments p{.input = input,
                    .axis = {AxisBands<int>(cells.axis[0]), AxisBands<int>(cells.axis[1]),
                             AxisBands<int>(cells.axis[2])}};
  p.batch = problem.batch;
  p.channels = static_cast<int>(problem.c_in);
  p.positions = plan.positions;
  p.lanes = plan.lanes;
  p.walkers = plan.walkers;
  p.cells = static_cast<int>(cells.count());
  const int64_t outputs = problem.c_in * plan.images * p.cells;
  while ((1 << p.split) < kWarp && (2 << p.split) * outputs <= plan.threads) ++p.split;
  // A block lists its chunk once, so it takes as many images as leave blocks enough for all
  // processors. The sums do not depend on it.
  const int64_t all = problem.batch * plan.chunks;
  p.images = static_cast<int>(std::clamp<int64_t>(all / queue.processors, 1, plan.images));
  const int64_t groups = ceil_div(p.batch, p.images);
  p.turns = std::clamp<int64_t>(groups * plan.chunks / (queue.processors * kBlocksPerProcessor),
                                ceil_div(groups * plan.chunks, kMaxGrid / 2), groups);
  for (int a = 0; a < kAxes; ++a) {
    // The stride of an axis of one element may be any.
    if (problem.axis[a].size == 1) p.input.stride[a] = 0;
    p.size[a] = plan.size[a];
    p.count[a] = plan.count[a];
  }
  p.chunks = plan.chunks;
  const GroupsRoom room(plan, cells, sizeof(T));
  p.pitch = room.pitch;
  p.runs_at = static_cast<int>(room.runs_at);
  p.cells_at = static_cast<int>(room.cells_at);
  p.sums_at = static_cast<int>(room.sums_at);
  p.ring_at = static_cast<int>(room.ring_at);
  // Every group begins with a vector: where positions in one begin does not matter.
  Input in_groups = p.input;
  in_groups.stride[2] *= plan.positions;
  const bool aligned = alignment_of(in_groups, sizeof(T)) == kVectorBytes;
  return launch(aligned ? &stats_groups_kernel<true, T> : &stats_groups_kernel<false, T>,
                ceil_div(groups, p.turns) * p.chunks + fold.blocks, plan.threads,
                std::max<int64_t>(room.all, beside_bytes(fold)), queue.stream, queue.overlaps, p,
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

cudaError_t launch_groups(const Problem& problem, const Cells& cells, const Input& input,
                          Dtype dtype, const GroupsPlan& plan, const Queue& queue,
                          const BesideFold& fold, void* cell_sums) {
  return dispatch(dtype, [&](auto element) {
    return launch_groups_of<decltype(element)>(problem, cells, input, plan, queue, fold, cell_sums);
  });
}

}  // namespace convt_reduce::cuda
