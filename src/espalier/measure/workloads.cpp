// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/workloads.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "espalier/data/builder.h"
#include "espalier/tree/synth.h"

namespace espalier {

Trajectories with_loss(const Csr<int32_t>& sequences, double loss_rate) {
  Trajectories trajectories;
  trajectories.offsets = Column<int64_t>(sequences.offsets);
  trajectories.input_ids = Column<int32_t>(sequences.values);
  std::vector<uint8_t> mask(sequences.values.size());
  for (int64_t r = 0; r < sequences.num_rows(); ++r) {
    const int64_t size = sequences.row_size(r);
    const int64_t trained = std::max<int64_t>(1, static_cast<int64_t>(loss_rate * static_cast<double>(size)));
    for (int64_t t = size - trained; t < size; ++t) mask[sequences.offsets[r] + t] = 1;
  }
  trajectories.loss_weights = Column<uint8_t>(std::move(mask));
  return trajectories;
}

Csr<int32_t> forest_of_ratio(const WorkloadSizes& sizes, double ratio, int64_t vocab_size) {
  SynthOptions synth;
  synth.vocab_size = vocab_size;
  synth.seed = sizes.seed;
  int64_t nodes = 0;
  if (ratio <= 1) {
    synth.num_trees = 4;
    synth.depth = 1;
    nodes = 4;
  } else {
    // With nodes of equal size, b branches give a ratio of about 2 b^2 / (1 + b) with three levels and b with
    // two. The margin allows for the sizes of leaves.
    synth.depth = 3;
    synth.branching = static_cast<int64_t>(std::ceil(0.75 * ratio)) + 1;
    nodes = 1 + synth.branching + synth.branching * synth.branching;
    if (nodes * 8 > sizes.tree_tokens) {
      synth.depth = 2;
      synth.branching = static_cast<int64_t>(std::ceil(2 * ratio));
      nodes = 1 + synth.branching;
    }
    synth.target_cached_token_ratio = ratio;
  }
  synth.node_length = std::max<int64_t>(2, sizes.tree_tokens / nodes);
  return synthesize(synth);
}

Csr<int32_t> forest_of_por(const WorkloadSizes& sizes, double por, int64_t vocab_size) {
  SynthOptions synth;
  synth.depth = 2;
  synth.branching = sizes.leaves;
  const double tree_tokens = static_cast<double>(sizes.flat_tokens) * (1 - por);
  synth.node_length = std::max<int64_t>(2, std::llround(tree_tokens / static_cast<double>(1 + sizes.leaves)));
  synth.fixed_node_length = true;
  synth.vocab_size = vocab_size;
  synth.target_por = por;
  synth.seed = sizes.seed;
  return synthesize(synth);
}

Csr<int32_t> branching_rollouts(const WorkloadSizes& sizes, int64_t depth, int64_t branching,
                                int64_t vocab_size) {
  SynthOptions synth;
  synth.depth = depth;
  synth.branching = branching;
  int64_t nodes = 0;
  for (int64_t level = 0, width = 1; level < depth; ++level, width *= branching) nodes += width;
  synth.node_length = std::max<int64_t>(2, sizes.agent_tokens / nodes);
  synth.end_inside = 0.5;
  synth.vocab_size = vocab_size;
  synth.seed = sizes.seed;
  return synthesize(synth);
}

Csr<int32_t> conversation(const WorkloadSizes& sizes, int64_t vocab_size) {
  constexpr int64_t kTurns = 12;
  Rng rng(sizes.seed, 0xc0);
  const int64_t length = std::max<int64_t>(2, sizes.agent_tokens / (3 * kTurns));
  std::vector<int32_t> path;
  const auto extend = [&](std::vector<int32_t> tokens, int64_t first_token) {
    tokens.push_back(static_cast<int32_t>(first_token));
    for (int64_t t = 1; t < length; ++t) tokens.push_back(static_cast<int32_t>(rng.below(vocab_size)));
    return tokens;
  };
  Csr<int32_t> rows;
  for (int64_t turn = 0; turn < kTurns; ++turn) {
    path = extend(std::move(path), rng.below(vocab_size));
    rows.push_row(extend(path, 0));
    path = extend(std::move(path), 1);
    rows.push_row(path);
  }
  return rows;
}

Trajectories merge_append_only(const Trajectories& trajectories, const Forest& forest) {
  ESPALIER_ASSERT(forest.num_trajectories() == trajectories.num_rows());
  const std::vector<int64_t> first_leaf = first_leaves(forest);
  std::vector<TrajectoryRow> row_of_leaf(forest.num_nodes());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const int64_t leaf = first_leaf[forest.end_node[row]];
    TrajectoryRow& merged = row_of_leaf[leaf];
    merged.loss_weights.resize(forest.position[leaf] + forest.node_size(leaf));
    const auto tokens = trajectories.row(row);
    if (forest.end_node[row] == leaf) merged.input_ids.assign(tokens.begin(), tokens.end());
    for (int64_t t = 0; t < std::ssize(tokens); ++t) {
      merged.loss_weights[t] += trajectories.loss_weights[trajectories.offsets[row] + t];
    }
  }
  TrajectoriesBuilder builder;
  for (const TrajectoryRow& row : row_of_leaf) {
    if (!row.input_ids.empty()) builder.append(row);
  }
  return builder.finish();
}

}  // namespace espalier
