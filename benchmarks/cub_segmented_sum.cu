// NVIDIA's CUB on the same input: the sum of each plane, by DeviceSegmentedReduce. It computes
// x.sum(space) and no more; what it shows is how fast a tuned library reads the planes.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <torch/types.h>

#include <cub/device/device_segmented_reduce.cuh>

namespace {

// Where segment number i begins: all are of one length.
struct Begin {
  int64_t length;
  __host__ __device__ int64_t operator()(int64_t segment) const { return segment * length; }
};

}  // namespace

// x: contiguous float32 [N, C, ...]. Returns [N, C].
torch::Tensor cub_segmented_sum(torch::Tensor x) {
  const int64_t segments = x.size(0) * x.size(1);
  auto sums = torch::empty({x.size(0), x.size(1)}, x.options());
  if (segments == 0) return sums;
  auto begin = thrust::make_transform_iterator(thrust::make_counting_iterator<int64_t>(0),
                                               Begin{x.numel() / segments});
  const auto stream = c10::cuda::getCurrentCUDAStream();
  size_t bytes = 0;
  C10_CUDA_CHECK(cub::DeviceSegmentedReduce::Sum(nullptr, bytes, x.data_ptr<float>(),
                                                 sums.data_ptr<float>(), segments, begin, begin + 1,
                                                 stream));
  auto scratch = torch::empty({static_cast<int64_t>(bytes)}, x.options().dtype(torch::kByte));
  C10_CUDA_CHECK(cub::DeviceSegmentedReduce::Sum(scratch.data_ptr(), bytes, x.data_ptr<float>(),
                                                 sums.data_ptr<float>(), segments, begin, begin + 1,
                                                 stream));
  return sums;
}
