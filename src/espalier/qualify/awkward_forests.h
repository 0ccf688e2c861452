// SPDX-License-Identifier: Apache-2.0
// Forests on which kernels go wrong first: small, and of every shape that has a border of its own.
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
  int64_t period = 0;  // keys and values repeat after so many tokens; 0: they do not
  // Of the softmax: queries are multiplied by it. Backward computes probabilities again from scores and their
  // log-sum-exp, and errs by the rounding of both, so that far sharper ones say nothing in float32.
  double sharpness = 1;

  int64_t num_tokens() const { return static_cast<int64_t>(subtree_end.size()); }
};

/// Always the same: one token, a chain, a star, nodes of single tokens, deep and wide trees, trajectories
/// that end inside, several trees, lengths at the borders of tiles, equal keys, a sharp softmax, and context
/// from ancestors: of all tokens, of some, nested, and with keys that nobody sees.
std::vector<AwkwardForest> awkward_forests();

}  // namespace espalier::qualify
