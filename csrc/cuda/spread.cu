// Spread, the adjoint of stats: the input's gradient, which is one number per cell.
//
// Nearly always spread_periods.cuh. Few large planes, and very many cells or taps, go another way:
// one pass writes the gradient in 16-byte vectors; planes.cuh says who writes what: a thread makes
// its vector once per run and stores it until the run ends. Each cell's tap gradients are added
// first, in shared memory, or, where there are very many cells, by a kernel of their own.
#include <algorithm>

#include "cuda/planes.cuh"
#include "cuda/spread_periods.cuh"
#include "cuda/spread_plan.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kThreads = 256;

constexpr int64_t kMostSharedGrads = 2048;  // of a block

template <typename Acc>
__global__ void cell_grads_kernel(const __grid_constant__ CellGradsArguments p, Acc* cell_grads) {
  const int64_t cells = p.cells.count();
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.total;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t plane = quotient(i, cells);
    cell_grads[i] = cell_grad<Acc>(p, plane, i - plane * cells);
  }
}

// The run's vector, as long as it lies inside the run.
template <bool kColumns, typename T, typename Index>
__device__ inline Vector<T> run_vector(const AccumulateOf<T>* cell_grads, const Run<Index>& run,
                                       const Share<kColumns, T, Index>& share) {
  Vector<T> vector;
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) {
    vector.at[j] = narrow<T>(cell_grads[run.cell + share.column_band[j]]);
  }
  return vector;
}

// One vector that a run's end, the plane's start or its end may cut, element by element. Leaves
// `run` at the run of the vector's last element.
template <bool kColumns, typename T, typename Index>
__device__ inline void write_cut_vector(const PlanesShape<Index>& p,
                                        const AccumulateOf<T>* cell_grads, T* plane,
                                        const Share<kColumns, T, Index>& share, Run<Index>& run) {
  constexpr int kSize = Vector<T>::kSize;
  const Index position = share.position;
  Vector<T> vector;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const Index at = position + j;
    if (at < 0 || at >= p.positions) continue;
    if (at >= run.end) run = run_at<kColumns>(p, at);
    vector.at[j] = narrow<T>(cell_grads[run.cell + share.column_band[j]]);
    if (!share.whole(p.positions)) plane[at] = vector.at[j];
  }
  if (share.whole(p.positions)) *reinterpret_cast<Vector<T>*>(plane + position) = vector;
}

// kShared: cell gradients are made here, in shared memory [groups][cells]; else they are read.
template <bool kShared, bool kColumns, typename T, typename Index>
__global__ void spread_kernel(const __grid_constant__ PlanesShape<Index> p,
                              const __grid_constant__ CellGradsArguments g,
                              const AccumulateOf<T>* cell_grads, T* grad) {
  using Acc = AccumulateOf<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* made = reinterpret_cast<Acc*>(shared);
  const int group = threadIdx.x / p.lanes;
  const int lane = threadIdx.x % p.lanes;
  const int64_t cells = p.cells;
  const int64_t items = p.planes * p.chunks;
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    if constexpr (kShared) {
      __syncthreads();
      const int count = p.groups * static_cast<int>(cells);
      for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int of_group = i / static_cast<int>(cells);
        const int64_t of = block * p.groups + of_group;
        if (of >= items) break;
        const int64_t plane = p.chunks == 1 ? of : quotient(of, p.chunks);
        made[i] = cell_grad<Acc>(g, plane, i - of_group * static_cast<int>(cells));
      }
      __syncthreads();
    }
    const int64_t item = block * p.groups + group;
    if (group >= p.groups || item >= items) continue;
    const int64_t plane_index = p.chunks == 1 ? item : quotient(item, p.chunks);
    T* plane = grad + plane_index * static_cast<int64_t>(p.positions);
    const Acc* grads = kShared ? made + group * cells : cell_grads + plane_index * cells;
    // Vectors lie on 16-byte boundaries, which a plane need not: then the first and the last are
    // cut.
    const int phase = reinterpret_cast<uintptr_t>(plane) % kVectorBytes / sizeof(T);
    Share<kColumns, T, Index> share(p, phase, item - plane_index * p.chunks, lane);
    if (share.position >= share.end) continue;
    Run<Index> run = run_at<kColumns>(p, share.first());
    Vector<T> vector = run_vector<kColumns, T>(grads, run, share);
    while (share.position < share.end) {
      const Index whole_end = run.end < share.end ? run.end : share.end;
      if (share.whole(whole_end)) {
        *reinterpret_cast<Vector<T>*>(plane + share.position) = vector;
      } else {
        const Index cell = run.cell;
        write_cut_vector<kColumns, T>(p, grads, plane, share, run);
        if (run.cell != cell) vector = run_vector<kColumns, T>(grads, run, share);
      }
      share.position += share.step;
    }
  }
}

PlanesPlan plan_spread(const Problem& problem, const Cells& cells, Dtype dtype) {
  const int vector = kVectorBytes / element_bytes(dtype);
  return plan_planes(problem, cells, vector, problem.positions() % vector == 0 ? 0 : vector - 1);
}

template <typename T>
cudaError_t launch_periods(const PeriodsArguments& p, const CellGradsArguments& g,
                           const Queue& queue, T* grad) {
  return launch(&spread_periods_kernel<T>, p.groups * p.chunks, kPeriodThreads,
                PeriodsLayout<T>(p).bytes, queue.stream, queue.overlaps, p, g, grad);
}

bool grads_are_shared(const PlanesPlan& plan, const Cells& cells) {
  return plan.groups * cells.count() <= kMostSharedGrads;
}

}  // namespace

int64_t spread_scratch(const Problem& problem, const Cells& cells, Dtype dtype) {
  if (plan_periods(problem, cells, dtype, 1).has_value()) return 0;
  return grads_are_shared(plan_spread(problem, cells, dtype), cells)
             ? 0
             : problem.planes() * cells.count();
}

cudaError_t launch_spread(const Problem& problem, const Cells& cells, const Input& tap_grads,
                          Dtype dtype, const Queue& queue, void* scratch, void* grad) {
  if (problem.planes() == 0) return cudaSuccess;
  CellGradsArguments g;
  g.tap_grads = tap_grads;
  g.cells = cells;
  g.channels = problem.c_in;
  g.total = problem.planes() * cells.count();
  std::optional<PeriodsArguments> periods = plan_periods(problem, cells, dtype, queue.processors);
  if (periods.has_value()) {
    periods->dense = is_dense(problem, tap_grads);
    return dispatch(dtype, [&](auto element) {
      return launch_periods(*periods, g, queue, static_cast<decltype(element)*>(grad));
    });
  }
  const PlanesPlan plan = plan_spread(problem, cells, dtype);
  const bool shared = grads_are_shared(plan, cells);
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    using Acc = AccumulateOf<T>;
    if (!shared) {
      const cudaError_t error =
          launch(&cell_grads_kernel<Acc>, ceil_div(g.total, kThreads), kThreads, 0, queue.stream,
                 queue.overlaps, g, static_cast<Acc*>(scratch));
      if (error != cudaSuccess) return error;
    }
    return with_planes_form(plan, [&](auto columns, auto index) {
      using Index = decltype(index);
      constexpr bool kColumns = decltype(columns)::value;
      const PlanesShape<Index> shape(problem, cells, plan);
      const auto kernel = shared ? &spread_kernel<true, kColumns, T, Index>
                                 : &spread_kernel<false, kColumns, T, Index>;
      const size_t bytes = shared ? plan.groups * cells.count() * sizeof(Acc) : 0;
      return launch(kernel, shape.blocks, plan.threads, bytes, queue.stream, queue.overlaps, shape,
                    g, static_cast<const Acc*>(scratch), static_cast<T*>(grad));
    });
  });
}

}  // namespace convt_reduce::cuda
