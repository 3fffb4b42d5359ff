// Copies from global to shared memory whose cost does not depend on alignment.
//
// Global memory is read in aligned pieces of 16 bytes, wherever the data begins, and every piece
// lies in shared memory as it lies outside: data that begins 4 bytes behind a 16-byte boundary
// begins 4 bytes behind one there too. So sums are taken in the same order, to the bit, from
// wherever they came. The copies are asynchronous from compute capability 8.0 on and take no
// registers, so that much can be on its way.
#pragma once

#include "cuda/device.cuh"

namespace convt_reduce::cuda {

constexpr uintptr_t kPiece = kVectorBytes;

__device__ inline uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

// Where data from this address begins in its copy.
__device__ inline int phase_of(uintptr_t address) { return static_cast<int>(address % kPiece); }

// Starts the copy of the piece at `from`, a multiple of 16.
__device__ inline void start_piece(unsigned char* to, uintptr_t from) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}

// The same where nothing outside [begin, end) may be read: a piece across either is copied in part,
// at once.
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

// Starts the copy of [begin, end) by kThreads threads, of which this is number `thread`; data lands
// at to + phase_of(begin). Pieces reach over both ends as far as [limit_begin, limit_end).
template <int kThreads>
__device__ inline void copy_stretch(unsigned char* to, uintptr_t begin, uintptr_t end,
                                    uintptr_t limit_begin, uintptr_t limit_end, int thread) {
  const uintptr_t first = begin - begin % kPiece;
  const uintptr_t last = (end + kPiece - 1) / kPiece * kPiece;
  const int bytes = static_cast<int>(last - first);
  const int start = thread * static_cast<int>(kPiece);
  constexpr int kStep = kThreads * static_cast<int>(kPiece);
  if (first >= limit_begin && last <= limit_end) {
#pragma unroll 4
    for (int at = start; at < bytes; at += kStep) start_piece(to + at, first + at);
  } else {
    for (int at = start; at < bytes; at += kStep) {
      copy_piece(to + at, first + at, limit_begin, limit_end);
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

}  // namespace convt_reduce::cuda
