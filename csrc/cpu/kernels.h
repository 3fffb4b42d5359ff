// The CPU kernels: plain pointers, a Problem, and a way to run a loop in parallel.
//
// Work is cut into pieces by the sizes alone, each piece is summed by one thread, and pieces are
// added in a fixed order, so the result's bits do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <functional>

#include "cells.h"
#include "problem.h"

namespace convt_reduce::cpu {

// Calls body(begin, end) on parts of [0, count), in parallel. `grain` is the least part.
using ParallelFor = std::function<void(int64_t count, int64_t grain,
                                       const std::function<void(int64_t, int64_t)>& body)>;

// cell_sums [planes][cells] = x summed over each cell; 0 for a cell that no tap covers.
void stats(const Problem& problem, const Cells& cells, const Input& input, Dtype dtype,
           const ParallelFor& parallel_for, void* cell_sums);

// y [batch][c_out] = multiplier * (mean_scale * sum_c sum_cell folded weight * cell sum + bias)
void combine(const Problem& problem, const Cells& cells, const Weight& weight, const Bias& bias,
             Dtype dtype, const ParallelFor& parallel_for, const void* cell_sums, void* y);

// The same without folding, which combine takes for kernels with few taps to a cell.
void combine_taps(const Problem& problem, const Cells& cells, const Weight& weight,
                  const Bias& bias, Dtype dtype, const ParallelFor& parallel_for,
                  const void* cell_sums, void* y);

// Combine's derivative for small problems, on one thread.
void combine_backward(const Problem& problem, const CombineBackward& tensors, Dtype dtype);

// tap_sums [planes][taps] = the cell sums added over each tap's box of cells.
void tap_sums(const Problem& problem, const Cells& cells, Dtype dtype,
              const ParallelFor& parallel_for, const void* cell_sums, void* tap_sums);

// grad [planes][positions] = the tap gradients added over each position's taps: the adjoint of
// stats followed by tap_sums. `tap_grads` is strided like an input, over taps.
void spread(const Problem& problem, const Cells& cells, const Input& tap_grads, Dtype dtype,
            const ParallelFor& parallel_for, void* grad);

}  // namespace convt_reduce::cpu
