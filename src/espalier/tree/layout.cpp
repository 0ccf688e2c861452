// SPDX-License-Identifier: Apache-2.0
#include "espalier/tree/layout.h"

#include <algorithm>
#include <limits>

#include "espalier/base/check.h"

namespace espalier {
namespace {

/// Returns the position of the run's first token. Checks that the run lies on one root path and continues its
/// parent.
int64_t check_run(const Forest& forest, std::span<const Run> runs, size_t k, RootRuns root_runs) {
  const Run& run = runs[k];
  ESPALIER_ASSERT(0 <= run.begin && run.begin < run.end && run.end <= forest.tree_tokens());
  ESPALIER_ASSERT(-1 <= run.parent && run.parent < static_cast<int64_t>(k));
  int64_t node = node_of_token(forest, run.begin);
  const int64_t position = forest.position[node] + run.begin - forest.node_begin[node];
  if (run.parent < 0) {
    ESPALIER_ASSERT(position == 0 || root_runs == RootRuns::kContinueContext);
  } else {
    ESPALIER_ASSERT(runs[run.parent].end - 1 == token_before(forest, run.begin));
  }
  for (; forest.node_begin[node + 1] < run.end; ++node) ESPALIER_ASSERT(forest.parent[node + 1] == node);
  return position;
}

int64_t count_tokens(std::span<const Run> runs) {
  int64_t total = 0;
  for (const Run& run : runs) total += run.end - run.begin;
  return total;
}

/// Appends the tokens of one run. Their subtree_end is set at the first run outside the subtree.
void append_run(const Forest& forest, const Run& run, int64_t position, Layout& layout) {
  const int64_t begin = layout.num_tokens();
  const int64_t previous = run.parent < 0 ? -1 : layout.run_begin[run.parent + 1] - 1;
  for (int64_t t = run.begin; t < run.end; ++t) {
    const int64_t offset = t - run.begin;
    layout.forest_token.push_back(t);
    layout.input_ids.push_back(forest.tokens[t]);
    layout.position_ids.push_back(static_cast<int32_t>(position + offset));
    layout.prev.push_back(static_cast<int32_t>(offset == 0 ? previous : begin + offset - 1));
  }
  layout.run_begin.push_back(layout.num_tokens());
  layout.run_parent.push_back(run.parent);
}

}  // namespace

int64_t node_of_token(const Forest& forest, int64_t token) {
  const auto next_node = std::upper_bound(forest.node_begin.begin(), forest.node_begin.end(), token);
  return next_node - forest.node_begin.begin() - 1;
}

int64_t token_position(const Forest& forest, int64_t token) {
  const int64_t node = node_of_token(forest, token);
  return forest.position[node] + token - forest.node_begin[node];
}

int64_t token_before(const Forest& forest, int64_t token) {
  const int64_t node = node_of_token(forest, token);
  if (token > forest.node_begin[node]) return token - 1;
  return forest.parent[node] < 0 ? -1 : forest.node_begin[forest.parent[node] + 1] - 1;
}

Layout make_layout(const Forest& forest, std::span<const Run> runs, RootRuns root_runs) {
  const int64_t num_tokens = count_tokens(runs);
  ESPALIER_CHECK(num_tokens <= std::numeric_limits<int32_t>::max(),
                 "a micro-batch has {} tokens, expected at most {}: set a token budget", num_tokens,
                 std::numeric_limits<int32_t>::max());
  Layout layout;
  layout.forest_token.reserve(num_tokens);
  layout.input_ids.reserve(num_tokens);
  layout.position_ids.reserve(num_tokens);
  layout.prev.reserve(num_tokens);
  layout.subtree_end.resize(num_tokens);
  layout.run_begin.push_back(0);

  std::vector<int64_t> open;  // the root path of the previous run, whose subtree_end is not yet known
  const auto close_until = [&](int64_t parent) {
    while (!open.empty() && open.back() != parent) {
      const int64_t run = open.back();
      std::fill(layout.subtree_end.begin() + layout.run_begin[run],
                layout.subtree_end.begin() + layout.run_begin[run + 1],
                static_cast<int32_t>(layout.num_tokens()));
      open.pop_back();
    }
  };
  for (size_t k = 0; k < runs.size(); ++k) {
    const int64_t position = check_run(forest, runs, k, root_runs);
    close_until(runs[k].parent);
    ESPALIER_ASSERT(runs[k].parent < 0 || !open.empty());
    append_run(forest, runs[k], position, layout);
    open.push_back(static_cast<int64_t>(k));
  }
  close_until(-1);
  return layout;
}

std::vector<Run> whole_forest(const Forest& forest) {
  std::vector<Run> runs;
  runs.reserve(forest.num_nodes());
  for (int64_t n = 0; n < forest.num_nodes(); ++n) {
    runs.push_back({forest.node_begin[n], forest.node_begin[n + 1], forest.parent[n]});
  }
  return runs;
}

std::vector<int64_t> path_tokens(const Layout& layout, int64_t end_run) {
  ESPALIER_ASSERT(0 <= end_run && end_run < layout.num_runs());
  std::vector<int64_t> path;
  path.reserve(layout.position_ids[layout.run_begin[end_run + 1] - 1] + 1);
  for (int64_t run = end_run; run >= 0; run = layout.run_parent[run]) {
    for (int64_t t = layout.run_begin[run + 1] - 1; t >= layout.run_begin[run]; --t) path.push_back(t);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

Csr<int64_t> all_path_tokens(const Layout& layout, std::span<const int64_t> end_runs) {
  Csr<int64_t> paths;
  paths.offsets.reserve(end_runs.size() + 1);
  for (const int64_t run : end_runs) paths.push_row(path_tokens(layout, run));
  return paths;
}

std::vector<int64_t> token_multiplicity(const Layout& layout, std::span<const int64_t> end_runs) {
  std::vector<int64_t> run_multiplicity(layout.num_runs());
  for (const int64_t run : end_runs) ++run_multiplicity.at(run);
  for (int64_t run = layout.num_runs() - 1; run >= 0; --run) {
    if (layout.run_parent[run] >= 0) run_multiplicity[layout.run_parent[run]] += run_multiplicity[run];
  }
  std::vector<int64_t> multiplicity(layout.num_tokens());
  for (int64_t run = 0; run < layout.num_runs(); ++run) {
    std::fill(multiplicity.begin() + layout.run_begin[run], multiplicity.begin() + layout.run_begin[run + 1],
              run_multiplicity[run]);
  }
  return multiplicity;
}

int64_t visible_pairs(const Layout& layout) {
  int64_t pairs = 0;
  for (const int32_t position : layout.position_ids) pairs += int64_t{position} + 1;
  return pairs;
}

}  // namespace espalier
