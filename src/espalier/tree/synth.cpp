// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/synth.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"

namespace espalier {
namespace {

constexpr int64_t kMaxNodes = 100'000'000;
constexpr double kTolerance = 0.02;  // of flat / tree
enum Stream : uint64_t { kShapeStream, kEndStream, kLengthStream, kTokenStream };

struct SynthNode {
  int64_t parent;
  int64_t depth;  // 1 at a root
  int32_t first_token;
  bool leaf;
  int64_t ends = 0;          // trajectories that end here
  int64_t multiplicity = 0;  // trajectories that pass through or end here
  int64_t size = 0;          // tokens
};

void check_probability(const char* name, double value) {
  ESPALIER_CHECK(value >= 0 && value <= 1, "synth: {}: expected a probability in [0, 1], received {}", name,
                 value);
}

void check_at_least_one(const char* name, int64_t value) {
  ESPALIER_CHECK(value >= 1, "synth: {}: expected at least 1, received {}", name, value);
}

void check_options(const SynthOptions& options) {
  check_at_least_one("num_trees", options.num_trees);
  check_at_least_one("depth", options.depth);
  check_at_least_one("branching", options.branching);
  check_at_least_one("node_length", options.node_length);
  check_probability("end_inside", options.end_inside);
  check_probability("duplicate", options.duplicate);
  ESPALIER_CHECK(
      options.first_token >= 0 && options.first_token < options.vocab_size &&
          options.vocab_size <= int64_t{1} << 31,
      "synth: expected 0 <= first_token < vocab_size <= 2^31, received first_token {} and vocab_size {}",
      options.first_token, options.vocab_size);
  const int64_t ids = options.vocab_size - options.first_token;
  ESPALIER_CHECK(
      options.num_trees <= ids,
      "synth: num_trees: expected at most {} (trees differ in their first token, which is one of [{}, "
      "{})), received {}",
      ids, options.first_token, options.vocab_size, options.num_trees);
  ESPALIER_CHECK(
      options.depth == 1 || options.branching <= ids,
      "synth: branching: expected at most {} (siblings differ in their first token, which is one of "
      "[{}, {})), received {}",
      ids, options.first_token, options.vocab_size, options.branching);
  ESPALIER_CHECK(options.target_cached_token_ratio == -1 || options.target_cached_token_ratio >= 1,
                 "synth: target_cached_token_ratio: expected at least 1, or -1 for none, received {}",
                 options.target_cached_token_ratio);
}

int64_t count_nodes(const SynthOptions& options) {
  int64_t level = options.num_trees, total = 0;
  for (int64_t d = 1; d <= options.depth && total <= kMaxNodes; ++d) {
    total += level;
    if (level > kMaxNodes / options.branching && d < options.depth) total = kMaxNodes + 1;
    level *= options.branching;
  }
  ESPALIER_CHECK(total <= kMaxNodes,
                 "synth: {} trees of depth {} and branching {}: expected at most {} nodes, received more",
                 options.num_trees, options.depth, options.branching, kMaxNodes);
  return total;
}

/// Draws sets of distinct token ids: the first steps of a Fisher-Yates shuffle of all ids.
class DistinctTokens {
 public:
  DistinctTokens(const SynthOptions& options, Rng rng)
      : pool_(options.vocab_size - options.first_token), rng_(rng) {
    std::iota(pool_.begin(), pool_.end(), static_cast<int32_t>(options.first_token));
  }

  std::span<const int32_t> draw(int64_t count) {
    const auto size = static_cast<int64_t>(pool_.size());
    for (int64_t k = 0; k < count; ++k) std::swap(pool_[k], pool_[rng_.between(k, size - 1)]);
    return {pool_.data(), static_cast<size_t>(count)};
  }

 private:
  std::vector<int32_t> pool_;
  Rng rng_;
};

/// The nodes in preorder, without lengths.
std::vector<SynthNode> draw_shape(const SynthOptions& options) {
  std::vector<SynthNode> nodes, stack;
  nodes.reserve(count_nodes(options));
  DistinctTokens distinct(options, Rng(options.seed, kShapeStream));
  const auto push_children = [&](int64_t parent, int64_t depth, int64_t count) {
    for (const int32_t token : distinct.draw(count)) {
      stack.push_back(
          {.parent = parent, .depth = depth, .first_token = token, .leaf = depth == options.depth});
    }
  };
  push_children(-1, 1, options.num_trees);
  while (!stack.empty()) {
    nodes.push_back(stack.back());
    stack.pop_back();
    if (!nodes.back().leaf) {
      push_children(static_cast<int64_t>(nodes.size()) - 1, nodes.back().depth + 1, options.branching);
    }
  }
  return nodes;
}

void draw_ends(const SynthOptions& options, std::vector<SynthNode>& nodes) {
  Rng rng(options.seed, kEndStream);
  for (SynthNode& node : nodes) {
    if (node.leaf || rng.uniform() < options.end_inside)
      node.ends = rng.uniform() < options.duplicate ? 2 : 1;
    node.multiplicity = node.ends;
  }
  for (auto n = static_cast<int64_t>(nodes.size()) - 1; n >= 0; --n) {
    if (nodes[n].parent >= 0) nodes[nodes[n].parent].multiplicity += nodes[n].multiplicity;
  }
}

void draw_lengths(const SynthOptions& options, std::vector<SynthNode>& nodes) {
  Rng rng(options.seed, kLengthStream);
  const int64_t low = options.fixed_node_length ? options.node_length : (options.node_length + 1) / 2;
  const int64_t high = 2 * options.node_length - low;
  for (SynthNode& node : nodes) node.size = rng.between(low, high);
}

/// Scales lengths so that inner nodes hold a given share of the tree tokens.
class LengthScaling {
 public:
  explicit LengthScaling(std::vector<SynthNode>& nodes) : nodes_(nodes) {
    for (const SynthNode& node : nodes) {
      base_.push_back(static_cast<double>(node.size));
      (node.leaf ? leaf_base_ : inner_base_) += base_.back();
      ++(node.leaf ? num_leaves_ : num_inner_);
    }
  }

  double total() const { return inner_base_ + leaf_base_; }
  double lowest_share() const { return static_cast<double>(num_inner_) / total(); }
  double highest_share() const {
    return num_inner_ == 0 ? 0 : 1 - static_cast<double>(num_leaves_) / total();
  }

  /// Sets the lengths and returns flat / tree.
  double apply(double inner_share) {
    const double inner_scale = inner_base_ > 0 ? inner_share * total() / inner_base_ : 0;
    const double leaf_scale = (1 - inner_share) * total() / leaf_base_;
    int64_t flat = 0, tree = 0;
    for (size_t n = 0; n < nodes_.size(); ++n) {
      SynthNode& node = nodes_[n];
      node.size = std::max<int64_t>(1, std::llround(base_[n] * (node.leaf ? leaf_scale : inner_scale)));
      flat += node.size * node.multiplicity;
      tree += node.size;
    }
    return static_cast<double>(flat) / static_cast<double>(tree);
  }

 private:
  std::vector<SynthNode>& nodes_;
  std::vector<double> base_;
  double inner_base_ = 0, leaf_base_ = 0;
  int64_t num_inner_ = 0, num_leaves_ = 0;
};

void meet_target(const SynthOptions& options, std::vector<SynthNode>& nodes) {
  const double target = options.target_cached_token_ratio;
  LengthScaling scaling(nodes);
  double low = scaling.lowest_share(), high = scaling.highest_share();
  const double lowest = scaling.apply(low), highest = scaling.apply(high);
  double best_share = std::abs(lowest - target) < std::abs(highest - target) ? low : high;
  double best = scaling.apply(best_share);
  constexpr int kSteps = 60;  // of bisection: the ratio grows with the share of the inner nodes
  for (int step = 0; step < kSteps && std::abs(best - target) > 1e-6 * target; ++step) {
    const double share = (low + high) / 2;
    const double ratio = scaling.apply(share);
    (ratio < target ? low : high) = share;
    if (std::abs(ratio - target) < std::abs(best - target)) {
      best = ratio;
      best_share = share;
    }
  }
  scaling.apply(best_share);
  ESPALIER_CHECK(
      std::abs(best - target) <= kTolerance * target,
      "synth: target_cached_token_ratio: expected a value that trees of depth {}, branching {} and mean node "
      "length {} reach, in [{:.4g}, {:.4g}] (nearest {:.4g}), received {}",
      options.depth, options.branching, options.node_length, lowest, highest, best, target);
}

Csr<int32_t> emit(const SynthOptions& options, const std::vector<SynthNode>& nodes) {
  Rng rng(options.seed, kTokenStream);
  Csr<int32_t> rows;
  std::vector<int64_t> position(nodes.size());
  std::vector<int32_t> path;  // tokens from the root to the current node
  for (size_t n = 0; n < nodes.size(); ++n) {
    const SynthNode& node = nodes[n];
    position[n] = node.parent < 0 ? 0 : position[node.parent] + nodes[node.parent].size;
    path.resize(position[n]);
    path.push_back(node.first_token);
    for (int64_t t = 1; t < node.size; ++t) {
      path.push_back(static_cast<int32_t>(rng.between(options.first_token, options.vocab_size - 1)));
    }
    for (int64_t k = 0; k < node.ends; ++k) rows.push_row(path);
  }
  return rows;
}

}  // namespace

Csr<int32_t> synthesize(const SynthOptions& options) {
  check_options(options);
  std::vector<SynthNode> nodes = draw_shape(options);
  draw_ends(options, nodes);
  draw_lengths(options, nodes);
  if (options.target_cached_token_ratio != -1) meet_target(options, nodes);
  return emit(options, nodes);
}

}  // namespace espalier
