// SPDX-License-Identifier: Apache-2.0
#include "espalier/sample/prompts.h"

#include <algorithm>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"

namespace espalier {

int64_t prompt_size(const Trajectories& trajectories, int64_t row) {
  const int64_t begin = trajectories.offsets[row], size = trajectories.row_size(row);
  for (int64_t t = 0; t < size; ++t) {
    if (trajectories.loss_weights[begin + t] > 0) return t == 0 ? size : t;
  }
  return size;
}

Trajectories prompts_of(const Trajectories& trajectories, bool whole_rows) {
  TrajectoriesBuilder builder;
  TrajectoryRow prompt;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    int64_t size = prompt_size(trajectories, row);
    if (whole_rows && size < trajectories.row_size(row)) {
      ESPALIER_CHECK(
          trajectories.logprobs.has(row),
          "trajectory {}: field `logprobs`: expected log-probabilities of its tokens with loss, which "
          "the rows that continue it keep, received none",
          trajectories.name(row));
      size = trajectories.row_size(row);
    }
    const auto tokens = trajectories.row(row).first(size);
    prompt.input_ids.assign(tokens.begin(), tokens.end());
    builder.append(prompt);
  }
  return builder.finish();
}

namespace {

/// Number of tokens shared by the root paths of two nodes.
int64_t shared_tokens(const Forest& forest, int64_t a, int64_t b) {
  const std::vector<int64_t> first = root_path(forest, a), second = root_path(forest, b);
  int64_t tokens = 0;
  for (size_t i = 0; i < std::min(first.size(), second.size()) && first[i] == second[i]; ++i) {
    tokens += forest.node_size(first[i]);
  }
  return tokens;
}

}  // namespace

std::vector<std::vector<int64_t>> prompt_groups(const Forest& forest, int64_t token_budget) {
  std::vector<int64_t> order(forest.num_trajectories());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return forest.end_node[a] < forest.end_node[b]; });
  std::vector<std::vector<int64_t>> groups;
  int64_t tokens = 0;
  for (const int64_t r : order) {
    const int64_t size = forest.trajectory_size(r);
    // In preorder a path shares its longest prefix with the path just before it.
    const int64_t added = groups.empty() ? size
                                         : size - shared_tokens(forest, forest.end_node[groups.back().back()],
                                                                forest.end_node[r]);
    if (groups.empty() || tokens + added > token_budget) {
      groups.emplace_back();
      tokens = size;
    } else {
      tokens += added;
    }
    groups.back().push_back(r);
  }
  return groups;
}

}  // namespace espalier
