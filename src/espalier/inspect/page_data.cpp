// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page_data.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/inspect/chat_roles.h"

namespace espalier {
namespace {

using Json = nlohmann::ordered_json;

// The first words of every node are included first, then whole nodes up to the size limits.
constexpr int64_t kOpeningTokens = 24, kAllFirstBytes = 4 << 20, kAllTextBytes = 24 << 20;
// The page shows the first bytes of a name.
constexpr int64_t kNameBytes = 120, kAllNameBytes = 4 << 20;

std::string base64(std::string_view bytes) {
  static constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    for (size_t k = 0; k < 3; ++k)
      word = word << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0);
    for (size_t k = 0; k < 4; ++k) {
      text += i + k <= bytes.size() ? kDigits[word >> (18 - 6 * k) & 63] : '=';
    }
  }
  return text;
}

/// Numbers in LEB128: seven bits per byte, lowest first; the eighth bit marks that more follow.
class NumberColumn {
 public:
  void add(int64_t number) {
    ESPALIER_ASSERT(number >= 0);
    auto rest = static_cast<uint64_t>(number);
    for (; rest >= 0x80; rest >>= 7) bytes_ += static_cast<char>((rest & 0x7F) | 0x80);
    bytes_ += static_cast<char>(rest);
  }
  std::string text() const { return base64(bytes_); }

 private:
  std::string bytes_;
};

std::vector<int64_t> subtree_tokens(const Forest& forest) {
  std::vector<int64_t> tokens(forest.num_nodes());
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    tokens[n] = forest.node_begin[forest.subtree_last[n]] - forest.node_begin[n];
  }
  return tokens;
}

std::vector<int64_t> trained_tokens(const Trajectories& trajectories, const Forest& forest) {
  std::vector<bool> trained(forest.tree_tokens());
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    for (int64_t n = forest.end_node[row]; n >= 0; n = forest.parent[n]) {
      const int64_t flat = trajectories.offsets[row] + forest.position[n] - forest.node_begin[n];
      for (int64_t i = forest.node_begin[n]; i < forest.node_begin[n + 1]; ++i) {
        if (trajectories.loss_weights[flat + i] > 0) trained[i] = true;
      }
    }
  }
  std::vector<int64_t> counts(forest.num_nodes(), 0);
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    counts[n] =
        std::count(trained.begin() + forest.node_begin[n], trained.begin() + forest.node_begin[n + 1], true);
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
    const std::vector<int64_t> weights = subtree_tokens(forest);
    std::nth_element(
        held.nodes.begin(), held.nodes.begin() + kMostPageNodes, held.nodes.end(),
        [&](int64_t a, int64_t b) { return weights[a] != weights[b] ? weights[a] > weights[b] : a < b; });
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

/// The messages of tokens; without a vocabulary one message of their ids with unknown role.
std::vector<Message> messages_in(const Vocabulary* vocabulary, std::span<const int32_t> tokens,
                                 ChatState* state) {
  if (tokens.empty()) return {};
  if (vocabulary == nullptr) return {{.text = snippet(nullptr, tokens)}};
  std::string bytes;
  for (const int32_t token : tokens) bytes += vocabulary->bytes(token);
  return messages_of(bytes, state);
}

/// The columns and texts that come from decoded tokens.
class Speech {
 public:
  Speech(const Forest& forest, const std::vector<int64_t>& nodes, const Vocabulary* vocabulary)
      : forest_(forest), vocabulary_(vocabulary), texts_(Json::array()) {
    std::vector<int64_t> with_text(nodes.size(), 0);
    if (vocabulary != nullptr) with_text = tokens_with_text(forest, nodes, *vocabulary);
    // The chat's state at the end of each node on the path to the current one.
    std::vector<std::pair<int64_t, ChatState>> path;
    for (size_t k = 0; k < nodes.size(); ++k) {
      while (!path.empty() && path.back().first != forest.parent[nodes[k]]) path.pop_back();
      ChatState state = path.empty() ? ChatState() : path.back().second;
      texts_.push_back(text(nodes[k], with_text[k], state));
      add_spans(nodes[k], &state);
      path.emplace_back(nodes[k], std::move(state));
    }
  }

  void add_to(Json* tree) && {
    (*tree)["columns"]["shown"] = shown_.text();
    (*tree)["columns"]["spans"] = spans_.text();
    (*tree)["num_spans"] = num_spans_;
    (*tree)["span_columns"] = {{"role", span_role_.text()}, {"size", span_size_.text()}};
    (*tree)["roles"] = Json::array();
    for (const Role role : {Role::kUnknown, Role::kSystem, Role::kUser, Role::kAssistant, Role::kTool}) {
      (*tree)["roles"].push_back(to_string(role));
    }
    (*tree)["texts"] = std::move(texts_);
  }

 private:
  Json text(int64_t node, int64_t tokens, ChatState state) {
    shown_.add(tokens);
    Json parts = Json::array();
    for (const Message& message :
         messages_in(vocabulary_, tokens_of(forest_, node).first(static_cast<size_t>(tokens)), &state)) {
      parts.push_back(static_cast<int>(message.role));
      parts.push_back(message.text);
      parts.push_back(message.ended ? 1 : 0);
    }
    return parts;
  }

  /// Adds the role spans of a node. A token belongs to the message in which it begins.
  void add_spans(int64_t node, ChatState* state) {
    if (vocabulary_ == nullptr) return spans_.add(0);
    const auto ids = tokens_of(forest_, node);
    const std::vector<Message> messages = messages_in(vocabulary_, ids, state);
    size_t at = 0, bytes = 0;
    int64_t spans = 0;
    for (size_t m = 0; m < messages.size(); ++m) {
      const size_t end = m + 1 < messages.size() ? messages[m + 1].begin : std::string::npos, first = at;
      for (; at < ids.size() && bytes < end; ++at) bytes += vocabulary_->bytes(ids[at]).size();
      if (at == first) continue;
      span_role_.add(static_cast<int>(messages[m].role));
      span_size_.add(static_cast<int64_t>(at - first));
      ++spans;
    }
    spans_.add(spans);
    num_spans_ += spans;
  }

  const Forest& forest_;
  const Vocabulary* vocabulary_;
  NumberColumn shown_, spans_, span_role_, span_size_;
  int64_t num_spans_ = 0;
  Json texts_;
};

Json names_of(const Trajectories& trajectories, const Forest& forest, const PageNodes& held) {
  Json names = Json::array();
  for (size_t k = 0; k < held.nodes.size(); ++k) names.push_back(Json::array());
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

void add_losses(const std::vector<NodeLoss>& losses, Json* columns) {
  NumberColumn cause, other, begin, size;
  for (const NodeLoss& loss : losses) {
    cause.add(loss.cause);
    other.add(loss.other);
    begin.add(loss.begin);
    size.add(loss.end - loss.begin);
  }
  (*columns)["cause"] = cause.text();
  (*columns)["other"] = other.text();
  (*columns)["lost_begin"] = begin.text();
  (*columns)["lost"] = size.text();
}

void add_sizes(const PageContents& contents, const PageNodes& held, Json* columns) {
  const Forest& forest = contents.forest;
  const std::vector<int64_t> subtree = subtree_tokens(forest);
  const std::vector<int64_t> trained = trained_tokens(contents.trajectories, forest);
  const size_t num_nodes = subtree.size();
  std::vector<int64_t> depth(num_nodes, 0);
  std::vector<int64_t> ends(num_nodes, 0);
  std::vector<int64_t> hidden(num_nodes, 0);
  for (const int64_t n : forest.end_node) ++ends[n];
  for (const int64_t n : held.nodes) {
    hidden[n] += subtree[n] - forest.node_size(n);
    const int64_t parent = forest.parent[n];
    if (parent < 0) continue;
    depth[n] = depth[parent] + 1;
    hidden[parent] -= subtree[n];
  }
  NumberColumn up, size, multiplicity, end, train, hide;
  int64_t depth_before = -1;
  for (const int64_t n : held.nodes) {
    up.add(depth_before + 1 - depth[n]);
    depth_before = depth[n];
    size.add(forest.node_size(n));
    multiplicity.add(forest.multiplicity[n]);
    end.add(ends[n]);
    train.add(trained[n]);
    hide.add(hidden[n]);
  }
  *columns = {{"up", up.text()},    {"size", size.text()},     {"multiplicity", multiplicity.text()},
              {"ends", end.text()}, {"trained", train.text()}, {"hidden", hide.text()}};
}

/// The member "tree".
Json tree_to_json(const PageContents& contents, const PageNodes& held) {
  Json tree = {
      {"nodes", held.nodes.size()}, {"of", contents.forest.num_nodes()}, {"columns", Json::object()}};
  add_sizes(contents, held, &tree["columns"]);
  add_losses(losses_of(contents, held), &tree["columns"]);
  Speech(contents.forest, held.nodes, contents.vocabulary).add_to(&tree);
  tree["causes"] = Json::array();
  for (int i = 0; i < kNumCauses; ++i) tree["causes"].push_back(text_of(static_cast<Cause>(i)).word);
  tree["names"] = names_of(contents.trajectories, contents.forest, held);
  return tree;
}

Json messages_to_json(const std::vector<Message>& messages) {
  Json json = Json::array();
  for (const Message& message : messages) {
    json.push_back({to_string(message.role), message.text, message.opened, message.ended});
  }
  return json;
}

Json messages_of_example(const SharingExample& example, const Vocabulary* vocabulary, const PageNodes& held) {
  // Text before the place has the same role, unless there is a marker in between.
  ChatState state;
  std::vector<Message> before = messages_in(vocabulary, example.before, &state);
  if (before.size() <= 1 && state.role == Role::kUnknown && !state.in_header) state.role = example.role;
  if (before.size() == 1) before[0].role = state.role;
  const auto side = [&](int64_t node, const std::vector<int32_t>& differing,
                        const std::vector<int32_t>& after) {
    ChatState here = state;
    Json json = {{"node", held.index[node]}};
    json["differing"] = messages_to_json(messages_in(vocabulary, differing, &here));
    json["after"] = messages_to_json(messages_in(vocabulary, after, &here));
    return json;
  };
  return {{"before", messages_to_json(before)},
          {"left", side(example.left_node, example.left, example.left_after)},
          {"right", side(example.right_node, example.right, example.right_after)}};
}

/// The member "examples".
Json examples_to_json(const PageContents& contents, const PageNodes& held) {
  Json json = Json::array();
  for (const CauseReport& cause : contents.report.sharing.causes) {
    if (cause.divergences == 0) continue;  // as in the report
    json.push_back(Json::array());
    for (const SharingExample& example : cause.examples) {
      json.back().push_back(messages_of_example(example, contents.vocabulary, held));
    }
  }
  return json;
}

Json gains_to_json(const Gains& gains) {
  Json json = Json::array();
  for (const GainFigure& figure : gain_figures(gains)) {
    json.push_back({{"gain", figure.gain}, {"over", figure.over}, {"meaning", figure.meaning}});
  }
  return json;
}

}  // namespace

std::string page_data(const PageContents& contents) {
  const PageNodes held = nodes_of(contents.forest);
  return Json{{"title", contents.title},
              {"report", to_json(contents.report, contents.trajectories, contents.vocabulary)},
              {"gains", gains_to_json(contents.report.gains)},
              {"examples", examples_to_json(contents, held)},
              {"tree", tree_to_json(contents, held)}}
      .dump();
}

}  // namespace espalier
