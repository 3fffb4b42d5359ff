// How stats_planes.cuh shares out contiguous planes. Nothing here changes with the batch. The sizes
// are those that measured best on an H200.
#pragma once

#include <algorithm>

#include "cuda/stats_planes.cuh"

namespace convt_reduce::cuda {

// Of a plane for one block, about: small chunks leave no processor long without work at the end,
// large ones cost less where a tile costs much, or where combine adds them.
constexpr int64_t kChunkBytes = 32 * 1024;
constexpr int64_t kLargeChunkBytes = 64 * 1024;
constexpr int64_t kMostChunks = 8192;  // about: a second kernel adds their sums

inline int64_t chunks_wanted(int64_t plane_bytes, int64_t chunk_bytes) {
  return std::clamp<int64_t>((plane_bytes + chunk_bytes / 2) / chunk_bytes, 1, kMostChunks);
}

// Shares out a plane's tiles: chunks of about the wanted number, and as many tiles for each worker.
inline void share_tiles(int64_t chunks, RowsPlan& plan) {
  const int64_t shares = chunks * plan.workers;
  plan.chunk = plan.tiles;
  if (chunks > 1) {
    plan.chunk = plan.workers * std::max<int64_t>((plan.tiles + shares / 2) / shares, 1);
  }
  plan.chunks = ceil_div(plan.tiles, plan.chunk);
}

inline int workers_for(int64_t chunk_bytes, int64_t least_bytes) {
  return static_cast<int>(
      largest_power_of_two(std::clamp<int64_t>(chunk_bytes / least_bytes, 1, kPlaneWarps)));
}

inline void plan_long_rows(const Problem& problem, int64_t bytes, RowsPlan& plan) {
  constexpr int64_t kWorkerBytes = 4096;  // of a plane for one warp, at least
  constexpr int64_t kTileBytes = 3584;    // about
  const int64_t width = problem.axis[2].size;
  const int64_t rows = problem.axis[0].size * problem.axis[1].size;
  const int64_t chunks = chunks_wanted(problem.positions() * bytes, kChunkBytes);
  const int64_t wanted = kTileBytes / bytes;
  plan.slots = kLongRows;
  plan.rooms = 2;
  plan.row_tiles = std::max<int64_t>((width + wanted / 2) / wanted, 1);
  plan.columns_tile = width;
  plan.tile = 1;
  if (plan.row_tiles > 1) {
    plan.columns_tile = round_up(ceil_div(width, plan.row_tiles), kPlaneLoads * kWarp);
    plan.row_tiles = ceil_div(width, plan.columns_tile);
  } else {
    plan.tile = static_cast<int>(std::clamp<int64_t>((wanted + width / 2) / width, 1, rows));
  }
  plan.tiles = ceil_div(rows, plan.tile) * plan.row_tiles;
  plan.workers = workers_for(problem.positions() * bytes / chunks, kWorkerBytes);
  share_tiles(chunks, plan);
}

struct ShortRowsSizes {
  int64_t chunk;  // bytes of a chunk,
  int64_t tile;   // of a tile, about
  int rooms;      // of a warp, at least
};

// `crowded`: so many cells that four warps do not pay for a small chunk. `even`: rows are of whole
// warps. `merged`: combine adds few chunks. More are added by a second kernel, however many.
inline ShortRowsSizes short_rows_sizes(int64_t plane_bytes, int64_t bytes, int slots, bool crowded,
                                       bool even, bool merged) {
  constexpr int64_t kTileBytes = 8000;
  const bool wide = slots == kMostSlots;
  if (bytes == 2 && wide) return {2 * kLargeChunkBytes, 5600, 2};
  if (crowded && bytes == 2 && slots != kSlotForms[0]) return {kLargeChunkBytes, kTileBytes, 2};
  constexpr int64_t kLeastMerged = kLargeChunkBytes * 15 / 16;  // few images are slower in chunks
  const bool many = plane_bytes >= kMostMergedChunks * kLargeChunkBytes;
  const bool small = bytes == 2 || many || (merged && !even && plane_bytes >= kLeastMerged);
  if (crowded || wide || !small) return {kLargeChunkBytes, kTileBytes, 1};
  return {kChunkBytes, kTileBytes, 2};
}

// Whether combine adds few chunks itself wherever its batch and its channels are not too many.
inline bool combine_may_merge(const Problem& problem, int64_t cells, int64_t bytes) {
  return bytes <= 4 && suits_tensor_tiles(problem.c_in / problem.groups * cells, problem.groups,
                                          problem.c_out / problem.groups);
}

inline void plan_short_rows(const Problem& problem, int64_t cells, int64_t bytes, RowsPlan& plan) {
  constexpr int64_t kWorkerBytes = 6144;              // of a plane for one warp, at least,
  constexpr int64_t kCellBytes = 600;                 // and for each cell,
  constexpr int64_t kCellsBytes = 16000;              // up to this
  constexpr int64_t kMostTileBytes = 9 * 1024 + 496;  // with what is read behind it
  const int64_t width = problem.axis[2].size;
  const int64_t rows = problem.axis[0].size * problem.axis[1].size;
  const int64_t plane_bytes = problem.positions() * bytes;
  // The fewest slots that a row fits in leave most steps to a tile.
  for (const int slots : kSlotForms) {
    plan.slots = slots;
    if (width <= slots * kWarp) break;
  }
  plan.step_rows = static_cast<int>(plan.slots * kWarp / width);
  const bool crowded = cells * kCellBytes * kPlaneWarps > kChunkBytes;
  const ShortRowsSizes sizes =
      short_rows_sizes(plane_bytes, bytes, plan.slots, crowded, width % kWarp == 0,
                       combine_may_merge(problem, cells, bytes));
  const int64_t chunks = chunks_wanted(plane_bytes, sizes.chunk);
  const int64_t chunk_bytes = plane_bytes / chunks;
  plan.workers =
      workers_for(chunk_bytes, std::max(kWorkerBytes, std::min(cells * kCellBytes, kCellsBytes)));
  plan.rooms = sizes.rooms;
  // As many tiles for each worker, of whole steps and nearly the wanted size.
  const int64_t most =
      std::max<int64_t>((kMostTileBytes - plan.slots * kWarp * bytes) / (width * bytes), 1);
  const int64_t shares = chunks * plan.workers;
  int64_t worker_tiles =
      std::max<int64_t>((chunk_bytes / plan.workers + sizes.tile * 2 / 5) / sizes.tile, 1);
  while (ceil_div(rows, shares * worker_tiles) > most) ++worker_tiles;
  int64_t tile = ceil_div(rows, shares * worker_tiles);
  if (tile > plan.step_rows) {
    const int64_t whole = round_up(tile, plan.step_rows);
    tile = whole <= most ? whole : tile - tile % plan.step_rows;
  }
  plan.tile = static_cast<int>(std::min(tile, rows));
  plan.columns_tile = width;
  plan.tiles = ceil_div(rows, plan.tile);
  share_tiles(chunks, plan);
}

inline RowsPlan plan_rows(const Problem& problem, int64_t cells, int64_t bytes) {
  RowsPlan plan;
  if (problem.axis[2].size > kMostSlots * kWarp || problem.positions() > kNarrowPositions) {
    plan_long_rows(problem, bytes, plan);
  } else {
    plan_short_rows(problem, cells, bytes, plan);
  }
  return plan;
}

}  // namespace convt_reduce::cuda
