// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/hopper_attention_backward.cuh"

namespace espalier::cuda::hopper {

template void launch_backward<BFloat16, 128>(const BackwardParams& params, void* stream);
template void launch_backward<Float16, 128>(const BackwardParams& params, void* stream);

}  // namespace espalier::cuda::hopper
