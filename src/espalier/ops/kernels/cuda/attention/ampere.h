// SPDX-License-Identifier: Apache-2.0
// Launch functions of the mma.sync attention kernels, one per element and pass, compiled in parallel.
// `head_dim` is 64, 128 or 256.
#pragma once

#include "espalier/ops/kernels/cuda/attention/tree_attention_forward.h"
#include "espalier/ops/kernels/cuda/attention/tree_attention_queries.h"

namespace espalier::cuda::ampere {

/// Calls work.template operator()<head_dim>().
template <class Work>
auto for_head_dim(int32_t head_dim, const Work& work) {
  return head_dim == 64    ? work.template operator()<64>()
         : head_dim == 128 ? work.template operator()<128>()
                           : work.template operator()<256>();
}

#ifdef __CUDACC__
inline dim3 blocks(const AttentionGrid& grid) {
  return {static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z)};
}
#endif

template <class Element>
void launch_forward(const ForwardParams& params, int32_t head_dim, int32_t num_key_heads, void* stream);
/// Computes delta, then dK, dV and, unless `sums` is null, dQ.
template <class Element>
void launch_backward(const BackwardParams& params, int32_t head_dim, int stages, void* stream);
/// Computes dQ, with a separate schedule.
template <class Element>
void launch_queries(const BackwardParams& params, int32_t head_dim, void* stream);

}  // namespace espalier::cuda::ampere
