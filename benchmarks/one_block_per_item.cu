// The kernel that a first attempt at the headline's shape would be: one block per batch item, and
// in it a warp per channel. Correct, in one launch, and slow, since 16 items keep 16 of a GPU's
// hundred and more multiprocessors busy. It stands for what is compiled at import with load_inline.
//
// float32, contiguous, 2-D, kernel 3, stride 2, padding 1, output padding 1, one group: there the
// first row and the first column are out of tap 0's reach, and nothing else is.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kCells = 4;  // core, row 0, column 0, corner
constexpr int kTaps = 9;

static_assert(kThreads % kWarp == 0, "a channel belongs to a whole warp");

__device__ float warp_sum(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, distance);
  }
  return value;
}

__global__ void one_block_per_item_kernel(const float* x, const float* weight, const float* bias,
                                          float* y, int c_in, int c_out, int height, int width,
                                          float multiplier) {
  extern __shared__ float cell_sums[];  // [c_in][kCells]
  const int n = blockIdx.x;
  const int lane = threadIdx.x % kWarp;
  const int plane = height * width;

  for (int c = threadIdx.x / kWarp; c < c_in; c += kThreads / kWarp) {
    const float* source = x + (static_cast<int64_t>(n) * c_in + c) * plane;
    float sums[kCells] = {};
    for (int at = lane; at < plane; at += kWarp) {
      const float value = source[at];
      const bool in_row = at < width;
      const bool in_column = at % width == 0;
      sums[0] += in_row || in_column ? 0.0f : value;
      sums[1] += in_row && !in_column ? value : 0.0f;
      sums[2] += in_column && !in_row ? value : 0.0f;
      sums[3] += in_row && in_column ? value : 0.0f;
    }
    for (int cell = 0; cell < kCells; ++cell) {
      const float sum = warp_sum(sums[cell]);
      if (lane == 0) cell_sums[c * kCells + cell] = sum;
    }
  }
  __syncthreads();

  const float positions = 4.0f * static_cast<float>(plane);  // of the output: twice each axis
  for (int o = threadIdx.x; o < c_out; o += kThreads) {
    float total = 0.0f;
    for (int c = 0; c < c_in; ++c) {
      const float* taps = weight + (static_cast<int64_t>(c) * c_out + o) * kTaps;
      const float corner = taps[4] + taps[5] + taps[7] + taps[8];
      const float row = taps[3] + taps[6] + corner;     // row 0: rows 1 and 2 of the taps
      const float column = taps[1] + taps[2] + corner;  // column 0: columns 1 and 2 of the taps
      const float core = taps[0] + taps[1] + taps[2] + row;
      const float* sums = cell_sums + c * kCells;
      total += sums[0] * core + sums[1] * row + sums[2] * column + sums[3] * corner;
    }
    y[static_cast<int64_t>(n) * c_out + o] = (total / positions + bias[o]) * multiplier;
  }
}

}  // namespace

torch::Tensor one_block_per_item(torch::Tensor x, torch::Tensor weight, torch::Tensor bias,
                                 double multiplier) {
  const int c_in = static_cast<int>(x.size(1));
  const int c_out = static_cast<int>(weight.size(1));
  auto y = torch::empty({x.size(0), c_out, 1, 1}, x.options());
  one_block_per_item_kernel<<<static_cast<unsigned>(x.size(0)), kThreads,
                              c_in * kCells * sizeof(float), c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), y.data_ptr<float>(),
      c_in, c_out, static_cast<int>(x.size(2)), static_cast<int>(x.size(3)),
      static_cast<float>(multiplier));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
