// Products of warpgroups, four warps, on tensor cores: wgmma, which compute capability 9.0 alone
// has.
//
// A warpgroup multiplies 64 batch elements, whose sums' pieces it has in registers, by 64 and more
// output channels, whose weights' pieces lie in shared memory.
#pragma once

#include "cuda/barriers.cuh"
#include "cuda/pieces.cuh"

namespace convt_reduce::cuda {

constexpr int kWarpgroup = 4 * kWarp;
constexpr int kRows64 = 64;  // batch elements of a product

// Before products whose registers have been written since the last.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the batch of products started since the last.
__device__ inline void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the newest kLeft batches are there.
template <int kLeft>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Results that products write behind our back are neither read nor written across this.
template <int kCount>
__device__ __forceinline__ void settle(float (&results)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(results[i])::"memory");
}

// Registers from which products read may not be written while any run, or the compiler lets these
// run one by one. So what is made meanwhile comes there afterwards, by an or with a zero that the
// compiler cannot foresee: it would see through a plain copy.
template <int kSteps>
__device__ __forceinline__ void put_pieces(const uint32_t (&from)[kSteps][3][4], uint32_t zero,
                                           uint32_t (&to)[kSteps][3][4]) {
#pragma unroll
  for (int i = 0; i < kSteps * 12; ++i) {
    asm volatile("or.b32 %0, %1, %2;"
                 : "=r"(to[i / 12][i / 4 % 3][i % 4])
                 : "r"(from[i / 12][i / 4 % 3][i % 4]), "r"(zero)
                 : "memory");
  }
}

// What products want to know of where Matrices begin: the vectors before, and how many one half of
// a piece is from the other.
__device__ inline uint32_t matrices_at(unsigned shared) {
  constexpr uint32_t kHalf = sizeof(Matrices) / 6 / kVectorBytes;
  return shared / kVectorBytes | kHalf << 16;
}

// Starts d = a * b, or d += a * b, of 64 x 16 by 16 x 64, 96 or 128, where `weights` is from
// matrices_at() plus any vectors, and what the next 8 channels have is `apart` vectors behind.
__device__ inline void multiply_warpgroup(float (&d)[32], const uint32_t (&a)[4], uint32_t weights,
                                          uint32_t apart, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %38, 0;\n"
      "mov.b64 b, {%36, %37};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, b, adds, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(apart),
        "r"(static_cast<int>(adds)));
}

__device__ inline void multiply_warpgroup(float (&d)[48], const uint32_t (&a)[4], uint32_t weights,
                                          uint32_t apart, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %54, 0;\n"
      "mov.b64 b, {%52, %53};\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, "
      "{%48,%49,%50,%51}, b, adds, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(apart),
        "r"(static_cast<int>(adds)));
}

__device__ inline void multiply_warpgroup(float (&d)[64], const uint32_t (&a)[4], uint32_t weights,
                                          uint32_t apart, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %70, 0;\n"
      "mov.b64 b, {%68, %69};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, b, adds, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(weights), "r"(apart),
        "r"(static_cast<int>(adds)));
}

}  // namespace convt_reduce::cuda
