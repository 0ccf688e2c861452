// SPDX-License-Identifier: Apache-2.0
// Definitions for the .cu files, one per element.
#pragma once

#include "espalier/ops/kernels/cuda/attention/ampere.h"
#include "espalier/ops/kernels/cuda/launch.cuh"

namespace espalier::cuda::ampere {

template <class Element, int kDim>
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(const __grid_constant__ BackwardParams params) {
  attention_delta<Element, kDim>(params);
}
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, 1)
    keys_kernel(const __grid_constant__ BackwardParams params) {
  attend_keys<Tiles>(params);
}
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    join_kernel(const __grid_constant__ BackwardParams params) {
  join_keys<Tiles>(params);
}
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    sums_kernel(const __grid_constant__ BackwardParams params) {
  sums_to_queries<Tiles>(params);
}
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    queries_kernel(const __grid_constant__ BackwardParams params) {
  attend_queries<Tiles>(params);
}

template <class Tiles>
void launch_keys(const BackwardParams& params, void* stream) {
  if (params.sums != nullptr) {
    const int64_t bytes =
        num_sums<Tiles>(params.schedule, params.packing, params.num_heads) * int64_t{sizeof(float)};
    check(cudaMemsetAsync(params.sums, 0, bytes, static_cast<cudaStream_t>(stream)), "sums of dQ");
  }
  launch("attend_keys", keys_kernel<Tiles>,
         {blocks(parts_grid(params)), Tiles::kThreads, Tiles::kSharedBytes, stream}, params);
  launch("join_keys", join_kernel<Tiles>,
         {blocks(join_grid(params)), Tiles::kThreads, kJoinSharedBytes<Tiles>, stream}, params);
  if (params.sums == nullptr) return;
  launch("sums_to_queries", sums_kernel<Tiles>,
         {blocks(sums_grid(params)), Tiles::kThreads, kSumsSharedBytes<Tiles>, stream}, params);
}

template <class Element>
void launch_backward(const BackwardParams& params, int32_t head_dim, int stages, void* stream) {
  for_head_dim(head_dim, [&]<int kDim>() {
    const AttentionGrid rows{
        static_cast<int32_t>(delta_grid<kDim>(params.schedule.inputs.num_tokens, params.num_heads)), 1, 1};
    launch("attention_delta", delta_kernel<Element, kDim>, {blocks(rows), kDeltaThreads, 0, stream}, params);
    if (kDim == 256 && stages == 1) {
      launch_keys<BackwardTiles<Element, 256, 1>>(params, stream);
    } else {
      launch_keys<BackwardTiles<Element, kDim, 2>>(params, stream);
    }
  });
}

template <class Element>
void launch_queries(const BackwardParams& params, int32_t head_dim, void* stream) {
  for_head_dim(head_dim, [&]<int kDim>() {
    using Tiles = QueryGradientTiles<Element, kDim>;
    launch("attend_queries", queries_kernel<Tiles>,
           {blocks(queries_grid(params)), Tiles::kThreads, Tiles::kSharedBytes, stream}, params);
  });
}

}  // namespace espalier::cuda::ampere
