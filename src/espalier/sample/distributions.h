// SPDX-License-Identifier: Apache-2.0
// The distributions that the tokens of trajectories are drawn from, on shared trees.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

struct DistributionOptions {
  double temperature = 1;  // logits are divided by it
  bool entropies = false;
  int64_t top_k = 0;  // so many of the most likely tokens of each distribution, at most the vocabulary
};

/// Of N tokens, by flat index offsets[row] + position. The first token of a row has no distribution.
struct TokenDistributions {
  std::vector<double> logprobs;   // [N] of the tokens, natural log; NaN for first ones
  std::vector<double> entropies;  // [N] in nats, likewise; empty unless asked for
  /// [N] the row of `top_ids` and `top_logprobs` that predicts the token, which tokens on several branches
  /// share; -1 for first ones. Empty unless asked for.
  std::vector<int64_t> top_row;
  at::Tensor top_ids;       // [P, top_k] int64 on the host, as of top_logprobs (ops/edge_logprobs)
  at::Tensor top_logprobs;  // [P, top_k] float32 (float64 for float64)
};

/// Of a step with TermChoice::kAll. Each distribution is computed once, whatever the number of trajectories
/// through it.
TokenDistributions compute_distributions(const Decoder& decoder, const Trajectories& trajectories,
                                         const Step& step, const DistributionOptions& options,
                                         const MicroBatchProgress& progress = {});

}  // namespace espalier
