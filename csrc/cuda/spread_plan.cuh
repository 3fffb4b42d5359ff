// How spread_periods.cuh shares planes out; the choice is the host's alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

#include "cuda/periods.cuh"

namespace convt_reduce::cuda {

constexpr int64_t kChunkBytes = int64_t{kPeriodThreads} * kPeriodSlots * kVectorBytes;
constexpr int64_t kMemoryLine = 128;  // stores that end within a sector cost reads
constexpr int64_t kMemorySector = 32;
constexpr int64_t kBlockBytes = 128 * 1024;        // that a block writes, for its tables to pay off
constexpr int64_t kMostTurn = 16;                  // periods
constexpr int64_t kLeastPeriods = 4;               // below it, a block has too little to write
constexpr int64_t kFewChunks = 512;                // unless all blocks run at the same time anyway
constexpr int64_t kMostPeriod = int64_t{1} << 30;  // positions; and some more are an int32
constexpr int64_t kMostPeriodCells = 256;
constexpr int64_t kMostPeriodShared = 48 * 1024;
constexpr int64_t kMostTurnShared = 40 * 1024;

// The least number of planes that is a multiple of `unit` bytes.
inline int64_t whole_planes(int64_t unit, int64_t plane_bytes) {
  return unit / std::gcd(unit, plane_bytes);
}

// Lines of at least kLeastLine elements, as far as that gives no long ones.
inline void choose_lines(const Problem& problem, int size, PeriodsArguments& p) {
  constexpr int64_t kLeastLine = 16;
  constexpr int64_t kMostLine = 1024;  // with a table of columns
  const int64_t positions = problem.positions();
  const int64_t rows = problem.axis[1].size;
  const int64_t slab = rows * problem.axis[2].size;
  int64_t line = problem.axis[2].size;
  int64_t lines = problem.axis[0].size * rows;
  int64_t line_planes = 1;
  if (line < kLeastLine && slab >= kLeastLine && slab <= kMostLine) {
    line = slab;
    lines = problem.axis[0].size;
  } else if (slab < kLeastLine && positions <= kMostLine) {
    line_planes = positions < kLeastLine ? ceil_div(kLeastLine, positions) : 1;
    line = line_planes * positions;
    lines = 1;
  }
  p.line = static_cast<int>(line);
  p.lines = static_cast<int>(lines);
  p.line_planes = static_cast<int>(line_planes);
  p.line_step = kPeriodThreads * size / p.line;
  p.column_step = kPeriodThreads * size % p.line;
  p.columns_held = line <= kMostLine ? p.line : 0;
  p.lines_held = static_cast<int>(ceil_div(kChunkBytes / kVectorBytes * size, line)) + 3;
}

// Nothing where planes go another way, which does not depend on `processors`.
inline std::optional<PeriodsArguments> plan_periods(const Problem& problem, const Cells& cells,
                                                    Dtype dtype, int processors) {
  const int64_t element = element_bytes(dtype);
  const int size = kVectorBytes / static_cast<int>(element);
  const int64_t positions = problem.positions();
  const int64_t planes = problem.planes();
  if (needs_table(cells) || cells.count() > kMostPeriodCells || positions > kMostPeriod) return {};
  int64_t period = whole_planes(kMemoryLine, positions * element);
  if (planes < kLeastPeriods * period) period = whole_planes(kMemorySector, positions * element);
  if (period * positions > kMostPeriod) return {};

  PeriodsArguments p{.depths = AxisBands<int>(cells.axis[0]),
                     .rows = AxisBands<int>(cells.axis[1]),
                     .columns = AxisBands<int>(cells.axis[2])};
  choose_lines(problem, size, p);
  // Shared memory: of a plane, twice, since one turn is made while another is stored; of the turn.
  const int64_t tap_step = problem.taps() | 1;
  const int64_t sum = dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  const int64_t plane_shared = 2 * (tap_step * sum + cells.count() * element);
  const int64_t tables = cells.count() * static_cast<int64_t>(sizeof(TapBox)) +
                         2 * kMostTurn * static_cast<int64_t>(sizeof(int)) +
                         (p.columns_held + size + p.lines_held) * 2;
  const int64_t room = std::min(kMostTurnShared, kMostPeriodShared - tables - 2 * kVectorBytes);
  const auto touched = [&](int64_t of) {  // planes of a period that a chunk touches
    const int64_t elements = std::min(of * positions, kChunkBytes / element);
    return std::min(round_up(of, p.line_planes),
                    (elements - 2 + positions) / positions + p.line_planes);
  };
  const auto period_shared = [&](int64_t of) {
    return touched(of) * plane_shared + 4 * kVectorBytes;
  };
  if (period_shared(period) > room) return {};

  const int64_t resident = int64_t{processors} * kPeriodBlocks;
  const int64_t period_bytes = period * positions * element;
  if (period_bytes <= kChunkBytes) {  // whole periods make up a chunk
    const int64_t times = std::min({kChunkBytes / period_bytes, ceil_div(planes, resident) / period,
                                    room / 2 / plane_shared / period});
    if (times > 1 && period_shared(period * times) <= room) period *= times;
  }
  p.all_slots = static_cast<int>(period * positions / size);
  const int64_t wanted = ceil_div(p.all_slots * int64_t{kVectorBytes}, kChunkBytes);
  p.slots = static_cast<int>(round_up(ceil_div(p.all_slots, wanted), kMemoryLine / kVectorBytes));
  p.chunks = static_cast<int>(ceil_div(p.all_slots, p.slots));
  p.period = static_cast<int>(period);
  p.periods = ceil_div(planes, period);
  if (p.periods < kLeastPeriods && p.chunks > kFewChunks) return {};

  p.positions = static_cast<int>(positions);
  p.cells = static_cast<int>(cells.count());
  p.taps = static_cast<int>(problem.taps());
  p.tap_step = static_cast<int>(tap_step);
  for (int a = 0; a < kAxes; ++a) p.kernel[a] = static_cast<int>(problem.axis[a].kernel);
  p.planes = planes;
  p.chunk_planes = static_cast<int>(touched(period));
  p.stage_bytes =
      static_cast<int>(round_up(p.chunk_planes * tap_step * sum + kVectorBytes, kVectorBytes));
  const int64_t chunk_bytes = p.slots * int64_t{kVectorBytes};
  const int64_t turn = std::clamp<int64_t>(
      std::min(kBlockBytes / chunk_bytes, room / period_shared(period)), 1, kMostTurn);
  const int64_t turns = ceil_div(kBlockBytes, turn * chunk_bytes);
  p.groups = std::max(resident / p.chunks, ceil_div(p.periods, turn * turns));
  p.groups = std::clamp<int64_t>(p.groups, 1, std::min(p.periods, kMaxGrid / p.chunks));
  p.turn = static_cast<int>(std::min(turn, ceil_div(p.periods, p.groups)));
  return p;
}

// Whether the tap gradients of all planes lie one behind the other. Strides of size 1 say nothing.
inline bool is_dense(const Problem& problem, const Input& tap_grads) {
  int64_t next = 1;
  const auto follows = [&](int64_t size, int64_t stride) {
    const bool does = size == 1 || stride == next;
    next *= size;
    return does;
  };
  for (int a = kAxes - 1; a >= 0; --a) {
    if (!follows(problem.axis[a].kernel, tap_grads.stride[a])) return false;
  }
  return follows(problem.c_in, tap_grads.stride_c) && follows(problem.batch, tap_grads.stride_n);
}

}  // namespace convt_reduce::cuda
