// How a small call is shared out among blocks, and what the parts of its kernel have in common:
// mean_small.cuh.
//
// The way of a call through this kernel is short, and most of it is instructions that wait for each
// other. So the host hands over what would cost divisions and searches.
#pragma once

#include "cuda/combine_split_tile.cuh"
#include "cuda/stats_small_tile.cuh"

namespace convt_reduce::cuda {

constexpr int kMeanCluster = 8;   // blocks, at most: the size that CUDA calls portable
constexpr int kMeanTeams = 4;     // that fold, at most
constexpr int kMeanWarps = 4;     // that add up, at most
constexpr int kMeanTogether = 2;  // planes that a few lanes walk: larger ones are not served
constexpr int kMeanListed = 32;   // cells that the host lists, at most
constexpr int kMeanThreads = kMeanTeams * kFoldThreads + kMeanWarps * kWarp;

struct MeanTiles {
  int columns8;  // of a group: 8 output channels for each block
  int cluster;   // blocks, a power of two
  int rows;      // batch elements of a tile
  int steps;     // of depth
  int teams;     // that fold
  int taps;
  unsigned used;          // of these, a bit for each that covers a cell
  int panel_at;           // where in shared memory folded weights begin,
  int sums_at;            // cell sums [rows][depth],
  int masks_at;           // which taps cover the cells,
  int list_at;            // and the list of a plane's cells
  int parts_at;           // where in a warp's own the parts of wide sums begin; 0: it makes none
  int listed;             // cells; 0: too many, blocks list them
  int wide;               // of these
  unsigned taps_inverse;  // see quotient_by()
  unsigned taps1_inverse;
  unsigned taps2_inverse;
  unsigned rows_inverse;  // of a plane
  unsigned columns_inverse;
  unsigned tiles_inverse;   // of a stretch
  unsigned planes_inverse;  // of a tile,
  unsigned last_inverse;    // and of a stretch's last
  ListedCell cells[kMeanListed];
};

// What quotient_by() wants for a divisor.
inline unsigned inverse_of(int64_t divisor) {
  return divisor == 1 ? 0 : static_cast<unsigned>(((int64_t{1} << 32) + divisor - 1) / divisor);
}

// a / b for numbers from 0 to 65535, by the inverse of b.
__device__ inline int quotient_by(int a, unsigned inverse) {
  return inverse == 0 ? a : static_cast<int>(__umulhi(a, inverse));
}

}  // namespace convt_reduce::cuda
