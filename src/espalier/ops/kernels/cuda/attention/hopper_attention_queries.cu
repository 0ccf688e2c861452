// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/hopper_attention.cuh"

namespace espalier::cuda::hopper {
namespace {

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    backward_queries_kernel(const __grid_constant__ QueryGradientParams params) {
  backward_queries<Element, kHeadDim>(params);
}

}  // namespace

template <class Element, int kHeadDim>
void launch_queries(const QueryGradientParams& params, void* stream) {
  launch("backward_queries", &backward_queries_kernel<Element, kHeadDim>,
         {dim3(params.order.blocks()), kThreads, QueryGradientTiles<Element, kHeadDim>::kSharedBytes, stream},
         params);
}

template void launch_queries<BFloat16, 64>(const QueryGradientParams& params, void* stream);
template void launch_queries<Float16, 64>(const QueryGradientParams& params, void* stream);
template void launch_queries<BFloat16, 128>(const QueryGradientParams& params, void* stream);
template void launch_queries<Float16, 128>(const QueryGradientParams& params, void* stream);
template void launch_queries<BFloat16, 256>(const QueryGradientParams& params, void* stream);
template void launch_queries<Float16, 256>(const QueryGradientParams& params, void* stream);

}  // namespace espalier::cuda::hopper
