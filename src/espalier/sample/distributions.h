// SPDX-License-Identifier: Apache-2.0
// The next-token distributions at the tokens of trajectories, computed on trees.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

struct DistributionOptions {
  double temperature = 1;            // logits are divided by it, unless at_row_temperatures
  bool at_row_temperatures = false;  // divide by Trajectories::logit_temperature; top_k is of logits that are
                                     // not divided
  bool entropies = false;
  int64_t top_k = 0;  // most likely tokens kept per distribution; at most the vocabulary size
};

/// Results for N tokens, by flat index offsets[row] + position. The first token of a row has no distribution.
struct TokenDistributions {
  std::vector<double> logprobs;   // [N] natural log; 0 for first tokens
  std::vector<double> entropies;  // [N] in nats, likewise; empty unless requested
  /// [N] the row of `top_ids` and `top_logprobs` that predicts the token; tokens on several branches may
  /// share a row; -1 for first tokens. Empty unless requested.
  std::vector<int64_t> top_row;
  at::Tensor top_ids;       // [P, top_k] int64 on the host, see top_logprobs (ops/edge_logprobs)
  at::Tensor top_logprobs;  // [P, top_k] float64
};

/// The most likely tokens [N, top_k] of each token's distribution; -1 and 0 for first tokens.
struct TopTokens {
  std::vector<int32_t> ids;
  std::vector<double> logprobs;
};
TopTokens top_tokens(const TokenDistributions& distributions);

/// `step` must be made with TermChoice::kAll. Each distribution is computed once, however many trajectories
/// share it. Ranks divide the work as those of compute_logprobs do.
TokenDistributions compute_distributions(const Decoder& decoder, const Trajectories& trajectories,
                                         const Step& step, const DistributionOptions& options,
                                         const MicroBatchProgress& progress = {},
                                         const Group& group = alone());

}  // namespace espalier
