// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/local_search.h"

#include <algorithm>
#include <array>
#include <utility>

#include "espalier/plan/multi_path.h"
#include "espalier/plan/range_minimum.h"

namespace espalier {
namespace {

constexpr int64_t kMaxItems = 12;
constexpr int64_t kWorkPerNeighbourhood = 5'000;
// How many of the parts with the most free tokens form neighbourhoods of two, and how many of three.
constexpr size_t kEmptiest = 12;
constexpr size_t kEmptiestTriples = 7;

/// A node of the tree that some leaves span. The leaves [first, last) of them lie below it.
struct SpanNode {
  int64_t first, last;
  int64_t path;  // L
  int64_t parent = -1;
  int64_t below = 0;  // tokens of its proper descendants
  int64_t part = -1;  // the part of all its leaves, -1: of several
  int64_t num_children = 0;
};

/// Preorder of the branching nodes and leaves of the tree that the leaves span. shared[k] is L of the deepest
/// node that leaf k shares with leaf k - 1 (the interval tree of an LCP array; Abouelhoda, Kurtz and
/// Ohlebusch, "Replacing suffix trees with enhanced suffix arrays", 2004).
std::vector<SpanNode> span_tree(const std::vector<int64_t>& path, const std::vector<int64_t>& shared,
                                const std::vector<int64_t>& part) {
  const auto count = static_cast<int64_t>(path.size());
  std::vector<SpanNode> nodes, open;
  for (int64_t k = 0; k <= count; ++k) {
    const int64_t depth = k == 0 || k == count ? 0 : shared[k];
    int64_t first = k - 1;
    while (!open.empty() && open.back().path > depth) {
      first = open.back().first;
      open.back().last = k;
      nodes.push_back(open.back());
      open.pop_back();
    }
    if (k == count) break;
    if (k > 0 && (open.empty() || open.back().path < depth))
      open.push_back({.first = first, .last = 0, .path = depth});
    open.push_back({.first = k, .last = 0, .path = path[k]});
  }
  std::sort(nodes.begin(), nodes.end(), [](const SpanNode& a, const SpanNode& b) {
    return a.first != b.first ? a.first < b.first : a.path < b.path;
  });
  const auto num_nodes = static_cast<int64_t>(nodes.size());
  for (int64_t n = 0, up = -1; n < num_nodes; up = n++) {
    while (up >= 0 && nodes[up].last <= nodes[n].first) up = nodes[up].parent;
    nodes[n].parent = up;
    if (up >= 0) ++nodes[up].num_children;
  }
  for (int64_t n = num_nodes - 1; n >= 0; --n) {
    SpanNode& node = nodes[n];
    if (node.num_children == 0) node.part = part[node.first];
    if (node.parent < 0) continue;
    SpanNode& up = nodes[node.parent];
    up.below += node.below + node.path - up.path;
    const bool last_child = node.last == up.last;
    up.part = last_child || up.part == node.part ? node.part : -1;
  }
  return nodes;
}

/// Which nodes become leaves of the small tree. Empty when there would be too many.
std::vector<bool> choose_items(const std::vector<SpanNode>& nodes) {
  std::vector<bool> is_item(nodes.size(), false);
  std::vector<int64_t> items;
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].part < 0 || (nodes[n].parent >= 0 && nodes[nodes[n].parent].part >= 0)) continue;
    items.push_back(static_cast<int64_t>(n));
    if (static_cast<int64_t>(items.size()) > kMaxItems) return {};
  }
  for (;;) {
    const auto opens = [&](int64_t n) {
      const int64_t more = nodes[n].num_children - 1;
      return more > 0 && static_cast<int64_t>(items.size()) + more <= kMaxItems ? nodes[n].below : -1;
    };
    const auto heaviest = std::max_element(items.begin(), items.end(),
                                           [&](int64_t a, int64_t b) { return opens(a) < opens(b); });
    if (opens(*heaviest) < 0) break;
    const int64_t n = *heaviest;
    items.erase(heaviest);
    for (int64_t c = n + 1; c < static_cast<int64_t>(nodes.size()) && nodes[c].first < nodes[n].last; ++c) {
      if (nodes[c].parent == n) items.push_back(c);
    }
  }
  for (const int64_t n : items) is_item[n] = true;
  return is_item;
}

/// The spanned tree with items as its leaves.
struct SmallTree {
  TokenTree tree;
  std::vector<std::pair<int64_t, int64_t>> item_leaves;  // per leaf of `tree`: the range of spanning leaves
};

SmallTree contract(const std::vector<SpanNode>& nodes, const std::vector<bool>& is_item) {
  SmallTree small;
  std::vector<int64_t> at(nodes.size(), -1);
  for (size_t n = 0; n < nodes.size(); ++n) {
    const int64_t up = nodes[n].parent;
    if (up >= 0 && (at[up] < 0 || is_item[up])) continue;
    at[n] = small.tree.num_nodes();
    small.tree.parent.push_back(up < 0 ? -1 : at[up]);
    const int64_t own = nodes[n].path - (up < 0 ? 0 : nodes[up].path);
    small.tree.size.push_back(own + (is_item[n] ? nodes[n].below : 0));
    if (is_item[n]) small.item_leaves.emplace_back(nodes[n].first, nodes[n].last);
  }
  return small;
}

class LocalSearch {
 public:
  LocalSearch(const LeafPaths& leaves, int64_t budget, const LeafParts& parts, int64_t work)
      : leaves_(leaves),
        shared_(leaves.shared),
        budget_(budget),
        tokens_(part_tokens(leaves, parts)),
        part_of_(leaves.num_leaves()),
        changed_(parts.num_rows(), 0),
        work_left_(work) {
    for (int64_t p = 0; p < parts.num_rows(); ++p) {
      members_.emplace_back(parts.row(p).begin(), parts.row(p).end());
      for (const int64_t k : members_.back()) part_of_[k] = p;
    }
  }

  LeafParts run() {
    work_left_ -= leaves_.num_leaves() / 8;
    bool improved = true;
    for (round_ = 1; improved && work_left_ > 0; ++round_) {
      improved = false;
      for (const Neighbourhood& parts : neighbourhoods()) {
        if (work_left_ <= 0) break;
        // A neighbourhood that was tried before cannot improve while its parts stay unchanged.
        if (std::none_of(parts.begin(), parts.end(),
                         [&](int64_t p) { return p >= 0 && changed_[p] + 1 >= round_; }))
          continue;
        if (solve(parts)) {
          improved = true;
          for (const int64_t p : parts) {
            if (p >= 0) changed_[p] = round_;
          }
        }
      }
    }
    return parts_from_labels(part_of_);
  }

 private:
  using Neighbourhood = std::array<int64_t, 3>;  // parts, ascending; the first may be -1

  struct Candidate {
    int64_t shared;  // L of the deepest node that the parts share
    Neighbourhood parts;
  };

  /// Neighbourhoods of parts that hold leaves close to each other in preorder.
  void add_adjacent(std::vector<Candidate>& candidates) const {
    std::array<int64_t, 3> recent{-1, -1, -1};  // the last different parts on the way through the leaves
    std::array<int64_t, 3> reach{0, 0, 0};      // L of the node shared back to each
    for (int64_t k = 0; k < leaves_.num_leaves(); ++k) {
      for (int64_t& r : reach) r = std::min(r, leaves_.shared[k]);
      const int64_t p = part_of_[k];
      const auto seen = std::find(recent.begin(), recent.end(), p) - recent.begin();
      for (int64_t a = 0; seen != 0 && a < 2; ++a) {
        if (recent[a] < 0 || recent[a] == p) continue;
        candidates.push_back({reach[a], sorted({-1, recent[a], p})});
        for (int64_t b = a + 1; b < 3; ++b) {
          if (recent[b] >= 0 && recent[b] != p)
            candidates.push_back({reach[b], sorted({recent[b], recent[a], p})});
        }
      }
      // Move p to the front.
      const int64_t last = std::min<int64_t>(seen, 2);
      for (int64_t a = last; a > 0; --a) {
        recent[a] = recent[a - 1];
        reach[a] = reach[a - 1];
      }
      recent[0] = p;
      reach[0] = leaves_.path[k];
    }
  }

  /// Neighbourhoods of the parts with the most free tokens.
  void add_emptiest(std::vector<Candidate>& candidates) const {
    const std::vector<int64_t> emptiest = emptiest_parts();
    for (size_t a = 0; a < emptiest.size(); ++a) {
      for (size_t b = a + 1; b < emptiest.size(); ++b) {
        candidates.push_back({0, sorted({-1, emptiest[a], emptiest[b]})});
        for (size_t c = b + 1; c < std::min(kEmptiestTriples, emptiest.size()); ++c) {
          candidates.push_back({0, sorted({emptiest[a], emptiest[b], emptiest[c]})});
        }
      }
    }
  }

  /// All neighbourhoods without repetition, those with the deepest shared nodes first.
  std::vector<Neighbourhood> neighbourhoods() const {
    std::vector<Candidate> candidates;
    add_adjacent(candidates);
    add_emptiest(candidates);
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return a.parts != b.parts ? a.parts < b.parts : a.shared > b.shared;
    });
    const auto last = std::unique(candidates.begin(), candidates.end(),
                                  [](const Candidate& a, const Candidate& b) { return a.parts == b.parts; });
    candidates.erase(last, candidates.end());
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return a.shared != b.shared ? a.shared > b.shared : a.parts < b.parts;
    });
    std::vector<Neighbourhood> distinct;
    distinct.reserve(candidates.size());
    for (const Candidate& c : candidates) distinct.push_back(c.parts);
    return distinct;
  }

  static Neighbourhood sorted(Neighbourhood parts) {
    std::sort(parts.begin(), parts.end());
    return parts;
  }

  std::vector<int64_t> emptiest_parts() const {
    std::vector<int64_t> order;
    for (size_t p = 0; p < members_.size(); ++p) {
      if (!members_[p].empty()) order.push_back(static_cast<int64_t>(p));
    }
    const size_t count = std::min(kEmptiest, order.size());
    std::partial_sort(
        order.begin(), order.begin() + static_cast<int64_t>(count), order.end(),
        [&](int64_t a, int64_t b) { return tokens_[a] != tokens_[b] ? tokens_[a] < tokens_[b] : a < b; });
    order.resize(count);
    return order;
  }

  /// A lower bound of the tokens of any packing of a tree with `below` tokens under a root path of `path`
  /// tokens: m parts hold at most m C tokens, and repeat the root path m - 1 times.
  int64_t fewest_tokens(int64_t path, int64_t below) const {
    const int64_t capacity = budget_ - path;
    const int64_t num_parts = below == 0 ? 1 : (below + capacity - 1) / capacity;
    return below + num_parts * path;
  }

  /// Repacks the leaves of these parts if that saves tokens.
  bool solve(const Neighbourhood& parts) {
    std::vector<int64_t> span;
    int64_t tokens = 0;
    for (const int64_t p : parts) {
      if (p < 0) continue;
      if (members_[p].empty()) return false;
      span.insert(span.end(), members_[p].begin(), members_[p].end());
      tokens += tokens_[p];
    }
    work_left_ -= 2 * static_cast<int64_t>(span.size()) + 50;
    std::sort(span.begin(), span.end());
    std::vector<int64_t> path, shared, part;
    for (size_t k = 0; k < span.size(); ++k) {
      path.push_back(leaves_.path[span[k]]);
      shared.push_back(k == 0 ? 0 : shared_(span[k - 1] + 1, span[k] + 1));
      part.push_back(part_of_[span[k]]);
    }
    const std::vector<SpanNode> nodes = span_tree(path, shared, part);
    if (fewest_tokens(nodes[0].path, nodes[0].below) >= tokens) return false;
    const std::vector<bool> is_item = choose_items(nodes);
    if (is_item.empty()) return false;
    const SmallTree small = contract(nodes, is_item);
    const MultiPathPacking packing = pack_multi_path(
        small.tree, budget_,
        {.upper_bound = tokens - 1, .work_limit = std::min(kWorkPerNeighbourhood, work_left_)});
    work_left_ -= packing.work;
    if (packing.outcome != MultiPathOutcome::kSolved) return false;
    replace(parts, span, small, packing.parts);
    return true;
  }

  void replace(const Neighbourhood& parts, const std::vector<int64_t>& span, const SmallTree& small,
               const LeafParts& packed) {
    const std::vector<int64_t> tokens = part_tokens(leaf_paths(small.tree), packed);
    std::vector<int64_t> free;  // part numbers to use
    for (const int64_t p : parts) {
      if (p < 0) continue;
      free.push_back(p);
      members_[p].clear();
      tokens_[p] = 0;
    }
    while (static_cast<int64_t>(free.size()) < packed.num_rows()) free.push_back(new_number());
    for (int64_t row = 0; row < packed.num_rows(); ++row) {
      const int64_t p = free[row];
      tokens_[p] = tokens[row];
      for (const int64_t item : packed.row(row)) {
        const auto [first, last] = small.item_leaves[item];
        members_[p].insert(members_[p].end(), span.begin() + first, span.begin() + last);
      }
      for (const int64_t k : members_[p]) part_of_[k] = p;
    }
    unused_.insert(unused_.end(), free.begin() + packed.num_rows(), free.end());
  }

  /// A number for an additional part: a packing with fewer tokens may have more parts. Numbers stay below the
  /// number of leaves, because a new number is created only if all others are in use.
  int64_t new_number() {
    if (unused_.empty()) {
      unused_.push_back(static_cast<int64_t>(members_.size()));
      members_.emplace_back();
      tokens_.push_back(0);
      changed_.push_back(0);
    }
    const int64_t p = unused_.back();
    unused_.pop_back();
    changed_[p] = round_;
    return p;
  }

  const LeafPaths& leaves_;
  RangeMinimum<int64_t> shared_;
  int64_t budget_;
  std::vector<std::vector<int64_t>> members_;  // leaves of each part
  std::vector<int64_t> tokens_;                // U of each part
  std::vector<int64_t> part_of_;
  std::vector<int64_t> unused_;   // parts without leaves
  std::vector<int64_t> changed_;  // the round in which the part last changed
  int64_t round_ = 0;
  int64_t work_left_;
};

}  // namespace

LeafParts improve_parts(const LeafPaths& leaves, int64_t budget, LeafParts parts, int64_t work) {
  if (work <= 0 || parts.num_rows() < 2) return parts;
  return LocalSearch(leaves, budget, parts, work).run();
}

}  // namespace espalier
