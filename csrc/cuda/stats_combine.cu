// Which calls take the kernels of stats_combine.cuh, and how their work is shared out.
#include "cuda/stats_combine.cuh"

#include <algorithm>
#include <type_traits>

#include "cuda/stats_combine_fold.cuh"
#include "cuda/stats_combine_multiply.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int64_t kMostWidth = 2;  // times 8 output channels of a group
// Below so many bytes of the same element of all batch elements, for each 8 output channels,
// folding a weight for every position takes more time than adding up cells.
constexpr int64_t kLeastBatchBytes = 1536;
constexpr int64_t kMostInputTerms = int64_t{1} << 26;
constexpr int64_t kBlockBytes = 1024;        // of a block, beside its stages
constexpr int64_t kSharedBytes = 48 * 1024;  // that any block may have
constexpr int64_t kLeastLines = 8;           // of a slice
// Blocks of a multiprocessor. Three read as fast as four, or faster: so they are three, unless more
// of their rows would stay empty.
constexpr int64_t kMostBlocks = 4;
constexpr int64_t kFewerBlocks = 3;
constexpr double kFewerRows = 0.93;
constexpr int64_t kPartsOfLane = 4;
constexpr int64_t kMostFinishLanes = 16;

int64_t width_of(int64_t group_out) { return ceil_div(group_out, kColumns8); }

// Whether the way serves, which depends on sizes and strides alone.
bool serves(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype,
            const StatsPlan& plan, const Queue& queue) {
  if (!queue.tensor_cores || dtype == Dtype::kFloat64 || problem.batch <= kLargeBatch) return false;
  // Contiguous planes, one behind the other; images whose channels are neighbours have that form
  // too.
  if (plan.kind != StatsPlan::Kind::kSmall || plan.small.channels != 1) return false;
  const int64_t bytes = element_bytes(dtype);
  const int64_t width = width_of(problem.c_out / problem.groups);
  if (width > kMostWidth || problem.batch * bytes < width * kLeastBatchBytes) return false;
  if (problem.positions() > kMostInputPositions || !fits_covers(cells)) return false;
  const int64_t terms = problem.c_in / problem.groups * problem.positions();
  if (terms > kMostInputTerms) return false;
  // Rows that begin on 16 bytes if one does.
  return input.stride_n * bytes % kVectorBytes == 0 &&
         (problem.groups == 1 || terms * bytes % kVectorBytes == 0);
}

// How the blocks of a multiprocessor, at most so many, share the work.
struct Sharing {
  int64_t blocks;
  int64_t tile_rows = kInputRows;
  int64_t slices = 1;
  double used = 0;  // of the rows that the blocks have room for in all their turns
};

Sharing share(const Problem& problem, int64_t lines, int64_t processors, int64_t blocks) {
  Sharing sharing{.blocks = blocks};
  const int64_t resident = processors * blocks;
  const int64_t rows = problem.batch * problem.groups;
  const int64_t tiles = ceil_div(problem.batch, kInputRows) * problem.groups;
  int64_t turns = 1;
  if (tiles * 2 <= resident && lines >= kLeastLines * 2) {
    sharing.slices = std::min(resident / tiles, lines / kLeastLines);
  } else {
    // Tiles of equal size fill all turns.
    turns = ceil_div(rows, resident * kInputRows);
    sharing.tile_rows = std::clamp<int64_t>(ceil_div(rows, resident * turns), kRows16, kInputRows);
  }
  sharing.used = static_cast<double>(rows * sharing.slices) /
                 static_cast<double>(turns * resident * kInputRows);
  return sharing;
}

template <int kWidth, typename T>
InputArguments plan_input(const Problem& problem, const Cells& cells, const Input& input,
                          const Queue& queue) {
  using Stage = InputStage<kWidth, T>;
  InputArguments a{.data = input.data,
                   .row_bytes = input.stride_n * static_cast<int64_t>(sizeof(T)),
                   .depths = AxisBands<int>(cells.axis[0]),
                   .rows = AxisBands<int>(cells.axis[1]),
                   .columns = AxisBands<int>(cells.axis[2])};
  a.positions = static_cast<int>(problem.positions());
  a.terms = static_cast<int>(problem.c_in / problem.groups) * a.positions;
  a.lines = static_cast<int>(ceil_div(a.terms, kLineBytes / static_cast<int>(sizeof(T))));
  a.columns8 = static_cast<int>(width_of(problem.c_out / problem.groups));
  constexpr int64_t kBytes = kInputStages<kWidth, T> * sizeof(Stage);
  const int64_t processor_bytes = int64_t{queue.shared_kib} * 1024 + kBlockBytes;
  const int64_t most =
      std::clamp<int64_t>(processor_bytes / (kBytes + kBlockBytes), 1, kMostBlocks);
  Sharing sharing = share(problem, a.lines, queue.processors, most);
  if (most > kFewerBlocks) {
    const Sharing fewer = share(problem, a.lines, queue.processors, kFewerBlocks);
    if (fewer.used >= kFewerRows * sharing.used) sharing = fewer;
  }
  // So much that no more blocks fit.
  const int64_t too_much = round_up(processor_bytes / (sharing.blocks + 1), kVectorBytes);
  a.shared_bytes =
      static_cast<int>(std::max<int64_t>(kBytes, too_much + kVectorBytes - kBlockBytes));
  a.tile_rows = static_cast<int>(sharing.tile_rows);
  a.tiles = ceil_div(problem.batch, a.tile_rows);
  a.slice = static_cast<int>(ceil_div(a.lines, sharing.slices));
  a.slices = static_cast<int>(ceil_div(a.lines, a.slice));
  a.finish_lanes = static_cast<int>(
      largest_power_of_two(std::clamp<int64_t>(a.slices / kPartsOfLane, 1, kMostFinishLanes)));
  a.blocks = a.tiles * problem.groups * a.slices;
  a.row_pairs = a.lines * Stage::kPairs;
  a.fold_pairs = std::clamp(a.positions / 8, 2, 8);
  a.fold_parts = static_cast<int>(ceil_div(a.row_pairs, a.fold_pairs));
  a.fold_blocks = problem.groups * a.fold_parts * a.columns8;
  return a;
}

int64_t pairs_of(const InputArguments& a, int64_t groups) {
  return groups * a.row_pairs * a.columns8;
}

template <int kWidth, typename T>
cudaError_t launch_input(const CombineArguments& p, const InputArguments& a, const Queue& queue,
                         FragmentPair* folded, T* y) {
  float* parts = reinterpret_cast<float*>(folded + pairs_of(a, p.c_out / p.group_out));
  const int64_t channels =
      std::min<int64_t>(a.fold_pairs * kPairTerms / a.positions + 2, p.group_in);
  cudaError_t error = launch(&fold_positions_kernel<T>, a.fold_blocks, kPositionThreads,
                             sizeof(float) * channels * p.cells.count() * kColumns8, queue.stream,
                             queue.overlaps, p, a, covers_of(p), folded);
  if (error != cudaSuccess) return error;
  auto* const kernel = &multiply_input_kernel<kWidth, T>;
  if (a.shared_bytes > kSharedBytes) {
    error = allow_most_shared(kernel, queue.shared_kib);
    if (error != cudaSuccess) return error;
  }
  error = launch(kernel, a.blocks, kInputThreads, a.shared_bytes, queue.stream, queue.overlaps, p,
                 a, static_cast<const FragmentPair*>(folded), parts, y);
  if (error != cudaSuccess || a.slices == 1) return error;
  return launch(&finish_input_kernel<T>,
                ceil_div(p.batch * p.c_out * a.finish_lanes, kFinishInputThreads),
                kFinishInputThreads, 0, queue.stream, queue.overlaps, p, a,
                static_cast<const float*>(parts), y);
}

// Calls use(width, element) for the output channels of a group.
template <typename Use>
auto with_form(int64_t group_out, Dtype dtype, Use&& use) {
  const auto with = [&](auto element) {
    if (width_of(group_out) == 1) return use(std::integral_constant<int, 1>{}, element);
    return use(std::integral_constant<int, 2>{}, element);
  };
  if (dtype == Dtype::kFloat32) return with(float{});
  if (dtype == Dtype::kFloat16) return with(__half{});
  return with(__nv_bfloat16{});
}

}  // namespace

int64_t stats_combine_scratch(const Problem& problem, const Cells& cells, const Input& input,
                              Dtype dtype, const StatsPlan& plan, const Queue& queue) {
  if (!serves(problem, cells, input, dtype, plan, queue)) return 0;
  return with_form(problem.c_out / problem.groups, dtype, [&](auto width, auto element) {
    const InputArguments a =
        plan_input<decltype(width)::value, decltype(element)>(problem, cells, input, queue);
    constexpr int64_t kFloats = sizeof(FragmentPair) / sizeof(float);
    return pairs_of(a, problem.groups) * kFloats +
           (a.slices == 1 ? 0 : a.slices * problem.batch * problem.c_out);
  });
}

cudaError_t launch_stats_combine(const Problem& problem, const Cells& cells, const Input& input,
                                 const Weight& weight, const Bias& bias, Dtype dtype,
                                 const Queue& queue, void* scratch, void* y) {
  const CombineArguments p(problem, cells, weight, bias, 1);
  return with_form(p.group_out, dtype, [&](auto width, auto element) {
    using T = decltype(element);
    constexpr int kWidth = decltype(width)::value;
    return launch_input<kWidth, T>(p, plan_input<kWidth, T>(problem, cells, input, queue), queue,
                                   static_cast<FragmentPair*>(scratch), static_cast<T*>(y));
  });
}

}  // namespace convt_reduce::cuda
