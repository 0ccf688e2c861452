// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page_data.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "espalier/inspect/chat_roles.h"

namespace espalier {
namespace {

using Json = nlohmann::ordered_json;

// Of a larger forest, the nodes with the largest subtrees are kept.
constexpr int64_t kMostPageNodes = 200'000;
// The first words of every node are included first, then whole nodes up to the size limits.
constexpr int64_t kOpeningTokens = 24, kAllFirstBytes = 4 << 20, kAllTextBytes = 24 << 20;
// The page shows the first bytes of a name.
constexpr int64_t kNameBytes = 120, kAllNameBytes = 4 << 20;

int64_t subtree_tokens(const Forest& forest, int64_t n) {
  return forest.node_begin[forest.subtree_last[n]] - forest.node_begin[n];
}

/// For each node the tokens that some trajectory trains on.
std::vector<int64_t> trained_tokens(const Trajectories& trajectories, const Forest& forest) {
  std::vector<bool> trained(forest.tree_tokens());
  std::vector<int64_t> counts(forest.num_nodes(), 0);
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    for (int64_t n = forest.end_node[row]; n >= 0; n = forest.parent[n]) {
      const int64_t flat = trajectories.offsets[row] + forest.position[n] - forest.node_begin[n];
      for (int64_t i = forest.node_begin[n]; i < forest.node_begin[n + 1]; ++i) {
        if (trajectories.loss_weights[flat + i] <= 0 || trained[i]) continue;
        trained[i] = true;
        ++counts[n];
      }
    }
  }
  return counts;
}

/// The nodes of a forest that a page holds.
struct PageNodes {
  std::vector<int64_t> nodes;  // forest nodes, in preorder
  std::vector<int64_t> index;  // [num_nodes] index in `nodes` of every forest node; -1 if omitted
};

/// The kMostPageNodes nodes with the largest subtrees, and with each node its ancestors: a subtree is never
/// larger than its parent's, and of equal ones the earlier is kept.
PageNodes nodes_of(const Forest& forest) {
  PageNodes held;
  held.nodes.resize(forest.num_nodes());
  std::iota(held.nodes.begin(), held.nodes.end(), 0);
  if (forest.num_nodes() > kMostPageNodes) {
    const auto rank = [&](int64_t n) { return std::pair(-subtree_tokens(forest, n), n); };
    std::nth_element(held.nodes.begin(), held.nodes.begin() + kMostPageNodes, held.nodes.end(),
                     [&](int64_t a, int64_t b) { return rank(a) < rank(b); });
    held.nodes.resize(kMostPageNodes);
    std::sort(held.nodes.begin(), held.nodes.end());
  }
  held.index.assign(forest.num_nodes(), -1);
  for (int64_t k = 0; k < std::ssize(held.nodes); ++k) held.index[held.nodes[k]] = k;
  return held;
}

std::span<const int32_t> tokens_of(const Forest& forest, int64_t n) {
  return std::span(forest.tokens).subspan(forest.node_begin[n], forest.node_size(n));
}

/// The tokens whose text the page has, for each node that it holds. Nodes that represent the most tokens come
/// first.
std::vector<int64_t> tokens_with_text(const Forest& forest, const std::vector<int64_t>& nodes,
                                      const Vocabulary& vocabulary) {
  std::vector<int64_t> order(nodes.size()), tokens(nodes.size(), 0);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return forest.multiplicity[nodes[a]] * forest.node_size(nodes[a]) >
           forest.multiplicity[nodes[b]] * forest.node_size(nodes[b]);
  });
  const auto bytes_of = [&](std::span<const int32_t> ids) {
    int64_t bytes = 0;
    for (const int32_t id : ids) bytes += std::ssize(vocabulary.bytes(id));
    return bytes;
  };
  int64_t first_left = kAllFirstBytes, all_left = kAllTextBytes;
  for (const int64_t k : order) {
    const auto ids = tokens_of(forest, nodes[k]);
    const int64_t all = bytes_of(ids);
    if (all <= all_left) {
      tokens[k] = std::ssize(ids);
      all_left -= all;
    } else if (first_left > 0) {
      tokens[k] = std::min(kOpeningTokens, std::ssize(ids));
      first_left -= bytes_of(ids.first(tokens[k]));
    }
  }
  return tokens;
}

/// Roles and sizes in tokens of the messages of a node (see page_data.h). `state` is the state before it and
/// is advanced to its end.
Json spans_of(std::span<const int32_t> ids, const Vocabulary& vocabulary, ChatState* state) {
  Json spans = Json::array();
  int64_t begin = 0;
  for (int64_t i = 0; i < std::ssize(ids); ++i) {
    const Role role = state->role;
    int64_t left = static_cast<int64_t>(advance(vocabulary, ids[i], state));  // bytes of the marker
    if (left == 0) continue;
    int64_t end = i + 1;
    while (end > 0 && (left -= std::ssize(vocabulary.bytes(ids[end - 1]))) >= 0) --end;
    spans.push_back({to_string(role), end - begin});
    begin = end;
  }
  spans.push_back({to_string(state->role), std::ssize(ids) - begin});
  return spans;
}

/// The members of the tree that come from decoded tokens.
void add_speech(const Forest& forest, const PageNodes& held, const Vocabulary& vocabulary, Json* tree) {
  const std::vector<int64_t> shown = tokens_with_text(forest, held.nodes, vocabulary);
  Json texts = Json::array(), spans = Json::array();
  std::vector<ChatState> states(held.nodes.size());  // at the end of each node
  for (size_t k = 0; k < held.nodes.size(); ++k) {
    const int64_t parent = forest.parent[held.nodes[k]];
    if (parent >= 0) states[k] = states[held.index[parent]];
    const auto ids = tokens_of(forest, held.nodes[k]);
    const Json header = states[k].in_header ? Json(valid_utf8(states[k].tail)) : Json();
    texts.push_back({header, vocabulary.text(ids.first(shown[k]))});
    spans.push_back(spans_of(ids, vocabulary, &states[k]));
  }
  (*tree)["columns"]["shown"] = shown;
  (*tree)["texts"] = std::move(texts);
  (*tree)["spans"] = std::move(spans);
}

Json names_of(const Trajectories& trajectories, const Forest& forest, const PageNodes& held) {
  std::vector<std::vector<std::string>> names(held.nodes.size());
  int64_t left = kAllNameBytes;
  for (int64_t row = 0; row < trajectories.num_rows() && left > 0; ++row) {
    const int64_t k = held.index[forest.end_node[row]];
    if (k < 0) continue;
    std::string name = valid_utf8(trajectories.name(row));
    left -= std::min(std::ssize(name), kNameBytes);
    names[k].push_back(std::move(name));
  }
  return names;
}

/// The tokens of a node that are repeated although another branch has them.
struct NodeLoss {
  int64_t cause = 0;           // 1 + Cause of the branch that begins at the node; 0: none
  int64_t other = 0;           // 1 + the node that it diverged from
  int64_t begin = 0, end = 0;  // tokens of the node
};

std::vector<NodeLoss> losses_of(const PageContents& contents, const PageNodes& held) {
  const Forest& forest = contents.forest;
  std::vector<NodeLoss> losses(held.nodes.size());
  for (const LostSpan& lost : contents.report.sharing.lost) {
    for (int64_t n = forest.end_node[lost.row]; n >= lost.node; n = forest.parent[n]) {
      if (held.index[n] < 0) continue;
      NodeLoss& loss = losses[held.index[n]];
      if (n == lost.node) {
        loss.cause = static_cast<int64_t>(lost.cause) + 1;
        loss.other = held.index[lost.other] + 1;
      }
      const int64_t begin = std::max<int64_t>(0, lost.begin - forest.position[n]),
                    end = std::min(forest.node_size(n), lost.end - forest.position[n]);
      if (end <= begin) continue;
      loss.begin = loss.end == 0 ? begin : std::min(loss.begin, begin);
      loss.end = std::max(loss.end, end);
    }
  }
  return losses;
}

/// The member "tree".
Json tree_to_json(const PageContents& contents, const PageNodes& held) {
  const Forest& forest = contents.forest;
  Json tree = {{"of", forest.num_nodes()}, {"names", names_of(contents.trajectories, forest, held)}};
  const auto add = [&](const char* name, auto value) {
    std::vector<int64_t> column;
    column.reserve(held.nodes.size());
    for (const int64_t n : held.nodes) column.push_back(value(n));
    tree["columns"][name] = std::move(column);
  };
  const std::vector<int64_t> trained = trained_tokens(contents.trajectories, forest);
  std::vector<int64_t> ends(forest.num_nodes(), 0);
  for (const int64_t n : forest.end_node) ++ends[n];
  const std::vector<NodeLoss> losses = losses_of(contents, held);
  const auto loss = [&](int64_t n) -> const NodeLoss& { return losses[held.index[n]]; };
  add("parent", [&](int64_t n) { return forest.parent[n] < 0 ? -1 : held.index[forest.parent[n]]; });
  add("subtree", [&](int64_t n) { return subtree_tokens(forest, n); });
  add("size", [&](int64_t n) { return forest.node_size(n); });
  add("multiplicity", [&](int64_t n) { return forest.multiplicity[n]; });
  add("ends", [&](int64_t n) { return ends[n]; });
  add("trained", [&](int64_t n) { return trained[n]; });
  add("cause", [&](int64_t n) { return loss(n).cause; });
  add("other", [&](int64_t n) { return loss(n).other; });
  add("lost_begin", [&](int64_t n) { return loss(n).begin; });
  add("lost", [&](int64_t n) { return loss(n).end - loss(n).begin; });
  for (int i = 0; i < kNumCauses; ++i) tree["causes"].push_back(text_of(static_cast<Cause>(i)).word);
  if (contents.vocabulary != nullptr) add_speech(forest, held, *contents.vocabulary, &tree);
  return tree;
}

/// The member "examples".
Json examples_to_json(const PageContents& contents, const PageNodes& held) {
  Json json = Json::array();
  for (const CauseReport& cause : contents.report.sharing.causes) {
    if (cause.divergences == 0) continue;  // as in the report
    json.push_back(Json::array());
    for (const SharingExample& example : cause.examples) {
      json.back().push_back({held.index[example.left_node], held.index[example.right_node]});
    }
  }
  return json;
}

}  // namespace

std::string page_data(const PageContents& contents) {
  const PageNodes held = nodes_of(contents.forest);
  return Json{{"title", contents.title},
              {"report", to_json(contents.report, contents.trajectories, contents.vocabulary)},
              {"examples", examples_to_json(contents, held)},
              {"tree", tree_to_json(contents, held)}}
      .dump();
}

}  // namespace espalier
