// SPDX-License-Identifier: Apache-2.0
// The norm of a model's gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace espalier {

/// Euclidean norm of all gradients together, summed in float64; undefined ones count as zero. They are of one
/// device, which is waited for once.
double global_norm(std::vector<at::Tensor> gradients);

}  // namespace espalier
