// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/hopper_attention_forward.cuh"

namespace espalier::cuda::hopper {

template void launch_forward<BFloat16, 128>(const ForwardParams& params, void* stream);
template void launch_forward<Float16, 128>(const ForwardParams& params, void* stream);

}  // namespace espalier::cuda::hopper
