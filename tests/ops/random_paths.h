// SPDX-License-Identifier: Apache-2.0
// Random forests as operators that walk along paths are given them.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "espalier/base/rng.h"
#include "espalier/ops/paths.h"

namespace espalier::testing {

struct RandomPaths {
  std::vector<int32_t> prev;
  std::vector<int64_t> ends;  // some tokens at which paths may go on, some inside a node, some twice
  int64_t num_contexts = 0;

  int64_t num_tokens() const { return static_cast<int64_t>(prev.size()); }
  at::Tensor prev_tensor() const { return at::tensor(prev, at::kInt); }
  at::Tensor ends_tensor() const { return at::tensor(ends, at::kLong); }

  /// The list as if it were one path.
  at::Tensor chain() const {
    const at::Tensor result = at::arange(-1, num_tokens() - 1, at::kInt);
    result[0] = prev[0];
    return result;
  }
};

/// 0, of which every input is part: autograd refuses gradients of what the result does not depend on, such as
/// contexts at which no path goes on.
inline at::Tensor zero_of(const std::vector<at::Tensor>& inputs, at::ScalarType dtype) {
  at::Tensor zero = at::zeros({}, dtype);
  for (const at::Tensor& input : inputs) zero = zero + 0 * input.sum().to(dtype);
  return zero;
}

enum class PathShape { kChain, kStar, kDeep, kWide, kSingleTokens, kMixed };
inline constexpr int kNumPathShapes = 6;

/// Up to max_nodes nodes of up to max_node_tokens tokens, at most six deep, in preorder; some roots go on
/// from one of up to two contexts.
inline RandomPaths random_paths(Rng& rng, int64_t max_nodes, int64_t max_node_tokens) {
  const auto shape = static_cast<PathShape>(rng.below(kNumPathShapes));
  RandomPaths paths;
  paths.num_contexts = rng.below(3);
  std::vector<int32_t> path;  // the last tokens of the nodes above the next one
  const int64_t num_nodes = shape == PathShape::kChain ? 1 : rng.between(2, max_nodes);
  for (int64_t node = 0; node < num_nodes; ++node) {
    int64_t keep = rng.between(0, static_cast<int64_t>(path.size()));
    if (shape == PathShape::kStar || shape == PathShape::kWide)
      keep = std::min<int64_t>(keep, 1 + rng.below(2));
    if (shape == PathShape::kDeep) keep = static_cast<int64_t>(path.size()) - rng.below(2);
    path.resize(std::clamp<int64_t>(keep, 0, std::min<int64_t>(5, static_cast<int64_t>(path.size()))));
    int32_t before = path.empty() ? detail::kPathBegins : path.back();
    if (path.empty() && paths.num_contexts > 0 && rng.below(3) > 0) {
      before = detail::continues(rng.below(paths.num_contexts));
    }
    const int64_t size = shape == PathShape::kSingleTokens ? 1 : rng.between(1, max_node_tokens);
    for (int64_t i = 0; i < size; ++i) {
      paths.prev.push_back(before);
      before = static_cast<int32_t>(paths.prev.size()) - 1;
      if (rng.below(8) == 0) paths.ends.push_back(before);
    }
    path.push_back(before);
    if (rng.below(2) == 0) paths.ends.push_back(before);
  }
  if (paths.ends.empty()) paths.ends.push_back(paths.num_tokens() - 1);
  return paths;
}

}  // namespace espalier::testing
