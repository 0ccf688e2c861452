// SPDX-License-Identifier: Apache-2.0
// Weights prepared once for many passes with few rows.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/kept_weights.h"
#include "espalier/ops/gemm/prepared_weight.h"

namespace espalier::accumulating {

/// While it lives, linears (model/gradient_accumulation.h) multiply by weights that are made ready once
/// (ops/gemm/prepared_weight.h): a pass of a few rows would otherwise take most of its time for that. One
/// that has changed is made ready anew. For passes without gradients, in the thread that made it.
using PreparedWeights =
    detail::ScopedValue<KeptWeights<detail::PreparedWeight, detail::Scope::kPreparedWeights>>;

/// The prepared form of a weight [N, K]; null without PreparedWeights.
const detail::PreparedWeight* prepared(const at::Tensor& weight);

/// Logits hidden weight^T [T, V] of the LM head, in the accumulator dtype. Runs without autograd.
at::Tensor head_logits(const at::Tensor& hidden, const at::Tensor& weight);

}  // namespace espalier::accumulating
