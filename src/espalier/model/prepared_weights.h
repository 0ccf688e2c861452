// SPDX-License-Identifier: Apache-2.0
// Weights prepared once for many passes with few rows.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/ops/gemm/prepared_weight.h"

namespace espalier::accumulating {

/// While an instance exists, linear maps (model/gradient_accumulation.h) use weights prepared once
/// (ops/gemm/prepared_weight.h), which would otherwise dominate the time of passes with few rows. A weight
/// that has changed is prepared again. For passes without gradients, in the thread that created it; at most
/// one per thread.
class PreparedWeights {
 public:
  PreparedWeights();
  ~PreparedWeights();
  PreparedWeights(const PreparedWeights&) = delete;
  PreparedWeights& operator=(const PreparedWeights&) = delete;
};

/// The prepared form of a weight [N, K]; null without PreparedWeights.
const detail::PreparedWeight* prepared(const at::Tensor& weight);

/// Logits hidden weight^T [T, V] of the LM head, in the accumulator dtype. Runs without autograd.
at::Tensor head_logits(const at::Tensor& hidden, const at::Tensor& weight);

}  // namespace espalier::accumulating
