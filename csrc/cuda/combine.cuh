// What both forms of combine share: their arguments, a term's taps.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

struct CombineArguments {
  Cells cells;
  Weight weight;
  Bias bias;
  int64_t batch;
  int64_t c_in;
  int64_t c_out;
  int64_t group_in;
  int64_t group_out;
  int64_t depth;   // terms of one result: group_in * cells
  int64_t chunks;  // of the cell sums; more than one where combine_merges
  int64_t chunk;   // sums in each
  double scale;    // 1 / (positions of the output)
  double multiplier;

  CombineArguments(const Problem& problem, const Cells& of_problem, const Weight& of_weight,
                   const Bias& of_bias, int64_t of_chunks)
      : cells(of_problem),
        weight(of_weight),
        bias(of_bias),
        batch(problem.batch),
        c_in(problem.c_in),
        c_out(problem.c_out),
        group_in(problem.c_in / problem.groups),
        group_out(problem.c_out / problem.groups),
        depth(group_in * cells.count()),
        chunks(of_chunks),
        chunk(batch * c_in * cells.count()),
        scale(problem.mean_scale()),
        multiplier(problem.multiplier) {}
};

// Where an output channel's terms begin.
struct Channel {
  int64_t c_begin;        // the group's first input channel
  int64_t weight_offset;  // of the channel's weight for c_begin

  __device__ Channel(const CombineArguments& p, int64_t o) {
    const int64_t group = quotient(o, p.group_out);
    c_begin = group * p.group_in;
    weight_offset =
        c_begin * p.weight.stride_c_in + (o - group * p.group_out) * p.weight.stride_c_out;
  }
};

// Calls use(weight) for each tap that covers the term's cell, in order. A term is an input channel
// of the group and a cell.
template <typename T, typename Use>
__device__ inline void for_taps_of_term(const CombineArguments& p, const Channel& channel,
                                        int64_t term, Use&& use) {
  const int64_t c = quotient(term, p.cells.count());
  const CellBands bands = bands_of(p.cells, term - c * p.cells.count());
  const Band& band0 = p.cells.axis[0].band(bands.b[0]);
  const Band& band1 = p.cells.axis[1].band(bands.b[1]);
  const Band& band2 = p.cells.axis[2].band(bands.b[2]);
  const T* w =
      static_cast<const T*>(p.weight.data) + channel.weight_offset + c * p.weight.stride_c_in;
  for (int64_t t0 = band0.tap_begin; t0 < band0.tap_end; ++t0) {
    for (int64_t t1 = band1.tap_begin; t1 < band1.tap_end; ++t1) {
      const T* row = w + t0 * p.weight.stride[0] + t1 * p.weight.stride[1];
      for (int64_t t2 = band2.tap_begin; t2 < band2.tap_end; ++t2) {
        use(widen(row[t2 * p.weight.stride[2]]));
      }
    }
  }
}

template <typename T>
__device__ inline AccumulateOf<T> folded_weight(const CombineArguments& p, const Channel& channel,
                                                int64_t term) {
  AccumulateOf<T> sum = 0;
  for_taps_of_term<T>(p, channel, term, [&](AccumulateOf<T> weight) { sum += weight; });
  return sum * static_cast<AccumulateOf<T>>(p.scale);
}

template <typename T>
__device__ inline AccumulateOf<T> bias_of(const CombineArguments& p, int64_t o) {
  if (p.bias.data == nullptr) return 0;
  return widen(static_cast<const T*>(p.bias.data)[o * p.bias.stride]);
}

template <typename T>
__device__ inline T result(const CombineArguments& p, AccumulateOf<T> mean, AccumulateOf<T> bias) {
  return narrow<T>(static_cast<AccumulateOf<T>>(p.multiplier) * (mean + bias));
}

// A term of a mean without folding. Folding adds weights before they meet a cell sum, and so would
// turn inf*1 + inf*(-1), a NaN in the convolution, into inf*0.5 or the like: where a mean comes out
// not finite, it is computed again from these.
template <typename T>
__device__ inline AccumulateOf<T> careful_term(const CombineArguments& p, const Channel& channel,
                                               int64_t term, AccumulateOf<T> sum) {
  using Acc = AccumulateOf<T>;
  Acc total = 0;
  for_taps_of_term<T>(p, channel, term,
                      [&](Acc weight) { total += weight * static_cast<Acc>(p.scale) * sum; });
  return total;
}

// A cell sum.
template <typename Acc>
__device__ inline Acc cell_sum_of(const CombineArguments& p, const Acc* from) {
  return p.chunks == 1 ? *from : sum_of_few(from, p.chunk, static_cast<int>(p.chunks));
}

// A mean of such terms. Rare, and so kept out of the way of what is not. Not in an anonymous
// namespace: functions there have names that depend on the folder of the build.
//
// `sums` are those of the batch element and the group.
template <typename T>
__device__ __noinline__ AccumulateOf<T> careful_mean_of_row(const CombineArguments& p, int64_t o,
                                                            const AccumulateOf<T>* sums) {
  const Channel channel(p, o);
  AccumulateOf<T> mean = 0;
  for (int64_t term = 0; term < p.depth; ++term) {
    mean += careful_term<T>(p, channel, term, cell_sum_of(p, sums + term));
  }
  return mean;
}

template <typename T>
__device__ inline AccumulateOf<T> careful_mean(const CombineArguments& p, int64_t n, int64_t o,
                                               const AccumulateOf<T>* cell_sums) {
  const int64_t group = quotient(o, p.group_out);
  return careful_mean_of_row<T>(p, o,
                                cell_sums + (n * p.c_in + group * p.group_in) * p.cells.count());
}

// Combine where one kernel on tensor cores does it, in combine_split.cu: whether it does, its
// scratch, in floats, and its launch.
bool combine_splits(const Problem& problem, const Cells& cells, Dtype dtype, const Queue& queue);
int64_t combine_split_scratch(const Problem& problem, const Cells& cells, Dtype dtype,
                              const Queue& queue);
cudaError_t launch_combine_split(const CombineArguments& p, Dtype dtype, const Queue& queue,
                                 const void* cell_sums, bool folded, void* scratch, void* y);
int64_t combine_split_steps(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue);

// Whether its blocks fold their weights themselves.
bool combine_folds_inside(const Problem& problem, const Cells& cells, Dtype dtype,
                          const Queue& queue);

// Whether it takes them folded in that form.
bool combine_takes_matrices(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue);

// Whether that adds so many chunks of cell sums.
bool combine_split_merges(const Problem& problem, const Cells& cells, Dtype dtype,
                          const Queue& queue, int64_t chunks);

// One of its ways, in combine_strip.cu: whether it serves such sizes, and its launch.
struct StripSizes {
  int64_t batch;
  int64_t groups;
  int64_t group_out;
  int64_t steps;  // of depth
};
bool strips_serve(const StripSizes& sizes, const Queue& queue);
cudaError_t launch_strips(const CombineArguments& p, Dtype dtype, const Queue& queue,
                          const void* cell_sums, const void* folded, void* y);

// Combine for large batches, in combine_batch.cu: its scratch, in elements of the accumulate type,
// and its launch.
int64_t combine_batch_scratch(const Problem& problem, const Cells& cells, Dtype dtype,
                              const Queue& queue);
cudaError_t launch_combine_batch(const CombineArguments& p, Dtype dtype, const Queue& queue,
                                 const void* cell_sums, bool folded, void* scratch, void* y);
int64_t combine_batch_steps(const Problem& problem, const Cells& cells, Dtype dtype,
                            const Queue& queue);

}  // namespace convt_reduce::cuda
