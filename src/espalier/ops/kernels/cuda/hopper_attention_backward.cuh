// SPDX-License-Identifier: Apache-2.0
// For the files that compile backward attention.
#pragma once

#include "espalier/ops/kernels/cuda/hopper_attention.cuh"

namespace espalier::cuda::hopper {

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kRowThreads)
    prepare_backward_kernel(const __grid_constant__ BackwardParams params) {
  prepare_backward<Element, kHeadDim>(params);
}
template <class Element, int kHeadDim, bool kAddsQueries>
__global__ void __launch_bounds__(kThreads, 1)
    backward_keys_kernel(const __grid_constant__ BackwardParams params) {
  backward_keys<Element, kHeadDim, kAddsQueries>(params);
}
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kConsumers)
    finish_grad_q_kernel(const __grid_constant__ BackwardParams params) {
  finish_grad_q<Element, kHeadDim>(params);
}

template <class Element, int kHeadDim>
void launch_backward(const BackwardParams& params, void* stream) {
  const Grid by_tile = tile_grid(params), by_key = key_grid(params);
  const dim3 tiles(by_tile.x, by_tile.y), keys(by_key.x, by_key.y);
  launch("prepare_backward", &prepare_backward_kernel<Element, kHeadDim>, {tiles, kRowThreads, 0, stream},
         params);
  const Launch by_keys{keys, kThreads, BackwardTiles<Element, kHeadDim>::kSharedBytes, stream};
  if (params.grad_q == nullptr) {
    launch("backward_keys", &backward_keys_kernel<Element, kHeadDim, false>, by_keys, params);
    return;
  }
  launch("backward_keys", &backward_keys_kernel<Element, kHeadDim, true>, by_keys, params);
  launch("finish_grad_q", &finish_grad_q_kernel<Element, kHeadDim>, {tiles, kConsumers, 0, stream}, params);
}

}  // namespace espalier::cuda::hopper
