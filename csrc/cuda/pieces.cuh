// Floats in three pieces: how tensor cores, which multiply bfloat16, multiply float32.
//
// A float is the sum of three bfloat16 numbers, exactly, if it is not below 2^-110 (then the last
// of its bits are lost) nor so large that the first piece is infinite. Of the nine products of two
// such sums six are made, which tensor cores hold exactly; what is dropped is below 2^-23 of the
// product. Tensor cores cut sums off instead of rounding them, so only the terms of a step or two
// are added there, and those sums are added in float32.
#pragma once

#include "cuda/combine.cuh"

namespace convt_reduce::cuda {

constexpr int kStep = 16;        // terms of one tensor product
constexpr int kColumns8 = 8;     // its output channels
constexpr int kRows16 = 16;      // its batch elements
constexpr int kPartTerms = 256;  // terms of a sum before it is added to the totals

// Whether this code is compiled for GPUs that have what is below.
__device__ constexpr bool has_tensor_cores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return true;
#else
  return false;
#endif
}

// The pieces of a step's weights for 8 output channels: lane 4*o + t has terms 4*t to 4*t + 3 of
// channel o. The order of terms within a step is free, as long as both operands have it alike, and
// four neighbours are one 16-byte load.
struct Fragment {
  uint4 large[kWarp];  // two pieces: high.xy, middle.xy
  uint2 small[kWarp];  // the third
};
static_assert(sizeof(Fragment) == 768);

// The same as warpgroups take them: for each piece the lanes' first two terms, then the others.
struct Matrices {
  uint32_t at[3][2][kWarp];
};
static_assert(sizeof(Matrices) == sizeof(Fragment), "either fits where the other does");

__device__ inline uint32_t pair_of(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two floats as the pairs of their first, second and third pieces.
__device__ inline void split_pair(float x, float y, uint32_t& first, uint32_t& second,
                                  uint32_t& third) {
  first = pair_of(x, y);
  x -= low_of(first);
  y -= high_of(first);
  second = pair_of(x, y);
  third = pair_of(x - low_of(second), y - high_of(second));
}

// d += a * b, of 16 x 16 by 16 x 8.
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// d = a * b of the same sizes.
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#endif
}

// The 16-bit elements of rows 0 to 15 that a tensor product takes from this lane: lane i has the
// address of the first half of row i, lane 16 + i of the second.
__device__ inline void load_matrices(const void* row, uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
#endif
}

// A lane's four terms of row lane / 4 and of the one 8 below, in pieces.
__device__ __forceinline__ void take_apart(const float4 (&sums)[2], uint32_t (&pieces)[3][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4& v = sums[half];
    split_pair(v.x, v.y, pieces[0][half], pieces[1][half], pieces[2][half]);
    split_pair(v.z, v.w, pieces[0][half + 2], pieces[1][half + 2], pieces[2][half + 2]);
  }
}

// A lane's share of a fragment.
struct LaneWeights {
  uint4 large;
  uint2 small;

  __device__ LaneWeights() {}
  __device__ LaneWeights(const Fragment& from, int lane)
      : large(from.large[lane]), small(from.small[lane]) {}
  __device__ uint2 piece(int i) const {
    return i == 0 ? uint2{large.x, large.y} : i == 1 ? uint2{large.z, large.w} : small;
  }
};

// kCount products that do not depend on each other and so hide each other's latency, each of kSteps
// steps: results[j] = the sum over steps of pieces_of(step * kCount + j) * weights_of(the same).
template <int kCount, int kSteps = 1, typename PiecesOf, typename WeightsOf>
__device__ __forceinline__ void multiply_step(const PiecesOf& pieces_of,
                                              const WeightsOf& weights_of,
                                              float (&results)[kCount][4]) {
  // Pieces of a sum and of a weight: small products first.
  constexpr int kProducts[6][2] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
#pragma unroll
  for (int product = 0; product < 6; ++product) {
#pragma unroll
    for (int i = 0; i < kSteps * kCount; ++i) {
      const uint32_t (&piece)[4] = pieces_of(i)[kProducts[product][0]];
      const uint2 weight = weights_of(i).piece(kProducts[product][1]);
      if (product == 0 && i < kCount) {
        multiply(results[i], piece, weight.x, weight.y);
      } else {
        multiply_add(results[i % kCount], piece, weight.x, weight.y);
      }
    }
  }
}

// Two results side by side, or as many as exist: `left` of them and of those behind, maybe none.
template <typename T>
__device__ inline void put_pair(const T (&values)[2], int left, bool aligned, T* to) {
  struct alignas(2 * sizeof(T)) Pair {
    T at[2];
  };
  if (aligned && left >= 2) {
    *reinterpret_cast<Pair*>(to) = {values[0], values[1]};
  } else {
    if (left >= 1) to[0] = values[0];
    if (left >= 2) to[1] = values[1];
  }
}

// A thread's results that came out not finite, again, as they are numbered.
template <typename T>
__device__ __noinline__ void put_carefully(const CombineArguments& p, int64_t n_first,
                                           int64_t o_first, int width, uint32_t rare,
                                           const float* cell_sums, T* y) {
  for (int bit = 0; bit < 32; ++bit) {
    if ((rare >> bit & 1) == 0) continue;
    const int64_t n = n_first + bit / (2 * width) * 8;
    const int64_t o = o_first + bit / 2 % width * kColumns8 + bit % 2;
    y[n * p.c_out + o] = result<T>(p, careful_mean<T>(p, n, o, cell_sums), bias_of<T>(p, o));
  }
}

}  // namespace convt_reduce::cuda
