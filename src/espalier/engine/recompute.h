// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing: a function whose activations are computed again in the backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace espalier {

/// Any number of results of one input.
using Recomputed = std::function<std::vector<at::Tensor>(const at::Tensor& input)>;

/// The results of `function(input)`, of which only `input` is kept: the backward pass calls `function` again,
/// under the same parameters, and goes through that (Chen et al., "Training Deep Nets with Sublinear Memory
/// Cost", 2016). `function` must be deterministic. Leaf tensors that it captures receive their gradients.
std::vector<at::Tensor> recompute(const at::Tensor& input, Recomputed function);

}  // namespace espalier
