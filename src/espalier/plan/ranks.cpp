// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/ranks.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"
#include "espalier/base/option_names.h"
#include "espalier/plan/packing.h"
#include "espalier/plan/range_minimum.h"

namespace espalier {
namespace {

constexpr int64_t kMostRanks = 1'000'000;
// Trees are also split into smaller parts than a rank's mean, which may balance the ranks better.
constexpr double kFractions[] = {1, 1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16, 1.0 / 32};
// A distribution that repeats more tokens must be faster by this factor.
constexpr double kClearlyFaster = 0.999;
// Parts are moved to one of the kTargets fastest ranks. The search ends when the slowest rank is close to the
// lower bound, or after a number of tries.
constexpr size_t kTargets = 16;
constexpr double kEven = 1.001;
constexpr int64_t kMostTried = 1'000'000;

// The forest's leaves in preorder and the seconds that they add. A forest's seconds are the sum over its
// leaves of path - shared, the seconds of the tokens of the leaf's path that no earlier leaf has.
class LeafPrices {
 public:
  LeafPrices(const Forest& forest, const TimeModel& model) {
    for (int64_t n = 0; n < forest.num_nodes(); ++n) {
      if (n + 1 < forest.num_nodes() && forest.parent[n + 1] == n) continue;
      check_interrupt();
      // The node after a leaf is a child of the deepest node that the leaf shares with the next one.
      const int64_t first = node.empty() ? n : node.back() + 1;
      shared_tokens.push_back(node.empty() ? 0 : forest.position[first]);
      node.push_back(n);
      path_tokens.push_back(forest.position[n] + forest.node_size(n));
      shared.push_back(path_seconds(model, shared_tokens.back()));
      path.push_back(path_seconds(model, path_tokens.back()));
      sum.push_back(sum.back() + path.back() - shared.back());
    }
    std::vector<std::pair<int64_t, double>> with_seconds;
    with_seconds.reserve(shared.size());
    for (size_t i = 0; i < shared.size(); ++i) with_seconds.emplace_back(shared_tokens[i], shared[i]);
    least_shared_ = RangeMinimum(with_seconds);
  }

  int64_t num_leaves() const { return static_cast<int64_t>(node.size()); }
  double total() const { return sum.back(); }

  // Seconds of a forest of the leaves [begin, end).
  double seconds(int64_t begin, int64_t end) const { return sum[end] - sum[begin] + shared[begin]; }

  // The fewest tokens that a leaf in [begin, end] shares with the preceding one, and their seconds. This is
  // what leaf `end` shares with leaf begin - 1.
  std::pair<int64_t, double> least_shared(int64_t begin, int64_t end) const {
    return least_shared_(begin, end + 1);
  }

  std::vector<int64_t> node, path_tokens, shared_tokens;  // by leaf; shared: with the leaf before
  std::vector<double> path, shared;                       // their seconds
  std::vector<double> sum{0};                             // [num_leaves + 1] of path - shared

 private:
  RangeMinimum<std::pair<int64_t, double>> least_shared_;
};

// Adjacent leaves of one tree that are assigned together.
struct Part {
  int64_t begin, end;
};

// Parts in the order of their leaves, each as long as `seconds` allow, or one leaf.
std::vector<Part> split(const LeafPrices& leaves, double seconds) {
  check_interrupt();
  std::vector<Part> parts;
  for (int64_t i = 0; i < leaves.num_leaves(); ++i) {
    const bool begins_tree = leaves.shared_tokens[i] == 0;
    if (begins_tree || leaves.seconds(parts.back().begin, i + 1) > seconds) {
      parts.push_back({i, i});
    }
    parts.back().end = i + 1;
  }
  return parts;
}

// Parts on ranks. Parts of a tree on the same rank encode shared tokens once.
class Assignment {
 public:
  Assignment(const LeafPrices& leaves, std::vector<Part> parts, int64_t num_ranks)
      : leaves_(&leaves),
        parts_(std::move(parts)),
        rank_(parts_.size(), -1),
        on_(num_ranks),
        load_(num_ranks) {
    for (int64_t r = 0; r < num_ranks; ++r) order_.emplace(0, r);
  }

  // Largest parts first, each on the rank that is the fastest with it.
  void place_longest_first() {
    std::vector<int64_t> order(parts_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return price(a) > price(b); });
    for (const int64_t part : order) {
      check_interrupt();
      int64_t best = order_.begin()->second;
      for (const int64_t neighbour : {part - 1, part + 1}) {
        if (neighbour < 0 || neighbour >= num_parts() || rank_[neighbour] < 0) continue;
        const int64_t rank = rank_[neighbour];
        if (load_[rank] + added(part, rank) < load_[best] + added(part, best)) best = rank;
      }
      put(part, best);
    }
  }

  void place(const std::vector<int64_t>& ranks) {
    for (int64_t part = 0; part < num_parts(); ++part) put(part, ranks[part]);
  }

  // Moves parts from the slowest rank, or swaps them, as long as that makes it faster and no other rank as
  // slow. `least`: a lower bound of the seconds of any distribution.
  void improve(double least) {
    int64_t tried = 0;
    while (seconds() > kEven * least && tried < kMostTried && improve_slowest(&tried)) {
    }
  }

  double seconds() const { return order_.empty() ? 0 : order_.rbegin()->first; }
  double total() const { return std::accumulate(load_.begin(), load_.end(), 0.0); }

  std::vector<int64_t> rank_of_leaves() const {
    std::vector<int64_t> ranks(leaves_->num_leaves());
    for (size_t p = 0; p < parts_.size(); ++p) {
      std::fill(ranks.begin() + parts_[p].begin, ranks.begin() + parts_[p].end, rank_[p]);
    }
    return ranks;
  }

 private:
  int64_t num_parts() const { return static_cast<int64_t>(parts_.size()); }
  double price(int64_t part) const { return leaves_->seconds(parts_[part].begin, parts_[part].end); }

  // Seconds of the tokens that the part shares with an earlier one.
  double common(int64_t earlier, int64_t part) const {
    return leaves_->least_shared(parts_[earlier].end, parts_[part].begin).second;
  }

  // Seconds that the part adds to a rank which does not have it.
  double added(int64_t part, int64_t rank) const { return added(part, on_[rank], -1); }

  // Likewise, as if part `without` were not on the rank.
  double added(int64_t part, const std::set<int64_t>& on, int64_t without) const {
    auto next = on.lower_bound(part);
    auto before = next;
    if (next != on.end() && *next == without) ++next;
    const bool has_next = next != on.end();
    bool has_before = before != on.begin();
    if (has_before && *--before == without) {
      has_before = before != on.begin();
      if (has_before) --before;
    }
    double seconds = price(part);
    if (has_before) seconds -= common(*before, part);
    if (has_next) seconds -= common(part, *next);
    if (has_before && has_next) seconds += common(*before, *next);
    return seconds;
  }

  // Seconds that the part's rank saves without it.
  double removed(int64_t part) const { return added(part, on_[rank_[part]], part); }

  void put(int64_t part, int64_t rank) {
    change_load(rank, added(part, rank));
    on_[rank].insert(part);
    rank_[part] = rank;
  }

  void take(int64_t part) {
    const int64_t rank = rank_[part];
    const double less = removed(part);
    on_[rank].erase(part);
    rank_[part] = -1;
    change_load(rank, -less);
    // Rounding errors would make an empty rank unequal to others.
    if (on_[rank].empty()) change_load(rank, -load_[rank]);
  }

  void change_load(int64_t rank, double seconds) {
    order_.erase({load_[rank], rank});
    load_[rank] += seconds;
    order_.emplace(load_[rank], rank);
  }

  // A move of a part to a rank, with part `back` (or -1) in exchange, and the seconds of the slower of both
  // ranks afterwards.
  struct Move {
    int64_t part = -1, rank = -1, back = -1;
    double seconds = 0;
  };

  bool improve_slowest(int64_t* tried) {
    const auto [slowest_seconds, slowest] = *order_.rbegin();
    Move best{.seconds = slowest_seconds * (1 - 1e-9)};
    const auto offer = [&](const Move& move) {
      ++*tried;
      if (move.seconds < best.seconds) best = move;
    };
    for (const int64_t part : on_[slowest]) {
      const double left = slowest_seconds - removed(part);
      size_t targets = 0;
      for (auto it = order_.begin(); it != order_.end() && targets < kTargets; ++it, ++targets) {
        check_interrupt();
        const auto [load, rank] = *it;
        if (rank == slowest) continue;
        offer({part, rank, -1, std::max(left, load + added(part, rank))});
        for (const int64_t back : on_[rank]) {
          if (price(back) >= price(part)) continue;
          const double target = load - removed(back) + added(part, on_[rank], back);
          const double source = left + added(back, on_[slowest], part);
          offer({part, rank, back, std::max(source, target)});
        }
      }
    }
    if (best.part < 0) return false;
    take(best.part);
    if (best.back >= 0) {
      take(best.back);
      put(best.back, slowest);
    }
    put(best.part, best.rank);
    return true;
  }

  const LeafPrices* leaves_;
  std::vector<Part> parts_;
  std::vector<int64_t> rank_;                   // by part, -1: on none
  std::vector<std::set<int64_t>> on_;           // by rank: its parts
  std::vector<double> load_;                    // by rank: its seconds
  std::set<std::pair<double, int64_t>> order_;  // of ranks, by seconds
};

// Divides the leaves in order into ranks of at most `seconds`, at least one leaf each. Returns the parts and
// their ranks.
std::pair<std::vector<Part>, std::vector<int64_t>> cut_in_order(const LeafPrices& leaves, double seconds) {
  check_interrupt();
  std::vector<Part> parts;
  std::vector<int64_t> ranks;
  int64_t begin = 0, rank = 0;
  for (int64_t i = 0; i < leaves.num_leaves(); ++i) {
    const bool next_rank = i > begin && leaves.seconds(begin, i + 1) > seconds;
    if (next_rank) {
      begin = i;
      ++rank;
    }
    if (next_rank || leaves.shared_tokens[i] == 0) {
      parts.push_back({i, i});
      ranks.push_back(rank);
    }
    parts.back().end = i + 1;
  }
  return {std::move(parts), std::move(ranks)};
}

// cut_in_order with the fewest seconds for which the ranks suffice.
Assignment in_order(const LeafPrices& leaves, int64_t num_ranks, double least) {
  double low = least, high = leaves.total();
  for (int step = 0; step < 30; ++step) {
    const double middle = (low + high) / 2;
    const bool suffices = cut_in_order(leaves, middle).second.back() < num_ranks;
    (suffices ? high : low) = middle;
  }
  auto [parts, ranks] = cut_in_order(leaves, high);
  Assignment assignment(leaves, std::move(parts), num_ranks);
  assignment.place(ranks);
  return assignment;
}

// Whether `a` is preferred to `b`.
bool is_better(const Assignment& a, const Assignment& b) {
  if (a.seconds() < b.seconds() * kClearlyFaster) return true;
  return a.seconds() < b.seconds() / kClearlyFaster && a.total() < b.total();
}

// Trees with leaves on several ranks.
int64_t count_split_trees(const LeafPrices& leaves, const std::vector<int64_t>& rank_of_leaf) {
  int64_t count = 0;
  bool split = false;
  for (int64_t leaf = 1; leaf < leaves.num_leaves(); ++leaf) {
    if (leaves.shared_tokens[leaf] == 0) {
      split = false;
    } else if (!split && rank_of_leaf[leaf] != rank_of_leaf[leaf - 1]) {
      split = true;
      ++count;
    }
  }
  return count;
}

RankPlan rank_plan(const Forest& forest, const LeafPrices& leaves, const std::vector<int64_t>& rank_of_leaf,
                   int64_t num_ranks) {
  RankPlan plan{.ranks = std::vector<RankShare>(num_ranks),
                .split_trees = count_split_trees(leaves, rank_of_leaf),
                .repeated_tokens = -forest.tree_tokens()};
  std::vector<int64_t> last(num_ranks, -1);  // leaf of the rank
  for (int64_t leaf = 0; leaf < leaves.num_leaves(); ++leaf) {
    const int64_t rank = rank_of_leaf[leaf];
    RankShare& share = plan.ranks[rank];
    share.seconds += leaves.path[leaf];
    share.tree_tokens += leaves.path_tokens[leaf];
    if (last[rank] >= 0) {
      const auto [tokens, seconds] = leaves.least_shared(last[rank] + 1, leaf);
      share.seconds -= seconds;
      share.tree_tokens -= tokens;
    }
    last[rank] = leaf;
  }
  for (int64_t t = 0; t < forest.num_trajectories(); ++t) {
    // A trajectory that ends at an inner node goes with the first leaf below it.
    const auto leaf = std::lower_bound(leaves.node.begin(), leaves.node.end(), forest.end_node[t]);
    plan.ranks[rank_of_leaf[leaf - leaves.node.begin()]].trajectories.push_back(t);
  }
  for (const RankShare& share : plan.ranks) plan.repeated_tokens += share.tree_tokens;
  return plan;
}

void check_ranks(int64_t num_ranks) {
  ESPALIER_CHECK(num_ranks >= 1 && num_ranks <= kMostRanks, "{}: expected 1 to {}, received {}",
                 named("ranks"), kMostRanks, num_ranks);
}

}  // namespace

double RankPlan::seconds() const {
  double most = 0;
  for (const RankShare& share : ranks) most = std::max(most, share.seconds);
  return most;
}

double RankPlan::imbalance() const {
  double sum = 0;
  for (const RankShare& share : ranks) sum += share.seconds;
  return sum > 0 ? seconds() * static_cast<double>(ranks.size()) / sum - 1 : 0;
}

double path_seconds(const TimeModel& model, int64_t tokens) {
  Load load{.tokens = tokens, .pairs = tokens * (tokens + 1) / 2, .logit_rows = tokens};
  Load nothing;
  for (const int64_t window : model.cost.sliding_windows()) {
    load.window_pairs.push_back(pairs_in_window(0, tokens, window));
    nothing.window_pairs.push_back(0);
  }
  return predicted_seconds(model, load, CheckpointActivations::kNone) -
         predicted_seconds(model, nothing, CheckpointActivations::kNone);
}

RankPlan distribute(const Forest& forest, int64_t num_ranks, const TimeModel& model) {
  check_ranks(num_ranks);
  RankPlan plan;
  plan.ranks.resize(num_ranks);
  if (forest.num_nodes() == 0) return plan;
  const LeafPrices leaves(forest, model);
  const double mean = leaves.total() / static_cast<double>(num_ranks);
  const double longest = *std::max_element(leaves.path.begin(), leaves.path.end());
  const double least = std::max(mean, longest);
  Assignment best = in_order(leaves, num_ranks, least);
  best.improve(least);
  for (const double fraction : kFractions) {
    Assignment assignment(leaves, split(leaves, fraction * mean), num_ranks);
    assignment.place_longest_first();
    assignment.improve(least);
    if (is_better(assignment, best)) best = std::move(assignment);
  }
  plan = rank_plan(forest, leaves, best.rank_of_leaves(), num_ranks);
  plan.least_seconds = least;
  return plan;
}

RankPlan distribute(const Forest& forest, int64_t num_ranks, const TimeModel& model, int64_t context_parallel,
                    double seconds_per_token) {
  check_ranks(num_ranks);
  ESPALIER_CHECK(context_parallel == 0 || (context_parallel > 0 && num_ranks % context_parallel == 0),
                 "{}: expected a divisor of {} {}, or 0, received {}", named("context-parallel"),
                 named("ranks"), num_ranks, context_parallel);
  RankPlan best;
  for (int64_t together = 1; together <= num_ranks; ++together) {
    if (num_ranks % together != 0 || (context_parallel != 0 && together != context_parallel)) continue;
    const auto parts = static_cast<double>(together);
    RankPlan plan = distribute(forest, num_ranks / together, model);
    plan.context_parallel = together;
    plan.least_seconds /= parts;
    for (RankShare& share : plan.ranks) {
      const double received = static_cast<double>(share.tree_tokens) * (parts - 1) / parts;
      share.seconds = share.seconds / parts + received * seconds_per_token;
    }
    if (best.ranks.empty() || plan.seconds() < best.seconds() * kClearlyFaster) best = std::move(plan);
  }
  return best;
}

RankPlan distribute_trajectories(const Forest& forest, int64_t num_ranks, const TimeModel& model) {
  check_ranks(num_ranks);
  std::vector<double> seconds;
  seconds.reserve(forest.num_trajectories());
  for (int64_t t = 0; t < forest.num_trajectories(); ++t) {
    check_interrupt();
    seconds.push_back(path_seconds(model, forest.trajectory_size(t)));
  }
  RankPlan plan;
  plan.repeated_tokens = forest.flat_tokens() - forest.tree_tokens();
  for (std::vector<int64_t>& trajectories : largest_differencing(seconds, num_ranks)) {
    RankShare& share = plan.ranks.emplace_back();
    for (const int64_t t : trajectories) {
      share.seconds += seconds[t];
      share.tree_tokens += forest.trajectory_size(t);
    }
    share.trajectories = std::move(trajectories);
    plan.least_seconds += share.seconds / static_cast<double>(num_ranks);
  }
  for (const double path : seconds) plan.least_seconds = std::max(plan.least_seconds, path);
  return plan;
}

}  // namespace espalier
