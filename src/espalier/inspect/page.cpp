// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/page.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/inspect/page_template.h"

namespace espalier {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kTextTokens = 24, kTextBytes = 90, kAllTextBytes = 4 << 20;
constexpr int64_t kNamesPerNode = 2, kNameBytes = 40, kAllNameBytes = 2 << 20;

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

/// Numbers in seven bits per byte, the lowest first; the eighth bit says that more follow (LEB128).
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

/// The `most` nodes with the largest subtrees, in preorder. A subtree is never larger than its parent's, and
/// of equal ones the earlier is kept, so the ancestors of a kept node are kept too.
std::vector<int64_t> kept_nodes(const std::vector<int64_t>& weights, int64_t most) {
  std::vector<int64_t> nodes(weights.size());
  std::iota(nodes.begin(), nodes.end(), 0);
  if (std::ssize(nodes) <= most) return nodes;
  std::nth_element(nodes.begin(), nodes.begin() + most, nodes.end(), [&](int64_t a, int64_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  });
  nodes.resize(most);
  std::sort(nodes.begin(), nodes.end());
  return nodes;
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

/// At most `most` bytes of valid UTF-8.
std::string cut(std::string text, int64_t most) {
  if (std::ssize(text) <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;
  return text.substr(0, most) + "\xE2\x80\xA6";
}

Json texts_of(const Forest& forest, const std::vector<int64_t>& nodes, const Vocabulary* vocabulary) {
  std::vector<std::string> texts(nodes.size());
  if (vocabulary != nullptr) {
    // Nodes that represent the most tokens come first.
    std::vector<int64_t> order(nodes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return forest.multiplicity[nodes[a]] * forest.node_size(nodes[a]) >
             forest.multiplicity[nodes[b]] * forest.node_size(nodes[b]);
    });
    int64_t left = kAllTextBytes;
    for (const int64_t k : order) {
      if (left <= 0) break;
      const auto tokens = std::span(forest.tokens).subspan(forest.node_begin[nodes[k]]);
      const auto most = std::min<int64_t>(kTextTokens, forest.node_size(nodes[k]));
      texts[k] = cut(vocabulary->text(tokens.first(most)), kTextBytes);
      left -= std::ssize(texts[k]);
    }
  }
  return texts;
}

Json names_of(const Trajectories& trajectories, const Forest& forest, const std::vector<int64_t>& nodes) {
  std::vector<int64_t> kept(forest.num_nodes(), -1);
  for (int64_t k = 0; k < std::ssize(nodes); ++k) kept[nodes[k]] = k;
  std::vector<std::string> names(nodes.size());
  std::vector<int8_t> count(nodes.size(), 0);
  int64_t left = kAllNameBytes;
  for (int64_t row = 0; row < trajectories.num_rows() && left > 0; ++row) {
    const int64_t k = kept[forest.end_node[row]];
    if (k < 0 || count[k] == kNamesPerNode) continue;
    const std::string name = cut(valid_utf8(trajectories.name(row)), kNameBytes);
    names[k] += (count[k]++ > 0 ? ", " : "") + name;
    left -= std::ssize(name);
  }
  return names;
}

Json tree_to_json(const Trajectories& trajectories, const Forest& forest, const Vocabulary* vocabulary) {
  const std::vector<int64_t> subtree = subtree_tokens(forest);
  const std::vector<int64_t> nodes = kept_nodes(subtree, kMostPageNodes);
  const std::vector<int64_t> trained = trained_tokens(trajectories, forest);
  std::vector<int64_t> depth(forest.num_nodes(), 0), ends(forest.num_nodes(), 0),
      hidden(forest.num_nodes(), 0);
  for (const int64_t n : forest.end_node) ++ends[n];
  for (const int64_t n : nodes) hidden[n] = subtree[n] - forest.node_size(n);
  for (const int64_t n : nodes) {
    if (forest.parent[n] < 0) continue;
    depth[n] = depth[forest.parent[n]] + 1;
    hidden[forest.parent[n]] -= subtree[n];
  }
  NumberColumn up, size, multiplicity, end, train, hide;
  int64_t depth_before = -1;
  for (const int64_t n : nodes) {
    up.add(depth_before + 1 - depth[n]);
    depth_before = depth[n];
    size.add(forest.node_size(n));
    multiplicity.add(forest.multiplicity[n]);
    end.add(ends[n]);
    train.add(trained[n]);
    hide.add(hidden[n]);
  }
  return {{"nodes", nodes.size()},
          {"of", forest.num_nodes()},
          {"columns",
           {{"up", up.text()},
            {"size", size.text()},
            {"multiplicity", multiplicity.text()},
            {"ends", end.text()},
            {"trained", train.text()},
            {"hidden", hide.text()}}},
          {"texts", texts_of(forest, nodes, vocabulary)},
          {"names", names_of(trajectories, forest, nodes)}};
}

/// JSON that may stand inside a script element: nothing in it can end the element or start a comment.
std::string for_script(const Json& json) {
  const std::string text = json.dump();
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

}  // namespace

std::string inspect_page(const std::string& file, const nlohmann::ordered_json& report,
                         const Trajectories& trajectories, const Forest& forest,
                         const Vocabulary* vocabulary) {
  const Json data = {{"file", valid_utf8(file)},
                     {"report", report},
                     {"tree", tree_to_json(trajectories, forest, vocabulary)}};
  constexpr std::string_view kSlot = "{{data}}";
  const size_t slot = kInspectPage.find(kSlot);
  ESPALIER_ASSERT(slot != std::string_view::npos);
  std::string page(kInspectPage.substr(0, slot));
  page += for_script(data);
  page += kInspectPage.substr(slot + kSlot.size());
  return page;
}

}  // namespace espalier
