// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/sharing.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/interrupt.h"

namespace espalier {
namespace {

constexpr int64_t kRun = 8;
// Number of hashes stored of the first tokens, which may be all that two sequences share, and of the whole
// window.
constexpr int64_t kKept = 4, kFirstTokens = 64;

uint64_t hash_of(std::span<const int32_t> run) {
  uint64_t hash = 0;
  for (const int32_t token : run) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

std::vector<uint64_t> sketch_of(std::span<const int32_t> tokens) {
  tokens = tokens.first(std::min<size_t>(tokens.size(), kAlikeWindow));
  std::vector<uint64_t> hashes;
  for (int64_t i = 0; i + kRun <= std::ssize(tokens); ++i) hashes.push_back(hash_of(tokens.subspan(i, kRun)));
  const auto keep_smallest = [&](int64_t among) {
    std::vector<uint64_t> some(hashes.begin(), hashes.begin() + std::min(among, std::ssize(hashes)));
    const auto kept = some.begin() + std::min(kKept, std::ssize(some));
    std::partial_sort(some.begin(), kept, some.end());
    some.erase(kept, some.end());
    return some;
  };
  std::vector<uint64_t> sketch = keep_smallest(kFirstTokens), rest = keep_smallest(kAlikeWindow);
  sketch.insert(sketch.end(), rest.begin(), rest.end());
  return sketch;
}

constexpr int64_t kNone = -1, kSeveral = -2;
constexpr int64_t kMostCandidates = 8;
constexpr int64_t kMostBranches = 16;
constexpr int64_t kMostGroups = 4096;
constexpr int64_t kFixedWork = 32 << 20;
// A prompt of another group must be equal for this many tokens after a detail, and for this many times the
// detail's length; otherwise it is another task. (Different tasks may also share instructions after the
// question, but shorter ones.)
constexpr int64_t kOtherGroupGoesOn = 32, kOtherGroupTimes = 4;
constexpr size_t kLongestValue = 80;

/// What the trajectories through each node have in common.
struct NodeFacts {
  std::vector<int64_t> group;    // kSeveral where they differ
  std::vector<int64_t> longest;  // row
  std::vector<uint8_t> trained;  // whether one of them trains on the node's first token
  bool masked = false;           // some token after the first of a row carries no loss
};

std::vector<int64_t> groups_of_rows(const Trajectories& trajectories) {
  std::vector<int64_t> groups(trajectories.num_rows(), 0);
  if (trajectories.group_id.empty()) return groups;
  std::unordered_map<std::string, int64_t> numbers;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    groups[row] = numbers.emplace(trajectories.group_id[row], std::ssize(numbers)).first->second;
  }
  return groups;
}

void mark_trained(const Trajectories& trajectories, const Forest& forest, NodeFacts* facts) {
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const int64_t begin = trajectories.offsets[row];
    for (int64_t n = forest.end_node[row]; n >= 0; n = forest.parent[n]) {
      if (trajectories.loss_weights[begin + forest.position[n]] > 0) facts->trained[n] = 1;
    }
    for (int64_t i = begin + 1; i < trajectories.offsets[row + 1] && !facts->masked; ++i) {
      facts->masked = !(trajectories.loss_weights[i] > 0);
    }
  }
}

NodeFacts gather_facts(const Trajectories& trajectories, const Forest& forest) {
  const int64_t num_nodes = forest.num_nodes();
  NodeFacts facts{std::vector<int64_t>(num_nodes, kNone), std::vector<int64_t>(num_nodes, kNone),
                  std::vector<uint8_t>(num_nodes, 0)};
  const auto join = [&](int64_t n, int64_t group, int64_t row) {
    facts.group[n] = facts.group[n] == kNone || facts.group[n] == group ? group : kSeveral;
    const int64_t other = facts.longest[n];
    if (other == kNone || trajectories.row_size(row) > trajectories.row_size(other)) facts.longest[n] = row;
  };
  const std::vector<int64_t> groups = groups_of_rows(trajectories);
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) join(forest.end_node[row], groups[row], row);
  for (int64_t n = num_nodes - 1; n >= 0; --n) {
    if (forest.parent[n] >= 0) join(forest.parent[n], facts.group[n], facts.longest[n]);
  }
  mark_trained(trajectories, forest, &facts);
  return facts;
}

std::vector<int32_t> copy(std::span<const int32_t> tokens, int64_t begin, int64_t size) {
  begin = std::min<int64_t>(begin, std::ssize(tokens));
  const auto part =
      tokens.subspan(begin, std::min<int64_t>({size, SharingExample::kSnippet, std::ssize(tokens) - begin}));
  return {part.begin(), part.end()};
}

class Analysis {
 public:
  Analysis(const Trajectories& trajectories, const Forest& forest, const SharingOptions& options)
      : trajectories_(trajectories),
        forest_(forest),
        options_(options),
        facts_(gather_facts(trajectories, forest)) {
    work_left_ = options.work > 0 ? options.work : kFixedWork + 4 * trajectories.num_tokens();
    context_.vocabulary = options.vocabulary;
    context_.masked = facts_.masked;
    pools_.assign(kNumCauses, ExamplePool(options.examples));
  }

  SharingReport run() {
    std::vector<int64_t> roots;
    for (int64_t n = 0; n < forest_.num_nodes(); n = forest_.subtree_last[n]) roots.push_back(n);
    examine(roots);
    // The chat's state at the end of each node on the path to the current one.
    std::vector<std::pair<int64_t, ChatState>> path;
    std::vector<int64_t> children;
    for (int64_t n = 0; n < forest_.num_nodes(); ++n) {
      while (!path.empty() && path.back().first != forest_.parent[n]) path.pop_back();
      if (forest_.subtree_last[n] == n + 1) continue;
      ChatState state = path.empty() ? ChatState() : path.back().second;
      if (options_.vocabulary != nullptr) {
        for (int64_t i = forest_.node_begin[n]; i < forest_.node_begin[n + 1]; ++i) {
          advance(*options_.vocabulary, forest_.tokens[i], &state);
        }
      }
      children.clear();
      for (int64_t child = n + 1; child < forest_.subtree_last[n]; child = forest_.subtree_last[child]) {
        children.push_back(child);
      }
      context_.chat = state;
      examine(children);
      path.emplace_back(n, std::move(state));
    }
    for (size_t i = 0; i < pools_.size(); ++i) report_.causes[i].examples = pools_[i].chosen();
    return std::move(report_);
  }

 private:
  /// Examines a place, whose branches are `children`.
  void examine(std::vector<int64_t>& children) {
    if (children.size() < 2) return;
    ++report_.places;
    report_.divergences += std::ssize(children) - 1;
    // Children with several groups come first, then group by group; within each, the largest first.
    std::sort(children.begin(), children.end(), [this](int64_t a, int64_t b) {
      if (facts_.group[a] != facts_.group[b]) return facts_.group[a] < facts_.group[b];
      if (forest_.multiplicity[a] != forest_.multiplicity[b])
        return forest_.multiplicity[a] > forest_.multiplicity[b];
      return a < b;
    });
    set_text_before(children.front());
    std::array<bool, kNumCauses> seen{};
    int64_t several_end = 0;
    while (several_end < std::ssize(children) && facts_.group[children[several_end]] == kSeveral)
      ++several_end;
    const bool one_group =
        several_end == 0 && facts_.group[children.front()] == facts_.group[children.back()];
    AlikeIndex alike;
    int64_t group_begin = 0;
    for (int64_t i = 0; i < std::ssize(children); ++i) {
      check_interrupt();
      if (i > 0 && facts_.group[children[i]] != facts_.group[children[i - 1]]) group_begin = i;
      mates_.clear();
      for (int64_t j = 0; j < std::min({i, several_end, kMostCandidates}); ++j) mates_.push_back(children[j]);
      for (int64_t j = std::max(group_begin, several_end); j < std::min(i, group_begin + kMostCandidates);
           ++j) {
        mates_.push_back(children[j]);
      }
      if (several_end > 0) drop_other_groups(children[i]);
      others_.clear();
      if (!one_group) look_for_alike(children[i], &alike);
      if (i > 0) part(children[i], &seen);
    }
  }

  /// Sets the text before the place at which `child` begins.
  void set_text_before(int64_t child) {
    if (context_.vocabulary == nullptr) return;
    const int64_t position = forest_.position[child], size = std::min(position, kWordTokens);
    const auto tokens = trajectories_.row(facts_.longest[child]).subspan(position - size, size);
    context_.before = context_.vocabulary->text(tokens);
  }

  /// Sets others_ to similar earlier children that are not mates, and adds the child to the index.
  void look_for_alike(int64_t child, AlikeIndex* alike) {
    if (work_left_ <= 0) return;
    const auto tokens = trajectories_.row(facts_.longest[child]).subspan(forest_.position[child]);
    others_ = alike->find(tokens);
    std::erase_if(others_, [this](int64_t other) {
      return std::find(mates_.begin(), mates_.end(), other) != mates_.end();
    });
    alike->add(tokens, child);
    work_left_ -= 2 * std::min(kAlikeWindow, std::ssize(tokens));
  }

  /// Keeps only mates that have, or may have, a group in common with the child.
  void drop_other_groups(int64_t child) {
    const auto groups = groups_below(child);
    if (!groups) return;
    const std::unordered_set<int64_t> known(groups->begin(), groups->end());
    std::erase_if(mates_, [&](int64_t candidate) {
      const auto others = groups_below(candidate);
      if (!others) return false;
      return std::none_of(others->begin(), others->end(),
                          [&](int64_t group) { return known.contains(group); });
    });
  }

  /// The groups of the trajectories through n; nullopt if there are too many, or the nodes below do not tell
  /// them.
  std::optional<std::vector<int64_t>> groups_below(int64_t n) {
    std::vector<int64_t> groups;
    int64_t counted = 0;
    for (int64_t m = n; m < forest_.subtree_last[n];) {
      if (--work_left_ <= 0 || std::ssize(groups) == kMostGroups) return std::nullopt;
      if (facts_.group[m] == kSeveral) {
        ++m;
        continue;
      }
      groups.push_back(facts_.group[m]);
      counted += forest_.multiplicity[m];
      m = forest_.subtree_last[m];
    }
    if (counted < forest_.multiplicity[n]) return std::nullopt;
    return groups;
  }

  struct Found {
    Divergence divergence{.cause = Cause::kOtherGroup};
    int64_t left = kNone, right = kNone;  // rows
    int64_t left_node = kNone, right_node = kNone;
    int64_t tokens = 0;  // lost
    bool between_groups = false;
    std::vector<LostSpan> histories = {};  // of find_history
  };

  static bool better(const Found& found, const Found& than) {
    if (than.left == kNone) return true;
    return is_lost(found.divergence.cause) && (!is_lost(than.divergence.cause) || found.tokens > than.tokens);
  }

  /// Finds why `child` diverges from the mate that it has most in common with, or else from siblings of other
  /// groups.
  void part(int64_t child, std::array<bool, kNumCauses>* seen) {
    Found best;
    for (const int64_t mate : mates_) {
      if (work_left_ <= 0) break;
      Found found = compare_rows(mate, facts_.longest[mate], child, facts_.longest[child]);
      find_history(mate, child, &found);
      if (better(found, best)) best = found;
    }
    if (!is_lost(best.divergence.cause)) part_from_others(child, &best);
    if (best.left == kNone && work_left_ <= 0) {
      ++report_.not_examined;
      return;
    }
    const auto index = static_cast<size_t>(best.divergence.cause);
    CauseReport& cause = report_.causes[index];
    cause.places += !(*seen)[index];
    (*seen)[index] = true;
    ++cause.divergences;
    cause.tokens += best.tokens;
    if (best.between_groups) cause.tokens_between_groups += best.tokens;
    if (best.left == kNone) return;
    keep_values(best, forest_.position[child], &cause.values);
    keep_example(best, forest_.position[child], &pools_[index]);
    keep_lost(best, forest_.position[child]);
  }

  /// Replaces `best` by the loss between the child and siblings of other groups, if there is one.
  void part_from_others(int64_t child, Found* best) {
    for (const int64_t other : others_) {
      if (work_left_ <= 0) break;
      Found found = compare_rows(other, facts_.longest[other], child, facts_.longest[child]);
      found.between_groups = true;
      if (lost_between_groups(found.divergence) && better(found, *best)) *best = found;
      // Samples of one prompt that is in two groups.
      if (best->left == kNone && found.divergence.cause == Cause::kSampling) *best = found;
    }
  }

  bool lost_between_groups(const Divergence& divergence) const {
    switch (divergence.cause) {
      case Cause::kRetokenised:
      case Cause::kThinking:
      case Cause::kRoutes:
        return true;
      case Cause::kTimestamp:
      case Cause::kIdentifier:
        if (context_.chat.role == Role::kSystem) return true;
        break;
      default:
        if (!is_lost(divergence.cause)) return false;
    }
    const int64_t detail = std::max(divergence.left_size, divergence.right_size);
    return divergence.common >= std::max(kOtherGroupGoesOn, kOtherGroupTimes * detail);
  }

  Found compare_rows(int64_t left, int64_t left_row, int64_t right, int64_t right_row) {
    const Divergence divergence = compare(context_, side(left, left_row), side(right, right_row));
    work_left_ -= divergence.work;
    return {.divergence = divergence,
            .left = left_row,
            .right = right_row,
            .left_node = left,
            .right_node = right,
            .tokens = is_lost(divergence.cause) ? divergence.common : 0};
  }

  /// Searches for text sampled on one side in the history of the other.
  void find_history(int64_t left, int64_t right, Found* found) {
    const Role role = context_.chat.role;
    if (context_.vocabulary == nullptr || (role != Role::kAssistant && role != Role::kUnknown)) return;
    if (found->divergence.cause == Cause::kRoutes) return;
    context_.history_only = true;
    Found all;
    covered_.clear();
    const std::vector<int64_t> left_rows = rows_below(left), right_rows = rows_below(right);
    for (const int64_t row : right_rows) add_history(left, left_rows, right, row, &all);
    // Without a mask either side may be the history, so one direction suffices.
    for (const int64_t row : left_rows) {
      if (facts_.masked) add_history(right, right_rows, left, row, &all);
    }
    context_.history_only = false;
    if (all.left != kNone && better(all, *found)) *found = std::move(all);
  }

  /// Adds the tokens of `row`, which does not train on the place and passes through `node`, after the best
  /// matching sample.
  void add_history(int64_t other, const std::vector<int64_t>& samples, int64_t node, int64_t row,
                   Found* all) {
    const int64_t position = forest_.position[node];
    if (facts_.masked && trains(row, position)) return;
    Found best;
    for (const int64_t sample : samples) {
      if (work_left_ <= 0) break;
      if (facts_.masked && !trains(sample, position)) continue;
      const Found found = compare_rows(other, sample, node, row);
      if (better(found, best)) best = found;
    }
    if (!is_lost(best.divergence.cause)) return;
    const int64_t begin = position + best.divergence.right_size;
    const int64_t tokens = all->tokens + cover(row, begin, best.divergence.common);
    std::vector<LostSpan> histories = std::move(all->histories);
    histories.push_back(
        {best.divergence.cause, node, other, row, begin, position + best.divergence.right_end});
    if (better(best, *all)) *all = std::move(best);
    all->tokens = tokens;
    all->histories = std::move(histories);
  }

  /// Counts the tokens [begin, begin + size) of a row that no earlier row shares with it.
  int64_t cover(int64_t row, int64_t begin, int64_t size) {
    const auto tokens = trajectories_.row(row);
    int64_t shared = 0;
    for (const Covered& earlier : covered_) {
      const auto others = trajectories_.row(earlier.row);
      const auto most = std::min({begin + size, earlier.end, std::ssize(others)});
      const int64_t common =
          std::mismatch(tokens.begin(), tokens.begin() + most, others.begin()).first - tokens.begin();
      shared = std::max(shared, common - std::max(begin, earlier.begin));
      work_left_ -= common;
    }
    covered_.push_back({row, begin, begin + size});
    return size - shared;
  }

  /// The longest trajectories of the first branches below n, breadth first.
  std::vector<int64_t> rows_below(int64_t n) const {
    std::vector<int64_t> nodes = {n};
    for (size_t k = 0; k < nodes.size() && std::ssize(nodes) < kMostBranches; ++k) {
      const int64_t node = nodes[k];
      for (int64_t child = node + 1; child < forest_.subtree_last[node] && std::ssize(nodes) < kMostBranches;
           child = forest_.subtree_last[child]) {
        nodes.push_back(child);
      }
    }
    std::vector<int64_t> rows;
    rows.reserve(nodes.size());
    for (const int64_t node : nodes) rows.push_back(facts_.longest[node]);
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    return rows;
  }

  bool trains(int64_t row, int64_t position) const {
    return trajectories_.loss_weights[trajectories_.offsets[row] + position] > 0;
  }

  Side side(int64_t n, int64_t row) const {
    const int64_t position = forest_.position[n];
    return {trajectories_.row(row).subspan(position), trains(row, position), facts_.trained[n] != 0};
  }

  /// Stores the texts that differ: whole words if known, else the tokens.
  void keep_values(const Found& found, int64_t position, std::vector<std::string>* values) const {
    const Divergence& divergence = found.divergence;
    if (context_.vocabulary == nullptr || !is_lost(divergence.cause)) return;
    const auto keep = [&](std::string value, int64_t row, int64_t size) {
      if (value.empty()) value = context_.vocabulary->text(copy(trajectories_.row(row), position, size));
      if (value.empty() || value.size() > kLongestValue || std::ssize(*values) >= CauseReport::kMostValues)
        return;
      if (std::find(values->begin(), values->end(), value) == values->end())
        values->push_back(std::move(value));
    };
    keep(divergence.left_value, found.left, divergence.left_size);
    keep(divergence.right_value, found.right, divergence.right_size);
  }

  void keep_example(const Found& found, int64_t position, ExamplePool* pool) const {
    const Divergence& divergence = found.divergence;
    constexpr int64_t kSnippet = SharingExample::kSnippet;
    // Texts that are never equal again differ over the whole window.
    const bool apart = !is_lost(divergence.cause);
    const int64_t before = std::min(position, kSnippet);
    const auto left = trajectories_.row(found.left).subspan(position);
    const auto right = trajectories_.row(found.right).subspan(position);
    SharingExample example;
    example.position = position;
    example.left_row = found.left;
    example.right_row = found.right;
    example.left_node = found.left_node;
    example.right_node = found.right_node;
    example.role = context_.chat.role;
    example.before = copy(trajectories_.row(found.left), position - before, before);
    example.left = copy(left, 0, apart ? kSnippet : divergence.left_size);
    example.right = copy(right, 0, apart ? kSnippet : divergence.right_size);
    if (!apart) {
      example.left_after = copy(left, divergence.left_size, kSnippet);
      example.right_after = copy(right, divergence.right_size, kSnippet);
    }
    example.common = divergence.common;
    example.between_groups = found.between_groups;
    pool->add(std::move(example));
  }

  void keep_lost(const Found& found, int64_t position) {
    const Divergence& divergence = found.divergence;
    if (found.tokens == 0) return;
    if (!found.histories.empty()) {
      report_.lost.insert(report_.lost.end(), found.histories.begin(), found.histories.end());
      return;
    }
    report_.lost.push_back({divergence.cause, found.right_node, found.left_node, found.right,
                            position + divergence.right_size, position + divergence.right_end});
  }

  const Trajectories& trajectories_;
  const Forest& forest_;
  const SharingOptions& options_;
  NodeFacts facts_;
  DivergenceContext context_;
  SharingReport report_;
  std::vector<ExamplePool> pools_;  // by cause
  std::vector<int64_t>
      mates_;  // earlier siblings that the current child is compared with: those of its groups
  std::vector<int64_t> others_;  // and those of other groups
  struct Covered {
    int64_t row, begin, end;
  };
  std::vector<Covered> covered_;  // tokens counted by find_history
  int64_t work_left_ = 0;
};

int64_t nice_width(int64_t depth, int64_t most) {
  for (int64_t power = 1;; power *= 10) {
    for (const int64_t factor : {1, 2, 5}) {
      if (factor * power * most >= depth) return factor * power;
    }
  }
}

}  // namespace

std::vector<int64_t> AlikeIndex::find(std::span<const int32_t> tokens) const {
  std::vector<int64_t> found;
  for (const uint64_t hash : sketch_of(tokens)) {
    if (const auto at = first_.find(hash); at != first_.end()) found.push_back(at->second);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

void AlikeIndex::add(std::span<const int32_t> tokens, int64_t sequence) {
  for (const uint64_t hash : sketch_of(tokens)) first_.emplace(hash, sequence);
}

int64_t SharingReport::lost_tokens() const {
  int64_t tokens = 0;
  for (const CauseReport& cause : causes) tokens += cause.tokens;
  return tokens;
}

int64_t SharingReport::lost_tokens_between_groups() const {
  int64_t tokens = 0;
  for (const CauseReport& cause : causes) tokens += cause.tokens_between_groups;
  return tokens;
}

std::vector<DepthBucket> sharing_by_depth(const Forest& forest, int64_t most) {
  ESPALIER_ASSERT(most > 0);
  int64_t depth = 0;
  for (int64_t n = 0; n < forest.num_nodes(); ++n)
    depth = std::max(depth, forest.position[n] + forest.node_size(n));
  const int64_t width = nice_width(depth, most);
  std::vector<DepthBucket> buckets((depth + width - 1) / width);
  for (int64_t b = 0; b < std::ssize(buckets); ++b) {
    buckets[b].begin = b * width;
    buckets[b].end = std::min(depth, (b + 1) * width);
  }
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    const int64_t end = forest.position[n] + forest.node_size(n);
    for (int64_t at = forest.position[n]; at < end;) {
      DepthBucket& bucket = buckets[at / width];
      const int64_t size = std::min(end, bucket.end) - at;
      bucket.tree_tokens += size;
      bucket.flat_tokens += size * forest.multiplicity[n];
      at += size;
    }
  }
  return buckets;
}

SharingReport analyse_sharing(const Trajectories& trajectories, const Forest& forest,
                              const SharingOptions& options) {
  ESPALIER_ASSERT(forest.num_trajectories() == trajectories.num_rows());
  return Analysis(trajectories, forest, options).run();
}

}  // namespace espalier
