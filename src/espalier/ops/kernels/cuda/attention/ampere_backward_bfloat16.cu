// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/kernels/cuda/attention/ampere_backward.cuh"

namespace espalier::cuda::ampere {

template void launch_backward<BFloat16>(const BackwardParams&, int32_t, int, void*);
template void launch_queries<BFloat16>(const BackwardParams&, int32_t, void*);

}  // namespace espalier::cuda::ampere
