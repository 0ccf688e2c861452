// SPDX-License-Identifier: Apache-2.0
// Small forests with edge cases for attention kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace espalier::qualify {

struct AwkwardForest {
  std::string name{};
  std::vector<int32_t> subtree_end{};  // of a forest in preorder
  // Context (ops/attention/tree_attention.h): tokens of each segment, and blocks of five numbers.
  std::vector<int64_t> segment_sizes{};
  std::vector<int64_t> context_blocks{};
  int64_t period = 0;  // period of keys and values in tokens; 0: none
  // Factor of queries. Larger values are not useful in float32, since backward recomputes probabilities from
  // rounded scores and log-sum-exp.
  double sharpness = 1;

  int64_t num_tokens() const { return static_cast<int64_t>(subtree_end.size()); }
};

/// Deterministic: one token, a chain, a star, nodes of single tokens, deep and wide trees, trajectories that
/// end inside, several trees, lengths at the borders of tiles, equal keys, a sharp softmax, and context from
/// ancestors: for all tokens, for some, nested, and with keys that are not visible.
std::vector<AwkwardForest> awkward_forests();

}  // namespace espalier::qualify
