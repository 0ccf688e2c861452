// SPDX-License-Identifier: Apache-2.0
// Arrays on a GPU for tests without LibTorch.
#pragma once

#include <vector>

#include "espalier/ops/kernels/cuda/launch.cuh"

namespace espalier::testing {

inline bool has_hopper_gpu() {
  int count = 0;
  cudaDeviceProp properties{};
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
         cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.major == 9;
}

/// An array on the GPU.
template <class T>
class Array {
 public:
  explicit Array(const std::vector<T>& values) : size_(values.size()) {
    cuda::check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    cuda::check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(data_); }

  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> values() const {
    std::vector<T> result(size_);
    cuda::check(cudaMemcpy(result.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return result;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

}  // namespace espalier::testing
