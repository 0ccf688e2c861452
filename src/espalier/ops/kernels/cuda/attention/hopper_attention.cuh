// SPDX-License-Identifier: Apache-2.0
// Launches of the kernels for Hopper, by element and head dimension; each is compiled in a separate file.
#pragma once

#include "espalier/ops/kernels/cuda/attention/hopper_attention_queries.h"
#include "espalier/ops/kernels/cuda/launch.cuh"

namespace espalier::cuda::hopper {

template <class Element, int kHeadDim>
void launch_forward(const ForwardParams& params, void* stream);
/// Including the kernels before and after.
template <class Element, int kHeadDim>
void launch_backward(const BackwardParams& params, void* stream);
template <class Element, int kHeadDim>
void launch_queries(const QueryGradientParams& params, void* stream);

}  // namespace espalier::cuda::hopper
