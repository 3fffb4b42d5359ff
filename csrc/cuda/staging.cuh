// Copies from global to shared memory whose cost does not depend on alignment.
//
// Global memory is read in aligned pieces of 16 bytes, wherever the data begins, and every piece
// lies in shared memory as it lies outside: data that begins 4 bytes behind a 16-byte boundary
// begins 4 bytes behind one there too. So sums are taken in the same order, to the bit, from
// wherever they came. The copies are asynchronous from compute capability 8.0 on and take no
// registers, so that much can be on its way.
#pragma once

#include "cuda/barriers.cuh"

namespace convt_reduce::cuda {

constexpr uintptr_t kPiece = kVectorBytes;

__device__ inline uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

// Where data from this address begins in its copy.
__device__ inline int phase_of(uintptr_t address) { return static_cast<int>(address % kPiece); }

// Bulk copies take up to a third longer where a line of global memory comes to lie across two lines
// of shared memory. So large ones go to places of whole lines, where data begins as far into a line
// as it does outside.
__device__ inline int line_phase_of(uintptr_t address) {
  return static_cast<int>(address % kLineBytes);
}

// Where the first piece goes of data from this address, in a place that begins with a line.
__device__ inline unsigned char* in_lines(unsigned char* place, uintptr_t address) {
  return place + (line_phase_of(address) - phase_of(address));
}

// Bytes of such a place for so many of data.
CONVT_HD inline int64_t line_place_bytes(int64_t bytes) {
  return round_up(bytes + kLineBytes, kLineBytes);
}

// Starts the copy of the piece at `from`, a multiple of 16.
__device__ inline void start_piece(unsigned char* to, uintptr_t from) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = shared_address(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}

// The same of what is read once, and shall not drive out of the cache what is read again.
__device__ inline void start_passing_piece(unsigned char* to, uintptr_t from) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = shared_address(to);
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address),
               "l"(from), "l"(policy)
               : "memory");
#else
  start_piece(to, from);
#endif
}

// Copies to shared memory behind our back; bytes after the first `bytes` become zero.
template <int kBytes>
__device__ inline void copy_async(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = shared_address(to);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(bytes)
                 : "memory");
  }
#endif
}

// As start_piece, where nothing outside [begin, end) may be read: a piece across either is copied
// in part, at once.
__device__ inline void copy_piece(unsigned char* to, uintptr_t from, uintptr_t begin,
                                  uintptr_t end) {
  if (from >= begin && from + kPiece <= end) {
    start_piece(to, from);
    return;
  }
  constexpr uintptr_t kLeast = 2;  // bytes of the smallest element
  for (uintptr_t at = 0; at < kPiece; at += kLeast) {
    if (from + at < begin || from + at >= end) continue;
    *reinterpret_cast<unsigned short*>(to + at) =
        *reinterpret_cast<const unsigned short*>(from + at);
  }
}

// A stretch of global memory, and where its copy goes.
struct Stretch {
  uintptr_t begin;
  uintptr_t end;
  unsigned char* to;
};

// Starts the copy of a stretch by a warp. Pieces reach over both ends as far as
// [limit_begin, limit_end).
__device__ inline void copy_stretch(const Stretch& stretch, uintptr_t limit_begin,
                                    uintptr_t limit_end, int lane) {
  const uintptr_t first = stretch.begin - stretch.begin % kPiece;
  const uintptr_t last = (stretch.end + kPiece - 1) / kPiece * kPiece;
  const int bytes = static_cast<int>(last - first);
  const int start = lane * static_cast<int>(kPiece);
  constexpr int kStep = kWarp * static_cast<int>(kPiece);
  if (first >= limit_begin && last <= limit_end) {
#pragma unroll 4
    for (int at = start; at < bytes; at += kStep) start_piece(stretch.to + at, first + at);
  } else {
    for (int at = start; at < bytes; at += kStep) {
      copy_piece(stretch.to + at, first + at, limit_begin, limit_end);
    }
  }
}

// Closes the batch of copies that this thread has started since the last.
__device__ inline void close_batch() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the newest kLeft batches of this thread are there. Other threads see them
// after the next barrier.
template <int kLeft>
__device__ inline void wait_for_batches() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
// Starts the copy of a whole stretch by one thread, and tells the barrier how much will arrive.
// `passing`: of what is read once, and shall not drive out of the cache what is read again.
__device__ inline void start_bulk(const Stretch& stretch, uintptr_t limit_begin,
                                  uintptr_t limit_end, unsigned barrier, bool passing = false) {
  const uintptr_t begin = stretch.begin - stretch.begin % kPiece;
  uintptr_t first = begin;
  uintptr_t last = (stretch.end + kPiece - 1) / kPiece * kPiece;
  if (first < limit_begin || last > limit_end) {
    if (first < limit_begin) {
      copy_piece(stretch.to, first, limit_begin, limit_end);
      first += kPiece;
    }
    if (last > limit_end && last > first) {
      last -= kPiece;
      copy_piece(stretch.to + (last - begin), last, limit_begin, limit_end);
    }
    // Later bulk copies to the same place come after these writes.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  const auto bytes = static_cast<unsigned>(last - first);
  expect_bytes(barrier, bytes);
  if (bytes == 0) return;
  const unsigned to = shared_address(stretch.to + (first - begin));
  if (passing) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(first), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
  } else {
    copy_bulk(to, first, bytes, barrier);
  }
}
#endif

// How a warp fills its rooms in shared memory, one load to each. From compute capability 9.0 on a
// lane hands a stretch over as a whole; before, all lanes copy its pieces.
class Loader {
 public:
  // `barriers` are this warp's, one per room, and a load has at most `most` stretches.
  __device__ Loader(uint64_t* barriers, int rooms, int most, bool passing = false)
      : lane_(threadIdx.x % kWarp),
        most_(most),
        passing_(passing),
        barriers_(shared_address(barriers)) {
#if __CUDA_ARCH__ >= 900
    if (lane_ < rooms) {
      make_barrier(barrier_of(lane_), most);
      finish_barriers();
    }
#endif
  }

  // Starts the copy of stretch_at(0), stretch_at(1) ..., of which memory in [limit_begin,
  // limit_end) may be read. Data lands at `to` + phase_of(begin). All lanes have done with what was
  // there.
  template <typename StretchAt>
  __device__ void start(int room, int count, uintptr_t limit_begin, uintptr_t limit_end,
                        const StretchAt& stretch_at) {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (lane_ < count) {
      start_bulk(stretch_at(lane_), limit_begin, limit_end, barrier_of(room));
    } else if (lane_ < most_) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_of(room)) : "memory");
    }
#else
    for (int i = 0; i < count; ++i) {
      const Stretch stretch = stretch_at(i);
      copy_stretch(stretch, limit_begin, limit_end, lane_);
    }
    close_batch();
#endif
  }

  // The same with a stretch for each of `count` rooms from `room` on, all of which are empty.
  template <typename StretchAt>
  __device__ void start_rooms(int room, int count, uintptr_t limit_begin, uintptr_t limit_end,
                              const StretchAt& stretch_at) {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (lane_ < count) {
      start_bulk(stretch_at(lane_), limit_begin, limit_end, barrier_of(room + lane_), passing_);
    }
#else
    for (int i = 0; i < count; ++i) {
      copy_stretch(stretch_at(i), limit_begin, limit_end, lane_);
      close_batch();
    }
#endif
  }

  // Waits until all of a room's load is there, for all lanes. `newer` loads were started after it.
  __device__ void wait(int room, int newer) {
#if __CUDA_ARCH__ >= 900
    wait_for_bytes(barrier_of(room), (parities_ >> room) & 1);
    parities_ ^= 1u << room;
#else
    if (newer == 0) {
      wait_for_batches<0>();
    } else if (newer == 1) {
      wait_for_batches<1>();
    } else {
      wait_for_batches<2>();
    }
#endif
    __syncwarp();
  }

 private:
  __device__ unsigned barrier_of(int room) const {
    return barriers_ + room * static_cast<unsigned>(sizeof(uint64_t));
  }

  int lane_;
  int most_;
  bool passing_;  // whether what start_rooms() copies is read once
  unsigned barriers_;
  unsigned parities_ = 0;  // a bit per room
};

}  // namespace convt_reduce::cuda
