// Spread, the adjoint of stats: the input's gradient, which is one number per cell.
//
// A tiny kernel adds each cell's tap gradients; then one pass writes the gradient in 16-byte
// vectors. The result is contiguous, so vectors run over plane borders and only the very last one
// can be short.
#include "cuda/device.cuh"

namespace convt_reduce::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;

struct CellGradsArguments {
  Input tap_grads;
  Cells cells;
  int64_t channels;
  int64_t total;  // planes * cells
};

template <typename Acc>
__global__ void cell_grads_kernel(const __grid_constant__ CellGradsArguments p, Acc* cell_grads) {
  const int64_t cells = p.cells.count();
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.total;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t plane = i / cells;
    const Acc* from = static_cast<const Acc*>(p.tap_grads.data) +
                      plane / p.channels * p.tap_grads.stride_n +
                      plane % p.channels * p.tap_grads.stride_c;
    const CellBands bands = bands_of(p.cells, i % cells);
    const Band& band0 = p.cells.axis[0].band(bands.b[0]);
    const Band& band1 = p.cells.axis[1].band(bands.b[1]);
    const Band& band2 = p.cells.axis[2].band(bands.b[2]);
    Acc sum = 0;
    for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
      for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
        for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
          sum += from[t0 * p.tap_grads.stride[0] + t1 * p.tap_grads.stride[1] +
                      t2 * p.tap_grads.stride[2]];
        }
      }
    }
    cell_grads[i] = sum;
  }
}

struct SpreadArguments {
  Cells cells;
  int64_t elements;  // planes * positions
  int64_t blocks;
};

// A place in [planes][size 0][size 1][size 2].
struct Place {
  int64_t plane;
  int64_t at[kAxes];

  __device__ static Place of(const Cells& cells, int64_t element) {
    Place place;
    int64_t rest = element;
    for (int a = kAxes - 1; a >= 0; --a) {
      const int64_t size = cells.axis[a].axis.size;
      if (rest < UINT32_MAX && size < UINT32_MAX) {  // short divisions
        place.at[a] = static_cast<unsigned>(rest) % static_cast<unsigned>(size);
        rest = static_cast<unsigned>(rest) / static_cast<unsigned>(size);
      } else {
        place.at[a] = rest % size;
        rest /= size;
      }
    }
    place.plane = rest;
    return place;
  }

  // The place `step` further; both have their coordinates in range.
  __device__ void advance(const Cells& cells, const Place& step) {
    int64_t carry = 0;
    for (int a = kAxes - 1; a >= 0; --a) {
      at[a] += step.at[a] + carry;
      const int64_t size = cells.axis[a].axis.size;
      carry = at[a] >= size;
      if (carry) at[a] -= size;
    }
    plane += step.plane + carry;
  }
};

// The gradients of the place's row: one per band of the last axis.
template <typename Acc>
__device__ inline const Acc* row_grads(const Cells& cells, const Acc* cell_grads,
                                       const Place& place) {
  const int64_t b0 = cells.axis[0].band_of(place.at[0]);
  const int64_t b1 = cells.axis[1].band_of(place.at[1]);
  return cell_grads + place.plane * cells.count() + cells.index(b0, b1, 0);
}

template <typename T>
__global__ void spread_kernel(const __grid_constant__ SpreadArguments p,
                              const AccumulateOf<T>* cell_grads, T* grad) {
  using Acc = AccumulateOf<T>;
  constexpr int kSize = Vector<T>::kSize;
  const AxisCells& columns = p.cells.axis[2];
  const Place step = Place::of(p.cells, int64_t{kThreads} * kSize);
  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    int64_t element = (block * kVectorsPerThread * kThreads + threadIdx.x) * int64_t{kSize};
    Place place = Place::of(p.cells, element);
    for (int v = 0; v < kVectorsPerThread && element < p.elements; ++v) {
      const Acc* row = row_grads(p.cells, cell_grads, place);
      int64_t b2 = columns.band_of(place.at[2]);
      Vector<T> vector;
      if (place.at[2] + kSize <= columns.end(b2)) {
        const T value = narrow<T>(row[b2]);
#pragma unroll
        for (int j = 0; j < kSize; ++j) vector.at[j] = value;
      } else {
        Place inner = place;
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          vector.at[j] = narrow<T>(element + j < p.elements ? row[b2] : Acc(0));
          ++inner.at[2];
          if (inner.at[2] < columns.end(b2)) continue;
          ++b2;
          if (b2 < columns.bands) continue;
          b2 = 0;
          if (element + j + 1 < p.elements) {
            inner.at[2] = 0;
            inner.advance(p.cells, Place{0, {0, 1, 0}});  // the next row's start
            row = row_grads(p.cells, cell_grads, inner);
          }
        }
      }
      if (element + kSize <= p.elements) {
        *reinterpret_cast<Vector<T>*>(grad + element) = vector;
      } else {
        for (int j = 0; element + j < p.elements; ++j) grad[element + j] = vector.at[j];
      }
      place.advance(p.cells, step);
      element += int64_t{kThreads} * kSize;
    }
  }
}

}  // namespace

cudaError_t launch_spread(const Problem& problem, const Cells& cells, const Input& tap_grads,
                          Dtype dtype, const Queue& queue, void* cell_grads, void* grad) {
  if (problem.planes() == 0) return cudaSuccess;
  CellGradsArguments g;
  g.tap_grads = tap_grads;
  g.cells = cells;
  g.channels = problem.c_in;
  g.total = problem.planes() * cells.count();
  SpreadArguments p;
  p.cells = cells;
  p.elements = problem.planes() * problem.positions();
  return dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    using Acc = AccumulateOf<T>;
    const cudaError_t error = launch(&cell_grads_kernel<Acc>, ceil_div(g.total, kThreads), kThreads,
                                     0, queue.stream, false, g, static_cast<Acc*>(cell_grads));
    if (error != cudaSuccess) return error;
    p.blocks = ceil_div(p.elements, int64_t{kThreads} * kVectorsPerThread * Vector<T>::kSize);
    return launch(&spread_kernel<T>, p.blocks, kThreads, 0, queue.stream, false, p,
                  static_cast<const Acc*>(cell_grads), static_cast<T*>(grad));
  });
}

}  // namespace convt_reduce::cuda
