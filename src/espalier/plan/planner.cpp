#include "espalier/plan/planner.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "espalier/base/check.h"

namespace espalier {
namespace {

/// What is kept together: some trajectories of one tree and the nodes of their paths.
struct Part {
  std::vector<int64_t> nodes;         // ascending
  std::vector<int64_t> trajectories;  // in preorder of their end nodes
  int64_t num_tokens = 0;
};

/// Trajectories sorted by end node, those of one node ascending.
std::vector<int64_t> trajectories_in_preorder(const Forest& forest) {
  std::vector<int64_t> begin(forest.num_nodes() + 1, 0);
  for (const int64_t n : forest.end_node) ++begin[n + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::vector<int64_t> sorted(forest.num_trajectories());
  for (int64_t r = 0; r < forest.num_trajectories(); ++r) sorted[begin[forest.end_node[r]]++] = r;
  return sorted;
}

/// Fills parts depth first. A trajectory goes to the current part while the nodes that it adds fit the budget
/// and the tree is the same; otherwise it opens the next part, which repeats its path. A tree that fits is
/// therefore one part. In preorder the nodes that a trajectory adds come after all nodes of the part.
std::vector<Part> tree_parts(const Forest& forest, int64_t budget) {
  std::vector<Part> parts;
  std::vector<int64_t> part_of(forest.num_nodes(), -1);  // the last part that holds the node
  std::vector<int64_t> added;
  int64_t tree_last = 0;  // one past the last node of the current tree
  for (const int64_t r : trajectories_in_preorder(forest)) {
    const int64_t end = forest.end_node[r];
    const auto path_outside = [&](int64_t part) {
      added.clear();
      int64_t tokens = 0;
      for (int64_t n = end; n >= 0 && part_of[n] != part; n = forest.parent[n]) {
        added.push_back(n);
        tokens += forest.node_size(n);
      }
      return tokens;
    };
    auto part = static_cast<int64_t>(parts.size()) - 1;
    int64_t tokens = part < 0 ? 0 : path_outside(part);
    const bool new_tree = end >= tree_last;
    if (new_tree || parts[part].num_tokens + tokens > budget) {
      parts.emplace_back();
      tokens = path_outside(++part);
      if (new_tree) tree_last = forest.subtree_last[added.back()];
    }
    for (const int64_t n : added) part_of[n] = part;
    parts[part].nodes.insert(parts[part].nodes.end(), added.rbegin(), added.rend());
    parts[part].trajectories.push_back(r);
    parts[part].num_tokens += tokens;
  }
  return parts;
}

/// Best-fit decreasing: the largest item first, each into the fullest bin that still holds it. Ties: the
/// earlier item, the older bin. Returns the items of each bin, ascending, bins in the order of opening.
/// O(n log n).
std::vector<std::vector<int64_t>> best_fit_decreasing(const std::vector<int64_t>& sizes, int64_t capacity) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::vector<int64_t>> bins;
  std::set<std::pair<int64_t, int64_t>> room;  // (free tokens, bin)
  for (const int64_t item : order) {
    const auto fit = room.lower_bound({sizes[item], 0});
    std::pair<int64_t, int64_t> bin{capacity, static_cast<int64_t>(bins.size())};
    if (fit == room.end()) {
      bins.emplace_back();
    } else {
      bin = *fit;
      room.erase(fit);
    }
    bins[bin.second].push_back(item);
    if (bin.first > sizes[item]) room.emplace(bin.first - sizes[item], bin.second);
  }
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  return bins;
}

void finish(const Forest& forest, MicroBatch& batch) {
  std::vector<int64_t> run_end_position(batch.runs.size());
  for (size_t k = 0; k < batch.runs.size(); ++k) {
    const Run& run = batch.runs[k];
    const int64_t size = run.end - run.begin;
    const int64_t position = run.parent < 0 ? 0 : run_end_position[run.parent];
    run_end_position[k] = position + size;
    batch.num_tokens += size;
    batch.num_pairs += size * position + size * (size + 1) / 2;
  }
  std::sort(batch.trajectories.begin(), batch.trajectories.end(),
            [](const Placement& a, const Placement& b) { return a.trajectory < b.trajectory; });
  ESPALIER_ASSERT(std::all_of(batch.trajectories.begin(), batch.trajectories.end(), [&](const Placement& p) {
    return run_end_position[p.run] == forest.trajectory_size(p.trajectory);
  }));
}

std::vector<MicroBatch> pack_trees(const Forest& forest, int64_t budget) {
  const std::vector<Part> parts = tree_parts(forest, budget);
  std::vector<int64_t> sizes;
  sizes.reserve(parts.size());
  for (const Part& part : parts) sizes.push_back(part.num_tokens);
  std::vector<MicroBatch> batches;
  std::vector<int64_t> run_of(forest.num_nodes());  // in the current micro-batch
  for (const auto& bin : best_fit_decreasing(sizes, budget)) {
    // Parts of one tree that meet in a micro-batch share their prefixes again.
    std::vector<int64_t> nodes;
    for (const int64_t p : bin) nodes.insert(nodes.end(), parts[p].nodes.begin(), parts[p].nodes.end());
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());

    MicroBatch& batch = batches.emplace_back();
    for (const int64_t n : nodes) {
      const int64_t parent = forest.parent[n] < 0 ? -1 : run_of[forest.parent[n]];
      run_of[n] = static_cast<int64_t>(batch.runs.size());
      batch.runs.push_back({forest.node_begin[n], forest.node_begin[n + 1], parent});
    }
    for (const int64_t p : bin) {
      for (const int64_t r : parts[p].trajectories) {
        batch.trajectories.push_back({r, run_of[forest.end_node[r]]});
      }
    }
    finish(forest, batch);
  }
  return batches;
}

/// For each node the topmost node of the stretch of its root path whose forest tokens are contiguous.
std::vector<int64_t> stretch_tops(const Forest& forest) {
  std::vector<int64_t> top(forest.num_nodes());
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    top[n] = n > 0 && forest.parent[n] == n - 1 ? top[n - 1] : n;
  }
  return top;
}

/// Appends the trajectory's path as a chain of runs, one per stretch.
void append_chain(const Forest& forest, const std::vector<int64_t>& top, int64_t trajectory,
                  MicroBatch& batch) {
  const auto first = static_cast<int64_t>(batch.runs.size());
  for (int64_t n = forest.end_node[trajectory]; n >= 0; n = forest.parent[top[n]]) {
    batch.runs.push_back({forest.node_begin[top[n]], forest.node_begin[n + 1], -1});
  }
  std::reverse(batch.runs.begin() + first, batch.runs.end());
  const auto last = static_cast<int64_t>(batch.runs.size()) - 1;
  for (int64_t k = first + 1; k <= last; ++k) batch.runs[k].parent = k - 1;
  batch.trajectories.push_back({trajectory, last});
}

std::vector<MicroBatch> pack_sequences(const Forest& forest, int64_t budget) {
  std::vector<int64_t> sizes;
  sizes.reserve(forest.num_trajectories());
  for (int64_t r = 0; r < forest.num_trajectories(); ++r) sizes.push_back(forest.trajectory_size(r));
  const std::vector<int64_t> top = stretch_tops(forest);
  std::vector<MicroBatch> batches;
  for (const auto& bin : best_fit_decreasing(sizes, budget)) {
    MicroBatch& batch = batches.emplace_back();
    for (const int64_t r : bin) append_chain(forest, top, r, batch);
    finish(forest, batch);
  }
  return batches;
}

void check_budget(const Forest& forest, int64_t budget) {
  ESPALIER_CHECK(budget >= 0, "token budget: expected at least 1, or 0 for no limit, received {}", budget);
  if (budget == 0) return;
  const int64_t smallest = smallest_token_budget(forest);
  if (smallest <= budget) return;
  int64_t r = 0;
  while (forest.trajectory_size(r) <= budget) ++r;
  throw InputError(fmt::format(
      "trajectory {} has {} tokens, more than the token budget {}: expected a budget of at least {}, "
      "the longest trajectory",
      r, forest.trajectory_size(r), budget, smallest));
}

}  // namespace

Strategy parse_strategy(const std::string& name) {
  for (const Strategy strategy : {Strategy::kTreePacking, Strategy::kSequencePacking}) {
    if (name == to_string(strategy)) return strategy;
  }
  throw InputError(fmt::format("strategy: expected tree-packing or sequence-packing, received \"{}\"", name));
}

const char* to_string(Strategy strategy) {
  return strategy == Strategy::kTreePacking ? "tree-packing" : "sequence-packing";
}

int64_t Plan::num_tokens() const {
  int64_t total = 0;
  for (const MicroBatch& batch : micro_batches) total += batch.num_tokens;
  return total;
}

int64_t Plan::num_pairs() const {
  int64_t total = 0;
  for (const MicroBatch& batch : micro_batches) total += batch.num_pairs;
  return total;
}

int64_t smallest_token_budget(const Forest& forest) {
  int64_t longest = 0;
  for (int64_t r = 0; r < forest.num_trajectories(); ++r)
    longest = std::max(longest, forest.trajectory_size(r));
  return longest;
}

Plan make_plan(const Forest& forest, const PlanOptions& options) {
  check_budget(forest, options.token_budget);
  const int64_t budget =
      options.token_budget > 0 ? options.token_budget : std::numeric_limits<int64_t>::max();
  return {options, options.strategy == Strategy::kTreePacking ? pack_trees(forest, budget)
                                                              : pack_sequences(forest, budget)};
}

double effective_reuse_ratio(const Forest& forest, const Plan& plan) {
  const int64_t flat = forest.flat_tokens();
  return flat == 0 ? 0 : static_cast<double>(flat - plan.num_tokens()) / static_cast<double>(flat);
}

}  // namespace espalier
