// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/partition.h"

#include <algorithm>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/csr.h"
#include "espalier/base/interrupt.h"
#include "espalier/plan/context.h"
#include "espalier/plan/packing.h"

namespace espalier {
namespace {

/// A node, or a part of one between cuts. Segments are in forest order.
struct Segment {
  int64_t begin, end;
  int64_t parent;  // segment before it on the path, -1 at a root
  int64_t piece;
};

/// The pieces of a forest, numbered in the order of their first tokens.
struct Pieces {
  std::vector<Segment> segments;
  std::vector<int64_t> last_segment;   // [num_nodes]
  std::vector<int64_t> first_segment;  // [pieces]
  std::vector<int64_t> size;           // [pieces] tokens
  std::vector<int64_t> parent;         // [pieces] piece, -1 without
  Csr<int64_t> children;               // row p: pieces whose parent is p, ascending

  int64_t num_pieces() const { return static_cast<int64_t>(size.size()); }
};

void add_segment(Pieces& pieces, Segment segment, bool begins_piece) {
  if (begins_piece) {
    pieces.parent.push_back(segment.parent < 0 ? -1 : pieces.segments[segment.parent].piece);
    pieces.first_segment.push_back(static_cast<int64_t>(pieces.segments.size()));
    pieces.size.push_back(0);
    segment.piece = pieces.num_pieces() - 1;
  } else {
    segment.piece = pieces.segments[segment.parent].piece;
  }
  pieces.size[segment.piece] += segment.end - segment.begin;
  pieces.segments.push_back(segment);
}

Pieces find_pieces(const Forest& forest, std::span<const int64_t> cuts) {
  Pieces pieces;
  pieces.last_segment.resize(forest.num_nodes());
  size_t cut = 0;
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    int64_t begin = forest.node_begin[n];
    int64_t parent = forest.parent[n] < 0 ? -1 : pieces.last_segment[forest.parent[n]];
    while (begin < forest.node_begin[n + 1]) {
      const bool is_cut = cut < cuts.size() && cuts[cut] == begin;
      cut += is_cut;
      int64_t end = forest.node_begin[n + 1];
      if (cut < cuts.size() && cuts[cut] < end) end = cuts[cut];
      ESPALIER_ASSERT(begin < end);  // the cuts ascend
      add_segment(pieces, {begin, end, parent, -1}, is_cut || parent < 0);
      parent = static_cast<int64_t>(pieces.segments.size()) - 1;
      begin = end;
    }
    pieces.last_segment[n] = parent;
  }
  ESPALIER_ASSERT(cut == cuts.size());
  pieces.children = grouped(pieces.parent, pieces.num_pieces());
  return pieces;
}

/// Groups `pieces` (ascending, all with the same parent micro-batch) into micro-batches, in the order of
/// their first pieces.
std::vector<std::vector<int64_t>> merge_pieces(const Pieces& all, const std::vector<int64_t>& pieces,
                                               int64_t budget, Merge merge) {
  std::vector<std::vector<int64_t>> groups;
  std::vector<int64_t> packable, sizes;
  for (const int64_t p : pieces) {
    if (merge == Merge::kAll || (merge == Merge::kLeaves && all.children.row_size(p) == 0)) {
      packable.push_back(p);
      sizes.push_back(all.size[p]);
    } else {
      groups.push_back({p});
    }
  }
  for (std::vector<int64_t>& bin : best_fit_decreasing(sizes, budget)) {
    for (int64_t& item : bin) item = packable[item];
    groups.push_back(std::move(bin));
  }
  std::sort(groups.begin(), groups.end());
  return groups;
}

struct Grouping {
  std::vector<int64_t> batch_of;  // [pieces] micro-batch
  std::vector<int64_t> parent;    // [micro-batches]
};

/// Works top-down: the pieces below a micro-batch can be merged only when its own pieces are known.
Grouping group_pieces(const Pieces& pieces, int64_t budget, Merge merge) {
  struct Pending {
    std::vector<int64_t> group;
    int64_t parent;
  };
  Grouping grouping;
  grouping.batch_of.resize(pieces.num_pieces());
  std::vector<Pending> stack;
  const auto push_groups = [&](const std::vector<int64_t>& below, int64_t parent) {
    auto groups = merge_pieces(pieces, below, budget, merge);
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
      stack.push_back({std::move(*group), parent});
    }
  };
  std::vector<int64_t> below;
  for (int64_t p = 0; p < pieces.num_pieces(); ++p) {
    if (pieces.parent[p] < 0) below.push_back(p);
  }
  push_groups(below, -1);
  while (!stack.empty()) {
    const Pending pending = std::move(stack.back());
    stack.pop_back();
    const auto batch = static_cast<int64_t>(grouping.parent.size());
    grouping.parent.push_back(pending.parent);
    below.clear();
    for (const int64_t p : pending.group) {
      grouping.batch_of[p] = batch;
      const auto children = pieces.children.row(p);
      below.insert(below.end(), children.begin(), children.end());
    }
    push_groups(below, batch);
  }
  return grouping;
}

/// Places every trajectory once in each micro-batch that its path touches.
void place_trajectories(const Forest& forest, const Pieces& pieces, const Grouping& grouping,
                        const std::vector<int64_t>& run_of, std::vector<MicroBatch>& batches) {
  for (int64_t r = 0; r < forest.num_trajectories(); ++r) {
    check_interrupt();
    int64_t segment = pieces.last_segment[forest.end_node[r]];
    while (segment >= 0) {
      const int64_t piece = pieces.segments[segment].piece;
      batches[grouping.batch_of[piece]].trajectories.push_back({r, run_of[segment]});
      segment = pieces.segments[pieces.first_segment[piece]].parent;
    }
  }
}

/// What remains of a node's subtree after the pieces below are cut off.
struct Residual {
  int64_t size = 0;    // tokens of the piece that continues upwards
  bool inner = false;  // whether it has child pieces
};

/// Which of the children's residuals stay with their parent.
struct Choice {
  std::vector<int64_t> kept;  // indices of children
  int64_t cut_batches = 0;    // micro-batches of the children that are cut off
  int64_t kept_size = 0;

  bool better_than(const Choice& other) const {
    return std::pair(cut_batches, kept_size) < std::pair(other.cut_batches, other.kept_size);
  }
};

/// Decides which children to cut off if their residuals and the parent's tokens do not fit together.
class ChildChooser {
 public:
  ChildChooser(int64_t budget, Merge merge) : budget_(budget), merge_(merge) {}

  /// The best choice found with kept_size <= capacity, capacity < budget.
  Choice choose(const std::vector<Residual>& children, int64_t capacity) {
    split(children);
    auto bins = best_fit_decreasing(sizes_, budget_);
    const auto num_bins = static_cast<int64_t>(bins.size());
    int64_t least = -1;
    for (int64_t b = 0; b < num_bins; ++b) {
      if (least < 0 || filling(bins[b]) < filling(bins[least])) least = b;
    }
    Choice best = complete(children, {}, num_bins, capacity);
    const auto try_bin = [&](const std::vector<int64_t>& bin, int64_t cut_bins) {
      if (filling(bin) > capacity) return;
      Choice choice = complete(children, bin, cut_bins, capacity);
      if (choice.better_than(best)) best = std::move(choice);
    };
    if (least >= 0) try_bin(bins[least], num_bins - 1);
    if (least >= 0 && filling(bins[least]) > capacity) {
      // Packs the parent's own tokens as one more item. The children in its bin stay with the parent.
      sizes_.push_back(budget_ - capacity);
      auto with_parent = best_fit_decreasing(sizes_, budget_);
      const auto parent = static_cast<int64_t>(sizes_.size()) - 1;
      for (std::vector<int64_t>& bin : with_parent) {
        if (bin.back() != parent) continue;
        bin.pop_back();
        try_bin(bin, static_cast<int64_t>(with_parent.size()) - 1);
      }
    }
    return best;
  }

 private:
  /// Separates children that may be packed with siblings from those that run alone. The latter are sorted by
  /// ascending size.
  void split(const std::vector<Residual>& children) {
    packable_.clear();
    sizes_.clear();
    alone_.clear();
    for (size_t c = 0; c < children.size(); ++c) {
      if (merge_ == Merge::kAll || (merge_ == Merge::kLeaves && !children[c].inner)) {
        packable_.push_back(static_cast<int64_t>(c));
        sizes_.push_back(children[c].size);
      } else {
        alone_.push_back(static_cast<int64_t>(c));
      }
    }
    std::stable_sort(alone_.begin(), alone_.end(),
                     [&](int64_t a, int64_t b) { return children[a].size < children[b].size; });
  }

  int64_t filling(const std::vector<int64_t>& bin) const {
    int64_t total = 0;
    for (const int64_t item : bin) total += sizes_[item];
    return total;
  }

  /// Keeps the children in the bin, and as many of those that run alone as fit.
  Choice complete(const std::vector<Residual>& children, const std::vector<int64_t>& bin, int64_t cut_bins,
                  int64_t capacity) const {
    Choice choice;
    choice.cut_batches = cut_bins;
    for (const int64_t item : bin) choice.kept.push_back(packable_[item]);
    choice.kept_size = filling(bin);
    for (const int64_t c : alone_) {
      if (choice.kept_size + children[c].size > capacity) break;
      choice.kept.push_back(c);
      choice.kept_size += children[c].size;
    }
    choice.cut_batches += static_cast<int64_t>(alone_.size() + bin.size() - choice.kept.size());
    return choice;
  }

  int64_t budget_;
  Merge merge_;
  std::vector<int64_t> packable_, sizes_, alone_;
};

/// Visits the nodes, children before parents, and collects the cuts.
class BottomUp {
 public:
  BottomUp(const Forest& forest, int64_t budget, Merge merge)
      : forest_(forest), budget_(budget), chooser_(budget, merge), residual_(forest.num_nodes()) {}

  /// Cuts off children until at most `capacity` of their tokens stay, then cuts inside node n if these and
  /// its own tokens exceed the budget.
  void visit(int64_t n, int64_t capacity) {
    children_.clear();
    child_nodes_.clear();
    int64_t below = 0;
    bool inner = false;
    for (int64_t c = n + 1; c < forest_.subtree_last[n]; c = forest_.subtree_last[c]) {
      children_.push_back(residual_[c]);
      child_nodes_.push_back(c);
      below += residual_[c].size;
      inner = inner || residual_[c].inner;
    }
    if (below > capacity) {
      below = cut_children(capacity);
      inner = true;
    }
    residual_[n] = cut_inside(n, {below, inner});
  }

  std::vector<int64_t> cuts() {
    std::sort(cuts_.begin(), cuts_.end());
    return std::move(cuts_);
  }

 private:
  int64_t cut_children(int64_t capacity) {
    const Choice choice = chooser_.choose(children_, capacity);
    std::vector<char> kept(children_.size(), 0);
    for (const int64_t c : choice.kept) kept[c] = 1;
    for (size_t c = 0; c < children_.size(); ++c) {
      if (!kept[c]) cuts_.push_back(forest_.node_begin[child_nodes_[c]]);
    }
    return choice.kept_size;
  }

  /// Fills pieces from the node's last token backwards. All but the uppermost piece are exactly full.
  Residual cut_inside(int64_t n, Residual below) {
    const int64_t node_begin = forest_.node_begin[n];
    const int64_t own = std::min(forest_.node_size(n), budget_ - below.size);
    int64_t begin = forest_.node_begin[n + 1] - own;
    Residual residual{below.size + own, below.inner};
    while (begin > node_begin) {
      cuts_.push_back(begin);
      residual = {std::min(budget_, begin - node_begin), true};
      begin -= residual.size;
    }
    return residual;
  }

  const Forest& forest_;
  int64_t budget_;
  ChildChooser chooser_;
  std::vector<Residual> residual_;  // [num_nodes]
  std::vector<int64_t> cuts_;
  std::vector<Residual> children_;  // of the current node
  std::vector<int64_t> child_nodes_;
};

}  // namespace

std::vector<MicroBatch> partition_at(const Forest& forest, std::span<const int64_t> cuts,
                                     int64_t token_budget, Merge merge) {
  const Pieces pieces = find_pieces(forest, cuts);
  for (const int64_t size : pieces.size) ESPALIER_ASSERT(size <= token_budget);
  const Grouping grouping = group_pieces(pieces, token_budget, merge);
  std::vector<MicroBatch> batches(grouping.parent.size());
  for (size_t m = 0; m < batches.size(); ++m) batches[m].parent = grouping.parent[m];
  std::vector<int64_t> run_of(pieces.segments.size());
  for (size_t s = 0; s < run_of.size(); ++s) {
    const Segment& segment = pieces.segments[s];
    MicroBatch& batch = batches[grouping.batch_of[segment.piece]];
    const bool is_root = pieces.first_segment[segment.piece] == static_cast<int64_t>(s);
    if (is_root && segment.parent >= 0) batch.context_runs.push_back(run_of[segment.parent]);
    run_of[s] = static_cast<int64_t>(batch.runs.size());
    batch.runs.push_back({segment.begin, segment.end, is_root ? -1 : run_of[segment.parent]});
  }
  place_trajectories(forest, pieces, grouping, run_of, batches);
  for (MicroBatch& batch : batches) finish_micro_batch(forest, batch);
  return batches;
}

std::vector<int64_t> choose_cuts(const Forest& forest, int64_t token_budget, bool cut_inside_nodes,
                                 Merge merge) {
  ESPALIER_CHECK(token_budget >= 1, "token budget: expected at least 1, received {}", token_budget);
  BottomUp bottom_up(forest, token_budget, merge);
  for (int64_t n = forest.num_nodes() - 1; n >= 0; --n) {
    const int64_t size = forest.node_size(n);
    check_interrupt();
    // The children's residuals share a piece with the node's last token if the node may be cut, and with all
    // its tokens otherwise.
    const bool cut_inside = cut_inside_nodes || size > token_budget;
    bottom_up.visit(n, token_budget - (cut_inside ? 1 : size));
  }
  return bottom_up.cuts();
}

PartitionCost partition_cost(std::span<const MicroBatch> batches) {
  PartitionCost cost{.micro_batches = static_cast<int64_t>(batches.size())};
  const ContextIndex index(batches);
  std::vector<int64_t> chain(batches.size());
  for (size_t m = 0; m < batches.size(); ++m) {
    chain[m] = batches[m].num_tokens + (batches[m].parent < 0 ? 0 : chain[batches[m].parent]);
    cost.peak_chain_tokens = std::max(cost.peak_chain_tokens, chain[m]);
    cost.context_tokens += context_tokens(index, static_cast<int64_t>(m));
  }
  return cost;
}

std::vector<MicroBatch> partition(const Forest& forest, int64_t token_budget, Merge merge) {
  const std::vector<int64_t> free_cuts = choose_cuts(forest, token_budget, true, merge);
  const std::vector<int64_t> node_cuts = choose_cuts(forest, token_budget, false, merge);
  std::vector<MicroBatch> best = partition_at(forest, free_cuts, token_budget, merge);
  if (node_cuts == free_cuts) return best;
  std::vector<MicroBatch> other = partition_at(forest, node_cuts, token_budget, merge);
  return partition_cost(other) < partition_cost(best) ? other : best;
}

}  // namespace espalier
