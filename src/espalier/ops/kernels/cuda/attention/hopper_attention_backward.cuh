// SPDX-License-Identifier: Apache-2.0
// For the files that compile backward attention.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention.cuh"

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
    join_key_gradients_kernel(const __grid_constant__ BackwardParams params) {
  join_key_gradients<Element, kHeadDim>(params);
}
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kConsumers)
    finish_grad_q_kernel(const __grid_constant__ BackwardParams params) {
  finish_grad_q<Element, kHeadDim>(params);
}

template <class Element, int kHeadDim>
void launch_backward(const BackwardParams& params, void* stream) {
  const Grid by_tile = tile_grid(params), by_part = part_grid(params), by_key = cut_grid(params);
  const dim3 tiles(by_tile.x, by_tile.y), parts(by_part.x, by_part.y), keys(by_key.x, by_key.y);
  launch("prepare_backward", &prepare_backward_kernel<Element, kHeadDim>, {tiles, kRowThreads, 0, stream},
         params);
  const bool adds_queries = params.grad_q != nullptr;
  launch("backward_keys",
         adds_queries ? &backward_keys_kernel<Element, kHeadDim, true>
                      : &backward_keys_kernel<Element, kHeadDim, false>,
         {parts, kThreads, BackwardTiles<Element, kHeadDim>::kSharedBytes, stream}, params);
  launch("join_key_gradients", &join_key_gradients_kernel<Element, kHeadDim>, {keys, kConsumers, 0, stream},
         params);
  if (!adds_queries) return;
  launch("finish_grad_q", &finish_grad_q_kernel<Element, kHeadDim>, {tiles, kConsumers, 0, stream}, params);
}

}  // namespace espalier::cuda::hopper
