// SPDX-License-Identifier: Apache-2.0
// The norm of a model's gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace espalier {

/// L2 norm over all gradients, summed in float64; undefined ones count as zero. All must be on one device,
/// which is synchronised once.
double global_norm(std::vector<at::Tensor> gradients);

}  // namespace espalier
