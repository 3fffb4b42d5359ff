// How threads share few large planes, for spread, which writes them.
//
// `lanes` threads share a plane and step through its 16-byte vectors together, so that a thread's
// columns never change when lanes * vector size is a multiple of the width. Then the column bands
// are known once and for all, and only the row's bands have to be watched. A run is a stretch of
// memory with one band on the outer axes (and, where the width does not divide, one cell).
//
//   a plane of width 8, vectors of 4, lanes = 4:     t0 t0 t0 t0 t1 t1 t1 t1
//                                                    t2 t2 t2 t2 t3 t3 t3 t3
//                                                    t0 t0 t0 t0 t1 ...
//
// Positions are 32-bit where a plane allows it, which is nearly always.
#pragma once

#include <type_traits>

#include "cuda/axis_bands.cuh"
#include "cuda/device.cuh"

namespace convt_reduce::cuda {

// `vector` is the elements of 16 bytes; `slack`, the most by which a plane's vectors may be
// shifted.
PlanesPlan plan_planes(const Problem& problem, const Cells& cells, int vector, int slack);

// The geometry that a kernel needs, with Index the type of a position in a plane.
template <typename Index>
struct PlanesShape {
  AxisBands<Index> depths;
  AxisBands<Index> rows;
  AxisBands<Index> columns;
  Index positions;  // of a plane
  Index cells;      // no more than positions
  int lanes;
  int groups;
  int64_t planes;
  int64_t chunk;
  int64_t chunks;
  int64_t blocks;

  PlanesShape(const Problem& problem, const Cells& of, const PlanesPlan& plan)
      : depths(of.axis[0]),
        rows(of.axis[1]),
        columns(of.axis[2]),
        positions(static_cast<Index>(problem.positions())),
        cells(static_cast<Index>(of.count())),
        lanes(plan.lanes),
        groups(plan.groups),
        planes(problem.planes()),
        chunk(plan.chunk),
        chunks(plan.chunks),
        blocks(ceil_div(planes * chunks, groups)) {}
};

// Calls body(columns, index) with a compile-time bool and a value of the index type that fit the
// plan. Wide planes go without columns of their own: one more form of kernel would hardly be used.
template <typename Body>
cudaError_t with_planes_form(const PlanesPlan& plan, Body&& body) {
  if (plan.wide) return body(std::false_type{}, int64_t{});
  if (plan.columns) return body(std::true_type{}, int32_t{});
  return body(std::false_type{}, int32_t{});
}

template <typename Index>
struct Run {
  Index end;
  Index cell;  // the first of its cells
};

// The run that holds `position`.
template <bool kColumns, typename Index>
__device__ inline Run<Index> run_at(const PlanesShape<Index>& p, Index position) {
  using Unsigned = std::make_unsigned_t<Index>;
  const Index row = static_cast<Unsigned>(position) / static_cast<Unsigned>(p.columns.size);
  Index d = 0;
  if (p.depths.size > 1) d = static_cast<Unsigned>(row) / static_cast<Unsigned>(p.rows.size);
  const Index h = row - d * p.rows.size;
  const Found<Index> b0 = p.depths.locate(d);
  const Found<Index> b1 = p.rows.locate(h);
  Run<Index> run;
  run.cell = (static_cast<Index>(b0.band) * p.rows.bands + b1.band) * p.columns.bands;
  if (!kColumns && p.columns.bands > 1) {
    const Found<Index> b2 = p.columns.locate(position - row * p.columns.size);
    run.cell += b2.band;
    run.end = row * p.columns.size + b2.end;
  } else if (p.rows.bands > 1) {
    run.end = (d * p.rows.size + b1.end) * p.columns.size;
  } else {
    run.end = b0.end * p.rows.size * p.columns.size;
  }
  return run;
}

// One group's share of a plane, as one of its threads sees it.
template <bool kColumns, typename T, typename Index>
struct Share {
  static constexpr int kSize = Vector<T>::kSize;
  Index position;  // of the next vector's first element; shifted, it may start below 0
  Index end;       // of the chunk, at most the plane's
  Index step;      // from one vector of this thread to its next
  int column_band[kSize];

  // `phase` is how many elements before the plane its first vector starts.
  __device__ Share(const PlanesShape<Index>& p, int phase, int64_t chunk, int lane) {
    step = static_cast<Index>(p.lanes * kSize);
    const int64_t begin = chunk * p.chunk * kSize - phase;
    const int64_t stop = begin + p.chunk * kSize;
    position = static_cast<Index>(begin + lane * kSize);
    end = stop < static_cast<int64_t>(p.positions) ? static_cast<Index>(stop) : p.positions;
#pragma unroll
    for (int j = 0; j < kSize; ++j) column_band[j] = 0;
    if (!kColumns || p.columns.bands == 1) return;
    Index column = position % p.columns.size;
    if (column < 0) column += p.columns.size;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      column_band[j] = p.columns.locate(column).band;
      if (++column == p.columns.size) column = 0;
    }
  }

  __device__ Index first() const { return position > 0 ? position : 0; }

  // Whether this vector is whole and ends by `limit`.
  __device__ bool whole(Index limit) const { return position >= 0 && position + kSize <= limit; }
};

}  // namespace convt_reduce::cuda
