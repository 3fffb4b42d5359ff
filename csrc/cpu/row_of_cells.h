// What stats holds of the cells that it is adding to.
#pragma once

#include <vector>

#include "cpu/element.h"

namespace convt_reduce::cpu {

// The sums of one row of cells, those of one (b0, b1), for `channels` neighbouring planes: for each
// [band][channel] the latest stretches, at most kRun of them, and what came before.
template <typename Acc>
class RowOfCells {
 public:
  RowOfCells(int64_t bands, int64_t channels)
      : channels_(channels),
        recent_(bands * channels),
        sum_(bands * channels),
        lost_(bands * channels),
        added_(bands) {}

  // For how many planes, up to those it was made for. Nothing must be held.
  void serve(int64_t channels) { channels_ = channels; }

  // Adds the sums of one stretch, [channels].
  void add(int64_t band, const Acc* stretch) {
    Acc* recent = recent_.data() + band * channels_;
    for (int64_t j = 0; j < channels_; ++j) recent[j] += stretch[j];
    if (++added_[band] == kRun) settle(band);
  }

  // Adds the row to sums and lost, [channels][cells], whose row begins at cell `first`, and starts
  // again with nothing.
  void move_to(Acc* sums, Acc* lost, int64_t first, int64_t cells) {
    for (int64_t band = 0; band < static_cast<int64_t>(added_.size()); ++band) {
      settle(band);
      for (int64_t j = 0; j < channels_; ++j) {
        const int64_t from = band * channels_ + j;
        const int64_t to = j * cells + first + band;
        add_exactly(sums[to], lost[to], settled(sum_[from], lost_[from]));
        sum_[from] = lost_[from] = 0;
      }
    }
  }

 private:
  void settle(int64_t band) {
    Acc* recent = recent_.data() + band * channels_;
    Acc* sum = sum_.data() + band * channels_;
    Acc* lost = lost_.data() + band * channels_;
    for (int64_t j = 0; j < channels_; ++j) {
      add_exactly(sum[j], lost[j], recent[j]);
      recent[j] = 0;
    }
    added_[band] = 0;
  }

  int64_t channels_;
  std::vector<Acc> recent_, sum_, lost_;
  std::vector<int64_t> added_;
};

}  // namespace convt_reduce::cpu
