// SPDX-License-Identifier: Apache-2.0
// How near to the optimum tree packing comes, by shape and budget, and how long it takes.
// Run: plan_quality [trees per cell = 40]; prints markdown tables.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "espalier/plan/multi_path.h"
#include "espalier/plan/tree_heuristic.h"
#include "tests/plan/tree_shapes.h"

namespace espalier {
namespace {

using testing::kTreeShapes;
using testing::random_tree;
using testing::TreeShape;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kSeed = 1;
constexpr int64_t kNumLeaves[] = {10, 24};
constexpr double kBudgets[] = {0, 0.25, 1};  // from the longest path (0) to half the tree (1)

struct Ratio {
  double sum = 0, worst = 0;
  int64_t count = 0;
  void add(int64_t tokens, int64_t optimum) {
    const double ratio = static_cast<double>(tokens) / static_cast<double>(optimum);
    sum += ratio;
    worst = std::max(worst, ratio);
    ++count;
  }
  std::string text() const {
    return count == 0 ? "-" : fmt::format("{:.4f} / {:.3f}", sum / static_cast<double>(count), worst);
  }
};

struct Cell {
  Ratio single, depth_first, bottom_up, search;
  int64_t unsolved = 0;
};

int64_t budget_at(const TokenTree& tree, double share) {
  const LeafPaths leaves = leaf_paths(tree);
  const int64_t longest = *std::max_element(leaves.path.begin(), leaves.path.end());
  const int64_t half = std::max(longest, tree.num_tokens() / 2);
  return longest + static_cast<int64_t>(share * static_cast<double>(half - longest));
}

int64_t work_for(const LeafPaths& leaves) {
  return std::min(search_work(leaves.num_leaves()), kMaxSearchWork);
}

void compare(const TokenTree& tree, double budget_share, Cell& cell) {
  const LeafPaths leaves = leaf_paths(tree);
  const int64_t budget = budget_at(tree, budget_share);
  const int64_t found = total_tokens(leaves, split_tree(tree, budget, work_for(leaves)));
  const MultiPathPacking exact = pack_multi_path(tree, budget, {.upper_bound = found});
  if (exact.outcome != MultiPathOutcome::kSolved) {
    ++cell.unsolved;
    return;
  }
  const int64_t optimum = exact.total_tokens;
  cell.single.add(pack_single_path(tree, budget).total_tokens, optimum);
  cell.depth_first.add(total_tokens(leaves, fill_depth_first(tree, budget)), optimum);
  cell.bottom_up.add(total_tokens(leaves, merge_bottom_up(tree, budget)), optimum);
  cell.search.add(found, optimum);
}

void quality(int64_t trees) {
  fmt::print(
      "| shape | leaves | budget | single path | depth-first fill | bottom-up | with local search | unsolved "
      "|\n");
  fmt::print("|---|---:|---:|---:|---:|---:|---:|---:|\n");
  for (const TreeShape shape : kTreeShapes) {
    for (const int64_t num_leaves : kNumLeaves) {
      for (const double budget : kBudgets) {
        Cell cell;
        for (int64_t k = 0; k < trees; ++k) {
          Rng rng(kSeed, static_cast<uint64_t>(k));
          compare(random_tree(shape, num_leaves, rng), budget, cell);
        }
        fmt::print("| {} | {} | {} | {} | {} | {} | {} | {} |\n", to_string(shape), num_leaves, budget,
                   cell.single.text(), cell.depth_first.text(), cell.bottom_up.text(), cell.search.text(),
                   cell.unsolved);
        std::fflush(stdout);
      }
    }
  }
}

/// Milliseconds, and the parts.
std::pair<double, LeafParts> timed(const std::function<LeafParts()>& pack) {
  const auto begin = Clock::now();
  LeafParts parts = pack();
  return {std::chrono::duration<double, std::milli>(Clock::now() - begin).count(), std::move(parts)};
}

void speed() {
  fmt::print(
      "\n| shape | leaves | budget | tokens / tree tokens: depth-first | bottom-up | with local search | ms: "
      "depth-first | bottom-up | with local search |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|\n");
  for (const TreeShape shape :
       {TreeShape::kBinary, TreeShape::kWide, TreeShape::kUnbalanced, TreeShape::kLongPrompt}) {
    for (const int64_t num_leaves : {1'000, 10'000, 100'000, 1'000'000}) {
      Rng rng(kSeed, 99);
      const TokenTree tree = random_tree(shape, num_leaves, rng);
      const LeafPaths leaves = leaf_paths(tree);
      const int64_t budget = 2 * budget_at(tree, 0);
      const auto [fill_ms, fill] = timed([&] { return fill_depth_first(tree, budget); });
      const auto [merge_ms, merge] = timed([&] { return merge_bottom_up(tree, budget); });
      const auto [split_ms, split] = timed([&] { return split_tree(tree, budget, work_for(leaves)); });
      const auto share = [&](const LeafParts& parts) {
        return static_cast<double>(total_tokens(leaves, parts)) / static_cast<double>(tree.num_tokens());
      };
      fmt::print("| {} | {} | {} | {:.4f} | {:.4f} | {:.4f} | {:.1f} | {:.1f} | {:.1f} |\n", to_string(shape),
                 num_leaves, budget, share(fill), share(merge), share(split), fill_ms, merge_ms, split_ms);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace espalier

int main(int argc, char** argv) {
  espalier::quality(argc > 1 ? std::atoll(argv[1]) : 40);
  espalier::speed();
}
