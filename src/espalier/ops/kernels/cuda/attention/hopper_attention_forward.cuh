// SPDX-License-Identifier: Apache-2.0
// For the files that compile forward attention.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention.cuh"

namespace espalier::cuda::hopper {

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    forward_tile_kernel(const __grid_constant__ ForwardParams params) {
  forward_tile<Element, kHeadDim>(params);
}

template <class Element, int kHeadDim>
void launch_forward(const ForwardParams& params, void* stream) {
  launch("forward_tile", &forward_tile_kernel<Element, kHeadDim>,
         {dim3(params.workers), kThreads, ForwardTiles<Element, kHeadDim>::kSharedBytes, stream}, params);
}

}  // namespace espalier::cuda::hopper
