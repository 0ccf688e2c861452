// SPDX-License-Identifier: Apache-2.0
#include "tests/tree/naive.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

namespace espalier::testing {
namespace {

using Prefix = std::vector<uint64_t>;  // tree key, then token and merge key in turn

Prefix prefix_of(const Rows& rows, int64_t row, int64_t length) {
  Prefix prefix{rows.tree_keys.empty() ? 0 : static_cast<uint64_t>(rows.tree_keys[row])};
  for (int64_t t = 0; t < length; ++t) {
    const int64_t at = rows.tokens.offsets[row] + t;
    prefix.push_back(static_cast<uint64_t>(rows.tokens.values[at]));
    prefix.push_back(rows.merge_keys.empty() ? 0 : rows.merge_keys[at]);
  }
  return prefix;
}

struct PrefixFacts {
  int64_t trajectories = 0;
  int64_t ends = 0;
  int64_t token = -1;  // in the layout
  std::set<Prefix> children;
};

std::map<Prefix, PrefixFacts> find_prefixes(const Rows& rows, std::span<const int64_t> subset) {
  std::map<Prefix, PrefixFacts> prefixes;
  for (const int64_t row : subset) {
    const int64_t length = rows.tokens.row_size(row);
    for (int64_t t = 1; t <= length; ++t) {
      const Prefix prefix = prefix_of(rows, row, t);
      if (t > 1) prefixes[prefix_of(rows, row, t - 1)].children.insert(prefix);
      ++prefixes[prefix].trajectories;
      prefixes[prefix].ends += t == length;
    }
  }
  return prefixes;
}

#define REQUIRE_SAME(what, expected, received)                                                  \
  do {                                                                                          \
    const auto expected_value = (expected);                                                     \
    const auto received_value = (received);                                                     \
    if (!(expected_value == received_value))                                                    \
      return fmt::format("{}: expected {}, received {}", what, expected_value, received_value); \
  } while (false)

/// Which prefixes must begin a node: roots, and what follows a branching or an end.
std::string node_difference(const Rows& rows, std::span<const int64_t> subset,
                            const std::map<Prefix, PrefixFacts>& prefixes, const Forest& forest) {
  const std::set<int64_t> begins(forest.node_begin.begin(), forest.node_begin.end() - 1);
  REQUIRE_SAME("distinct node begins", static_cast<size_t>(forest.num_nodes()), begins.size());
  for (const int64_t row : subset) {
    for (int64_t t = 1; t <= rows.tokens.row_size(row); ++t) {
      const PrefixFacts& facts = prefixes.at(prefix_of(rows, row, t));
      bool begins_node = true;
      if (t > 1) {
        const PrefixFacts& before = prefixes.at(prefix_of(rows, row, t - 1));
        begins_node = before.ends > 0 || before.children.size() > 1;
      }
      REQUIRE_SAME(fmt::format("row {} position {} begins a node", row, t - 1), begins_node,
                   begins.contains(facts.token));
      const auto node = std::upper_bound(forest.node_begin.begin(), forest.node_begin.end(), facts.token) -
                        forest.node_begin.begin() - 1;
      REQUIRE_SAME("multiplicity", facts.trajectories, forest.multiplicity[node]);
      REQUIRE_SAME("position", t - 1, forest.position[node] + facts.token - forest.node_begin[node]);
    }
  }
  return "";
}

std::string order_difference(const Forest& forest) {
  std::vector<int64_t> first(forest.num_nodes(), -1), last_child(forest.num_nodes() + 1, -1);
  for (int64_t r = forest.num_trajectories() - 1; r >= 0; --r) {
    for (int64_t n = forest.end_node[r]; n >= 0; n = forest.parent[n]) first[n] = r;
  }
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    int64_t& before = last_child[forest.parent[n] + 1];
    if (before >= 0 && first[before] >= first[n]) return fmt::format("node {}: siblings out of order", n);
    before = n;
    int64_t descendants = 0;
    for (int64_t m = n; m < forest.num_nodes(); ++m) {
      int64_t above = m;
      while (above > n) above = forest.parent[above];
      descendants += above == n;
    }
    REQUIRE_SAME("subtree_last", n + descendants, forest.subtree_last[n]);
  }
  return "";
}

/// Path vectors of "Prompt Trees" (Training-time Prefix Caching, 2025): bit k of row n says whether node k is
/// on the root path of node n. Row-major, ceil(num_nodes / 64) words a row.
std::vector<uint64_t> path_vectors(const Forest& forest) {
  const int64_t num_nodes = forest.num_nodes();
  const int64_t chunks = (num_nodes + 63) / 64;
  std::vector<uint64_t> bits(num_nodes * chunks, 0);
  for (int64_t n = 0; n < num_nodes; ++n) {
    uint64_t* row = bits.data() + n * chunks;
    if (forest.parent[n] >= 0) std::copy_n(bits.data() + forest.parent[n] * chunks, chunks, row);
    row[n / 64] |= uint64_t{1} << (n % 64);
  }
  return bits;
}

std::string path_vector_difference(const Forest& forest, const Layout& layout) {
  const std::vector<uint64_t> bits = path_vectors(forest);
  const int64_t chunks = (forest.num_nodes() + 63) / 64;
  std::vector<int64_t> node_of;
  for (int64_t n = 0; n < forest.num_nodes(); ++n) node_of.resize(node_of.size() + forest.node_size(n), n);
  for (int64_t j = 0; j < layout.num_tokens(); ++j) {
    for (int64_t i = 0; i < layout.num_tokens(); ++i) {
      bool covers = i <= j;
      for (int64_t c = 0; c < chunks; ++c) {
        const uint64_t key = bits[node_of[i] * chunks + c], query = bits[node_of[j] * chunks + c];
        covers = covers && (key & query) == key;
      }
      REQUIRE_SAME(fmt::format("path vector mask ({}, {})", j, i), i <= j && j < layout.subtree_end[i],
                   covers);
    }
  }
  return "";
}

}  // namespace

Rows make_rows(const std::vector<std::vector<int32_t>>& rows) {
  Rows result;
  for (const auto& row : rows) result.tokens.push_row(row);
  return result;
}

Rows random_rows(Rng& rng) {
  Rows rows;
  const int64_t num_rows = rng.between(1, 12), vocab = rng.between(1, 4), longest = rng.between(1, 14);
  const bool merge_keys = rng.below(3) == 0, tree_keys = rng.below(3) == 0;
  std::vector<uint64_t>& keys = rows.merge_keys;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t copied = r > 0 && rng.below(3) > 0 ? rng.below(r) : -1;
    const int64_t begin = rows.tokens.offsets.back();
    const int64_t length = rng.between(1, longest);
    const int64_t shared = copied < 0 ? 0 : rng.between(0, std::min(length, rows.tokens.row_size(copied)));
    for (int64_t t = 0; t < length; ++t) {
      const int64_t source = copied < 0 ? 0 : rows.tokens.offsets[copied] + t;
      rows.tokens.values.push_back(t < shared ? rows.tokens.values[source]
                                              : static_cast<int32_t>(rng.below(vocab)));
      if (merge_keys)
        keys.push_back(t < shared && rng.below(20) > 0 ? keys[source] : rng.next() << (rng.below(2) * 32));
    }
    if (rng.below(6) == 0 && copied >= 0) {  // an exact duplicate
      rows.tokens.values.resize(begin);
      if (merge_keys) keys.resize(begin);
      for (int64_t at = rows.tokens.offsets[copied]; at < rows.tokens.offsets[copied + 1]; ++at) {
        rows.tokens.values.push_back(rows.tokens.values[at]);
        if (merge_keys) keys.push_back(keys[at]);
      }
    }
    rows.tokens.end_row();
    if (tree_keys) rows.tree_keys.push_back(rng.between(-2, 1));
  }
  return rows;
}

std::vector<int64_t> random_subset(Rng& rng, const Rows& rows) {
  std::vector<int64_t> all;
  for (int64_t r = 0; r < rows.tokens.num_rows(); ++r) all.push_back(r);
  if (rng.below(3) > 0) return all;
  for (size_t k = 0; k + 1 < all.size(); ++k) {
    std::swap(all[k], all[rng.between(static_cast<int64_t>(k), static_cast<int64_t>(all.size()) - 1)]);
  }
  all.resize(rng.between(1, static_cast<int64_t>(all.size())));
  return all;
}

std::string layout_difference(const Rows& rows, std::span<const int64_t> subset, const Layout& layout,
                              std::span<const int64_t> end_run) {
  const int64_t num_tokens = layout.num_tokens();
  std::vector<std::vector<char>> visible(num_tokens, std::vector<char>(num_tokens, 0));
  std::vector<char> used(num_tokens, 0);
  for (size_t r = 0; r < subset.size(); ++r) {
    const auto row = rows.tokens.row(subset[r]);
    const std::vector<int64_t> path = path_tokens(layout, end_run[r]);
    REQUIRE_SAME(fmt::format("length of trajectory {}", r), row.size(), path.size());
    for (size_t t = 0; t < path.size(); ++t) {
      const int64_t j = path[t];
      REQUIRE_SAME("input id", row[t], layout.input_ids[j]);
      REQUIRE_SAME("position id", static_cast<int32_t>(t), layout.position_ids[j]);
      REQUIRE_SAME("prev", static_cast<int32_t>(t == 0 ? -1 : path[t - 1]), layout.prev[j]);
      for (size_t s = 0; s <= t; ++s) visible[j][path[s]] = 1;
      used[j] = 1;
    }
  }
  for (int64_t j = 0; j < num_tokens; ++j) {
    if (!used[j]) return fmt::format("token {} is on no trajectory", j);
    for (int64_t i = 0; i < num_tokens; ++i) {
      REQUIRE_SAME(fmt::format("mask ({}, {})", j, i), visible[j][i] == 1,
                   i <= j && j < layout.subtree_end[i]);
    }
  }
  return "";
}

std::string difference_from_naive(const Rows& rows, std::span<const int64_t> subset, const Forest& forest) {
  std::map<Prefix, PrefixFacts> prefixes = find_prefixes(rows, subset);
  REQUIRE_SAME("trajectories", static_cast<int64_t>(subset.size()), forest.num_trajectories());
  REQUIRE_SAME("tree tokens", static_cast<int64_t>(prefixes.size()), forest.tree_tokens());
  const Layout layout = make_layout(forest, whole_forest(forest));
  if (std::string fault = layout_difference(rows, subset, layout, forest.end_node); !fault.empty())
    return fault;
  std::map<int64_t, Prefix> prefix_at;
  for (size_t r = 0; r < subset.size(); ++r) {
    const std::vector<int64_t> path = path_tokens(layout, forest.end_node[r]);
    REQUIRE_SAME("trajectory_size", static_cast<int64_t>(path.size()), forest.trajectory_size(r));
    for (size_t t = 0; t < path.size(); ++t) {
      const Prefix prefix = prefix_of(rows, subset[r], static_cast<int64_t>(t) + 1);
      const bool same = prefix_at.try_emplace(path[t], prefix).first->second == prefix;
      if (!same) return fmt::format("token {} stands for two prefixes", path[t]);
      prefixes.at(prefix).token = path[t];
    }
  }
  REQUIRE_SAME("prefixes in the forest", prefixes.size(), prefix_at.size());
  int64_t flat = 0;
  for (const int64_t row : subset) flat += rows.tokens.row_size(row);
  REQUIRE_SAME("flat tokens", flat, forest.flat_tokens());
  if (std::string fault = node_difference(rows, subset, prefixes, forest); !fault.empty()) return fault;
  if (std::string fault = order_difference(forest); !fault.empty()) return fault;
  return path_vector_difference(forest, layout);
}

#undef REQUIRE_SAME

}  // namespace espalier::testing
