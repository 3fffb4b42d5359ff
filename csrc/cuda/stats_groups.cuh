// Stats for inputs whose channels are neighbours in memory, where positions are read in groups that
// are whole vectors: one position, or a few where a position is not. A block has a chunk of some
// images, one after the other.
//
// `lanes` threads have the vectors of a group, always the same, so that each of a thread's elements
// stays with one channel. Three channels of four bytes, four positions in three vectors:
//
//     a b c a | b c a b | c a b c
//
// The `walkers` of an image take its groups in turn, and small images are the work of few, so that
// little is left to add between threads. Which vectors a thread reads, cell by cell, is listed once
// per block. They come by asynchronous copies to a place that only this thread reads, some steps
// ahead of the additions, and without a stop from one image to the next.
#pragma once

#include "cuda/fold_beside.cuh"
#include "cuda/stats_groups_reader.cuh"

namespace convt_reduce::cuda {

// Lists a chunk, [begin, end) on every axis, and says where cells have their sums.
__device__ inline void list_chunk(const GroupsArguments& p, const int (&begin)[kAxes],
                                  const int (&end)[kAxes], GroupsList& list, int* cell_places) {
  for (int i = threadIdx.x; i < p.cells; i += blockDim.x) cell_places[i] = -1;
  __syncthreads();
  int place = 0;
  GroupsList::Box box;
  for (int b0 = 0; b0 < p.axis[0].bands; ++b0) {
    box.begin[0] = max(p.axis[0].begin[b0], begin[0]) - begin[0];
    box.size[0] = min(p.axis[0].end(b0), end[0]) - begin[0] - box.begin[0];
    if (box.size[0] <= 0 || !p.axis[0].is_covered(b0)) continue;
    for (int b1 = 0; b1 < p.axis[1].bands; ++b1) {
      box.begin[1] = max(p.axis[1].begin[b1], begin[1]) - begin[1];
      box.size[1] = min(p.axis[1].end(b1), end[1]) - begin[1] - box.begin[1];
      if (box.size[1] <= 0 || !p.axis[1].is_covered(b1)) continue;
      for (int b2 = 0; b2 < p.axis[2].bands; ++b2) {
        const int first = max(p.axis[2].begin[b2], begin[2]) - begin[2];
        const int last = min(p.axis[2].end(b2), end[2]) - begin[2];
        if (first >= last || !p.axis[2].is_covered(b2)) continue;
        list.add_cell(box, first, last, p.positions, p.channels, place);
        if (threadIdx.x == 0) {
          cell_places[(b0 * p.axis[1].bands + b1) * p.axis[2].bands + b2] = place;
        }
        ++place;
      }
    }
  }
  __syncthreads();
}

// The sum of a channel over the walkers of an image, of which `parts` threads add a share each.
template <typename T>
__device__ __forceinline__ AccumulateOf<T> sum_of_walkers(const GroupsArguments& p,
                                                          const AccumulateOf<T>* sums, int image,
                                                          int channel, int part, int parts) {
  using Acc = AccumulateOf<T>;
  constexpr int kElements = Vector<T>::kSize;
  constexpr int kTogether = 4;
  Acc sum = 0;
  Acc lost = 0;
  for (int position = 0; position < p.positions; ++position) {
    const int element = position * p.channels + channel;
    const Acc* from =
        sums + element % kElements * p.pitch + image * p.walkers * p.lanes + element / kElements;
    for (int walker = part; walker < p.walkers; walker += kTogether * parts) {
      Acc values[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int at = walker + u * parts;
        values[u] = at < p.walkers ? from[at * p.lanes] : Acc(0);
      }
      add_exactly(sum, lost, halves_sum(values));
    }
  }
  return settled(sum, lost);
}

template <bool kAligned, typename T>
__global__ void __launch_bounds__(kMostGroupsThreads)
    stats_groups_kernel(const __grid_constant__ GroupsArguments p,
                        const __grid_constant__ BesideFold fold, AccumulateOf<T>* cell_sums) {
  using Acc = AccumulateOf<T>;
  using Raw = RawVector<T>;
  using Reader = GroupsReader<kAligned, T>;
  constexpr int kElements = Vector<T>::kSize;
  extern __shared__ __align__(16) unsigned char shared[];
  if (folds_beside<T>(fold, shared)) return;
  int* cell_places = reinterpret_cast<int*>(shared + p.cells_at);
  Acc* sums_of_places = reinterpret_cast<Acc*>(shared + p.sums_at);

  // Which part of which images.
  const int64_t block = static_cast<int64_t>(blockIdx.x) - fold.blocks;
  const int64_t group = quotient(block, p.chunks);
  const int64_t chunk = block - group * p.chunks;
  int64_t n = group * p.turns * p.images;
  const int64_t turns = min(p.turns, quotient(p.batch - n + p.images - 1, p.images));
  int begin[kAxes];
  int end[kAxes];
  locate_chunk(static_cast<unsigned>(chunk), p.count, p.size, p.axis, begin, end);
  int64_t offset = 0;
#pragma unroll
  for (int a = 0; a < kAxes; ++a) offset += begin[a] * p.input.stride[a];

  GroupsList list{reinterpret_cast<GroupsRun*>(shared + p.runs_at),
                  reinterpret_cast<unsigned*>(shared), p.walkers};
#pragma unroll
  for (int a = 0; a < kAxes; ++a) {
    list.stride[a] = static_cast<unsigned>(p.input.stride[a] * (a == 2 ? p.positions : 1));
  }
  list_chunk(p, begin, end, list, cell_places);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int per_image = p.lanes * p.walkers;
  const int image = threadIdx.x / per_image;
  const int in_image = threadIdx.x - image * per_image;
  const int walker = in_image / p.lanes;
  const int first = (in_image - walker * p.lanes) * kElements;  // of a group's elements
  const bool has = image < p.images;
  const T* from =
      static_cast<const T*>(p.input.data) + (n + image) * p.input.stride_n + offset + first;
  constexpr int kWarpPlaces = Reader::kStages * kStepLoads * kWarp;
  typename Raw::Words* ring = reinterpret_cast<typename Raw::Words*>(shared + p.ring_at) +
                              threadIdx.x / kWarp * kWarpPlaces + threadIdx.x % kWarp;
  Reader reader(p, list, walker, n + image, has, from, turns, ring);

  const int rows = p.images * p.channels;
  const int part = threadIdx.x & ((1 << p.split) - 1);
  const int step = blockDim.x >> p.split;
  const int row_step = step / static_cast<unsigned>(p.cells);
  const int cell_step = step - row_step * p.cells;
  for (int64_t turn = 0; turn < turns; ++turn) {
    Acc sums[kElements];
    Acc lost[kElements];
    int place = -1;
#pragma unroll 1
    for (int r = 0; r < list.run_count; ++r) {
      const GroupsRun run = list.runs[r];
      if (run.place != place) {
        place = run.place;
#pragma unroll
        for (int j = 0; j < kElements; ++j) sums[j] = lost[j] = 0;
      }
      const bool whole = run.end - run.begin == p.positions * p.channels;
#pragma unroll 1
      for (int s = 0; s < run.steps; ++s) {
        typename Raw::Words loaded[kStepLoads];
        reader.next(loaded);
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          Acc values[kStepLoads];
#pragma unroll
          for (int u = 0; u < kStepLoads; ++u) values[u] = Raw::element(loaded[u], j);
          Acc sum = halves_sum(values);
          if (!whole && (first + j < run.begin || first + j >= run.end)) sum = 0;
          // Results of 16 bits have no use for it, and it takes registers.
          if constexpr (sizeof(T) >= sizeof(float)) {
            add_exactly(sums[j], lost[j], sum);
          } else {
            sums[j] += sum;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        sums_of_places[(place * kElements + j) * p.pitch + threadIdx.x] =
            sizeof(T) >= sizeof(float) ? settled(sums[j], lost[j]) : sums[j];
      }
    }
    __syncthreads();

    int row = (threadIdx.x >> p.split) / static_cast<unsigned>(p.cells);  // a channel of an image
    int cell = (threadIdx.x >> p.split) - row * p.cells;
    for (int done = 0; done < rows * p.cells; done += step) {
      const int its_image = p.images == 1 ? 0 : row / static_cast<unsigned>(p.channels);
      const int channel = row - its_image * p.channels;
      const bool real = row < rows && n + its_image < p.batch;
      const int its_place = real ? cell_places[cell] : -1;
      Acc sum = 0;
      if (its_place >= 0) {
        sum = sum_of_walkers<T>(p, sums_of_places + its_place * kElements * p.pitch, its_image,
                                channel, part, 1 << p.split);
      }
      for (int half = (1 << p.split) / 2; half > 0; half /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, half);
      }
      if (real && part == 0) {
        cell_sums[((chunk * p.batch + n + its_image) * p.channels + channel) * p.cells + cell] =
            sum;
      }
      row += row_step;
      cell += cell_step;
      if (cell >= p.cells) {
        cell -= p.cells;
        ++row;
      }
    }
    n += p.images;
    __syncthreads();
  }
}

// In stats_channels.cu.
cudaError_t launch_groups(const Problem& problem, const Cells& cells, const Input& input,
                          Dtype dtype, const GroupsPlan& plan, const Queue& queue,
                          const BesideFold& fold, void* cell_sums);

}  // namespace convt_reduce::cuda
