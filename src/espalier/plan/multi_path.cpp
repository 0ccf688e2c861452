// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/multi_path.h"

#include <algorithm>
#include <numeric>

#include "espalier/base/check.h"

namespace espalier {
namespace {

constexpr int64_t kMaxLoads = 64;  // bits of Combiner::used_
constexpr size_t kPruneFirstAt = 10'000;

/// Where a load of a combined state comes from: indices of loads, -1 for none.
struct Origin {
  int32_t left;   // in the state of the children combined so far
  int32_t right;  // in the child's state
};

struct State {
  int64_t begin;  // of its loads and origins in the layer
  int32_t count;
  int32_t left, right;  // the states that it combines; left is -1 at the first child
  int64_t sum;          // of its loads
};

/// The states of one node, or of its children combined so far.
struct Layer {
  std::vector<State> states;
  std::vector<int64_t> loads;
  std::vector<Origin> origins;

  const int64_t* loads_of(const State& s) const { return loads.data() + s.begin; }
};

/// Orders states by the number of loads, their sum, the loads themselves and age. A state that dominates
/// another one comes before it in this order.
bool precedes(const Layer& layer, const State& a, const State& b) {
  if (a.count != b.count) return a.count < b.count;
  if (a.sum != b.sum) return a.sum < b.sum;
  const int64_t *x = layer.loads_of(a), *y = layer.loads_of(b);
  for (int32_t k = 0; k < a.count; ++k) {
    if (x[k] != y[k]) return x[k] < y[k];
  }
  return a.begin < b.begin;
}

bool dominates(const Layer& layer, const State& a, const State& b) {
  if (a.sum > b.sum) return false;
  const int64_t *x = layer.loads_of(a), *y = layer.loads_of(b);
  for (int32_t k = 0; k < a.count; ++k) {
    if (x[k] > y[k]) return false;
  }
  return true;
}

/// Combines the states of one child with those of the children before it.
class Combiner {
 public:
  struct Limits {
    int64_t max_load;    // of a part below the node, without the node itself
    int64_t path;        // L(node)
    int64_t elsewhere;   // tokens that are neither on the root path nor in the children combined
    int64_t cost_bound;  // states with a larger lower bound are dropped
  };

  Combiner(const Layer* left, const Layer& right, const Limits& limits, int64_t& work_left)
      : left_(left), right_(right), limits_(limits), work_left_(work_left) {}

  /// False when the work ran out.
  bool run() {
    const auto num_left = left_ ? static_cast<int32_t>(left_->states.size()) : 1;
    for (int32_t l = 0; l < num_left; ++l) {
      for (int32_t r = 0; r < static_cast<int32_t>(right_.states.size()); ++r) {
        if (!begin_pair(l, r)) continue;
        place(0);
        if (work_left_ <= 0) return false;
      }
    }
    return prune();
  }

  Layer take() { return std::move(out_); }

 private:
  bool begin_pair(int32_t l, int32_t r) {
    --work_left_;
    pair_left_ = left_ ? l : -1;
    pair_right_ = r;
    const State none{0, 0, -1, -1, 0};
    const State& a = left_ ? left_->states[l] : none;
    const State& b = right_.states[r];
    num_left_ = a.count;
    num_right_ = b.count;
    sum_ = a.sum + b.sum;
    left_loads_ = left_ ? left_->loads_of(a) : nullptr;
    right_loads_ = right_.loads_of(b);
    max_count_ = (limits_.cost_bound - sum_ - limits_.elsewhere) / limits_.path;
    used_ = 0;
    alone_ = 0;
    choice_.assign(num_right_, -1);
    return sum_ + limits_.elsewhere + limits_.path <= limits_.cost_bound && num_left_ <= max_count_ &&
           num_right_ <= max_count_;
  }

  /// Chooses a load to join (or none) for the child's load j, then for the loads after it.
  void place(int32_t j) {
    if (--work_left_ <= 0) return;
    if (j == num_right_) return emit();
    const bool repeats = j > 0 && right_loads_[j] == right_loads_[j - 1];
    // Choices for equal loads of the child ascend, with "none" last. Other orders are permutations of these.
    const int32_t first = !repeats ? 0 : choice_[j - 1] < 0 ? num_left_ : choice_[j - 1] + 1;
    int64_t tried = -1;
    for (int32_t i = first; i < num_left_; ++i) {
      if (used_ >> i & 1 || left_loads_[i] == tried || left_loads_[i] + right_loads_[j] > limits_.max_load)
        continue;
      tried = left_loads_[i];
      used_ |= uint64_t{1} << i;
      choice_[j] = i;
      place(j + 1);
      used_ &= ~(uint64_t{1} << i);
    }
    if (num_left_ + alone_ + 1 > max_count_) return;
    if (num_left_ + alone_ + 1 > kMaxLoads) {
      work_left_ = 0;
      return;
    }
    ++alone_;
    choice_[j] = -1;
    place(j + 1);
    --alone_;
  }

  void emit() {
    scratch_.clear();
    for (int32_t i = 0; i < num_left_; ++i) scratch_.push_back({left_loads_[i], {i, -1}});
    for (int32_t j = 0; j < num_right_; ++j) {
      if (choice_[j] < 0) {
        scratch_.push_back({right_loads_[j], {-1, j}});
      } else {
        scratch_[choice_[j]].load += right_loads_[j];
        scratch_[choice_[j]].origin.right = j;
      }
    }
    // Insertion sort, because there are few entries, nearly in order. It keeps the order of equal loads.
    for (size_t k = 1; k < scratch_.size(); ++k) {
      for (size_t at = k; at > 0 && scratch_[at - 1].load < scratch_[at].load; --at) {
        std::swap(scratch_[at - 1], scratch_[at]);
      }
    }
    out_.states.push_back({static_cast<int64_t>(out_.loads.size()), static_cast<int32_t>(scratch_.size()),
                           pair_left_, pair_right_, sum_});
    for (const auto& entry : scratch_) {
      out_.loads.push_back(entry.load);
      out_.origins.push_back(entry.origin);
    }
    if (out_.states.size() < prune_at_) return;
    prune();
    prune_at_ = 2 * out_.states.size() + kPruneFirstAt;
  }

  /// Drops dominated states.
  bool prune() {
    if (out_.states.size() < 2) return true;
    std::vector<State> kept;
    std::sort(out_.states.begin(), out_.states.end(),
              [&](const State& a, const State& b) { return precedes(out_, a, b); });
    for (const State& s : out_.states) {
      work_left_ -= static_cast<int64_t>(kept.size()) / 8;
      if (work_left_ <= 0) return false;
      if (std::none_of(kept.begin(), kept.end(), [&](const State& k) { return dominates(out_, k, s); })) {
        kept.push_back(s);
      }
    }
    if (kept.size() == out_.states.size()) return true;
    Layer dense;
    for (State s : kept) {
      const int64_t from = s.begin;
      s.begin = static_cast<int64_t>(dense.loads.size());
      dense.loads.insert(dense.loads.end(), out_.loads.begin() + from, out_.loads.begin() + from + s.count);
      dense.origins.insert(dense.origins.end(), out_.origins.begin() + from,
                           out_.origins.begin() + from + s.count);
      dense.states.push_back(s);
    }
    out_ = std::move(dense);
    return true;
  }

  struct Entry {
    int64_t load;
    Origin origin;
  };

  const Layer* left_;
  const Layer& right_;
  Limits limits_;
  int64_t& work_left_;
  Layer out_;
  size_t prune_at_ = kPruneFirstAt;
  // The pair of states being combined.
  int32_t pair_left_ = -1, pair_right_ = -1, num_left_ = 0, num_right_ = 0;
  const int64_t *left_loads_ = nullptr, *right_loads_ = nullptr;
  int64_t sum_ = 0, max_count_ = 0;
  uint64_t used_ = 0;
  int32_t alone_ = 0;
  std::vector<int32_t> choice_;  // per load of the child: the load that it joins, -1 for none
  std::vector<Entry> scratch_;
};

/// Children are combined from the last to the first. layers_[c] holds the combined states of c and its later
/// siblings, so layers_[n + 1] holds those of all children of n.
class MultiPath {
 public:
  MultiPath(const TokenTree& tree, int64_t budget, const MultiPathOptions& options)
      : tree_(tree),
        length_(path_lengths(tree)),
        budget_(std::min(budget, tree.num_tokens())),
        tokens_(tree.num_tokens()),
        work_left_(options.work_limit),
        work_limit_(options.work_limit),
        layers_(tree.num_nodes()),
        combined_(tree.num_nodes(), -1) {
    int64_t flat = 0;
    for (int64_t n = 0; n < tree.num_nodes(); ++n) flat += tree.is_leaf(n) ? length_[n] : 0;
    cost_bound_ = std::min(options.upper_bound, flat);
  }

  MultiPathPacking solve() {
    std::vector<int64_t> below(tree_.num_nodes(), 0);  // tokens of the children combined so far
    for (int64_t n = tree_.num_nodes() - 1; n > 0; --n) {
      const int64_t p = tree_.parent[n];
      below[p] += below[n] + tree_.size[n];
      if (!lift_and_combine(n, below[p])) return {MultiPathOutcome::kGaveUp, {}, 0, work_limit_};
    }
    const int64_t work = work_limit_ - std::max<int64_t>(work_left_, 0);
    const Layer root = lifted(0);
    const State* best = nullptr;
    for (const State& s : root.states) {
      if (s.sum <= cost_bound_ && (!best || s.sum < best->sum)) best = &s;
    }
    if (!best) return {MultiPathOutcome::kNothingWithinBound, {}, 0, work};
    return {MultiPathOutcome::kSolved, trace(*best), best->sum, work};
  }

 private:
  /// States of node n: its children's with |n| added to every load.
  Layer lifted(int64_t n) {
    if (tree_.is_leaf(n)) return {{{0, 1, -1, -1, tree_.size[n]}}, {tree_.size[n]}, {{-1, -1}}};
    Layer layer = layers_[n + 1];
    for (State& s : layer.states) s.sum += s.count * tree_.size[n];
    for (int64_t& load : layer.loads) load += tree_.size[n];
    return layer;
  }

  bool lift_and_combine(int64_t n, int64_t below_parent) {
    const int64_t p = tree_.parent[n];
    const Layer child = lifted(n);
    const Layer* before = combined_[p] < 0 ? nullptr : &layers_[combined_[p]];
    const Combiner::Limits limits{.max_load = budget_ - length_[p],
                                  .path = length_[p],
                                  .elsewhere = tokens_ - length_[p] - below_parent,
                                  .cost_bound = cost_bound_};
    work_left_ -= static_cast<int64_t>(child.loads.size());
    Combiner combiner(before, child, limits, work_left_);
    if (!combiner.run()) return false;
    layers_[n] = combiner.take();
    before_[n] = combined_[p];
    combined_[p] = n;
    return true;
  }

  /// Follows the origins from the root down to find the part of every leaf.
  LeafParts trace(const State& root) const {
    struct Visit {
      int64_t node;
      int32_t state;
      std::vector<int64_t> part;  // per load
    };
    std::vector<int64_t> label_of(tree_.num_nodes(), 0);
    std::vector<int64_t> all(root.count);
    std::iota(all.begin(), all.end(), 0);
    std::vector<Visit> visits;
    const auto expand = [&](int64_t node, const State* s, std::vector<int64_t> part) {
      for (int64_t c = node + 1; c >= 0;) {
        const Layer& layer = layers_[c];
        const int64_t next = before_[c];
        std::vector<int64_t> right(s->count), left(s->count);
        int64_t num_right = 0, num_left = 0;
        for (int32_t k = 0; k < s->count; ++k) {
          const Origin o = layer.origins[s->begin + k];
          if (o.right >= 0) right[o.right] = part[k], ++num_right;
          if (o.left >= 0) left[o.left] = part[k], ++num_left;
        }
        right.resize(num_right);
        left.resize(num_left);
        visits.push_back({c, s->right, std::move(right)});
        part = std::move(left);
        if (next >= 0) s = &layers_[next].states[s->left];
        c = next;
      }
    };
    if (tree_.num_nodes() > 1) expand(0, &root, all);
    while (!visits.empty()) {
      const Visit v = std::move(visits.back());
      visits.pop_back();
      if (tree_.is_leaf(v.node)) {
        label_of[v.node] = v.part[0];
      } else {
        expand(v.node, &layers_[v.node + 1].states[v.state], v.part);
      }
    }
    std::vector<int64_t> label;
    for (int64_t n = 0; n < tree_.num_nodes(); ++n) {
      if (tree_.is_leaf(n)) label.push_back(label_of[n]);
    }
    return parts_from_labels(label);
  }

  const TokenTree& tree_;
  std::vector<int64_t> length_;
  int64_t budget_;
  int64_t tokens_;
  int64_t work_left_;
  int64_t work_limit_;
  int64_t cost_bound_ = 0;
  std::vector<Layer> layers_;
  std::vector<int64_t> combined_;  // per node: the child combined last
  std::vector<int64_t> before_ = std::vector<int64_t>(tree_.num_nodes(), -1);  // the child before it
};

}  // namespace

MultiPathPacking pack_multi_path(const TokenTree& tree, int64_t budget, const MultiPathOptions& options) {
  if (tree.num_nodes() == 0) return {MultiPathOutcome::kSolved, {}};
  const LeafPaths leaves = leaf_paths(tree);
  ESPALIER_ASSERT(*std::max_element(leaves.path.begin(), leaves.path.end()) <= budget);
  return MultiPath(tree, budget, options).solve();
}

}  // namespace espalier
