// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing: activations are recomputed in the backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace espalier {

/// A function of one tensor with any number of results.
using Recomputed = std::function<std::vector<at::Tensor>(const at::Tensor& input)>;

/// Returns `function(input)` and saves only `input`: the backward pass calls `function` again, with the same
/// parameters, and runs backward through it (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
/// 2016). `function` must be deterministic. Leaf tensors that it captures receive their gradients.
std::vector<at::Tensor> recompute(const at::Tensor& input, Recomputed function);

}  // namespace espalier
