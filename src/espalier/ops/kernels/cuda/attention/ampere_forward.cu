// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/ampere.h"
#include "espalier/ops/kernels/cuda/launch.cuh"

namespace espalier::cuda::ampere {
namespace {

template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    attend_kernel(const __grid_constant__ ForwardParams params) {
  attend_tile<Tiles>(params);
}

}  // namespace

template <class Element>
void launch_forward(const ForwardParams& params, int32_t head_dim, int32_t num_key_heads, void* stream) {
  const AttentionGrid grid = forward_grid(params, num_key_heads);
  for_head_dim(head_dim, [&]<int kDim>() {
    using Tiles = ForwardTiles<Element, kDim>;
    launch("attend_tile", attend_kernel<Tiles>, {blocks(grid), Tiles::kThreads, Tiles::kSharedBytes, stream},
           params);
  });
}

template void launch_forward<BFloat16>(const ForwardParams&, int32_t, int32_t, void*);
template void launch_forward<Float16>(const ForwardParams&, int32_t, int32_t, void*);

}  // namespace espalier::cuda::ampere
