// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/context.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "espalier/base/check.h"

namespace espalier {
namespace {

struct RowRange {
  int64_t begin, end;
};

/// A run of an ancestor and the rows that see it.
struct VisibleRun {
  int64_t ancestor;
  int64_t run;
  RowRange rows;
  bool alone;  // no other run was waiting: above it, all rows are on the path of this run
};

/// Visits the visible runs of the ancestors, from the nearest ancestor upwards and from the last run to the
/// first, so that a run's rows are complete when it is visited.
class ContextWalk {
 public:
  ContextWalk(const ContextIndex& plan, int64_t index) : plan_(plan), ancestor_(index) {
    const auto roots = plan.root_runs.row(index);
    const auto run_begin = plan.run_begin.row(index);
    for (size_t k = 0; k < roots.size(); ++k) {
      const int64_t next = k + 1 < roots.size() ? roots[k + 1] : static_cast<int64_t>(run_begin.size()) - 1;
      go_up(index, roots[k], {run_begin[roots[k]], run_begin[next]});
    }
  }

  std::optional<VisibleRun> next() {
    if (here_.empty()) {
      if (above_.empty()) return std::nullopt;
      ancestor_ = plan_.micro_batches[ancestor_].parent;
      std::swap(here_, above_);
    }
    const bool alone = here_.size() + above_.size() == 1;
    const auto [run, rows] = *here_.begin();
    here_.erase(here_.begin());
    go_up(ancestor_, run, rows);
    return VisibleRun{ancestor_, run, rows, alone};
  }

 private:
  using Waiting = std::map<int64_t, RowRange, std::greater<>>;  // by run, the last first

  void go_up(int64_t micro_batch, int64_t run, RowRange rows) {
    const MicroBatch& batch = plan_.micro_batches[micro_batch];
    const int64_t parent = batch.runs[run].parent;
    if (parent >= 0) {
      join(here_, parent, rows);
    } else if (batch.parent >= 0) {
      const auto roots = plan_.root_runs.row(micro_batch);
      const auto root = std::lower_bound(roots.begin(), roots.end(), run) - roots.begin();
      join(above_, batch.context_runs[root], rows);
    }
  }

  // The rows below a token are contiguous in the order of forest tokens, so the union has no gap.
  static void join(Waiting& waiting, int64_t run, RowRange rows) {
    RowRange& all = waiting.try_emplace(run, rows).first->second;
    all = {std::min(all.begin, rows.begin), std::max(all.end, rows.end)};
  }

  const ContextIndex& plan_;
  int64_t ancestor_;
  Waiting here_;   // runs of `ancestor_`
  Waiting above_;  // runs of its parent
};

}  // namespace

ContextIndex::ContextIndex(std::span<const MicroBatch> batches) : micro_batches(batches) {
  for (size_t m = 0; m < batches.size(); ++m) {
    const MicroBatch& batch = batches[m];
    ESPALIER_ASSERT(-1 <= batch.parent && batch.parent < static_cast<int64_t>(m));
    int64_t tokens = 0;
    size_t roots = 0;
    for (size_t k = 0; k < batch.runs.size(); ++k) {
      const Run& run = batch.runs[k];
      int64_t prefix = 0;
      if (run.parent >= 0) {
        prefix = path_length.values[path_length.offsets.back() + run.parent];
      } else {
        root_runs.values.push_back(static_cast<int64_t>(k));
        if (batch.parent >= 0) prefix = path_length.row(batch.parent)[batch.context_runs.at(roots)];
        ++roots;
      }
      path_length.values.push_back(prefix + run.end - run.begin);
      run_begin.values.push_back(tokens);
      tokens += run.end - run.begin;
    }
    run_begin.values.push_back(tokens);
    run_begin.end_row();
    root_runs.end_row();
    path_length.end_row();
    ESPALIER_ASSERT(batch.context_runs.size() == (batch.parent < 0 ? 0 : roots));
  }
}

std::vector<ContextBlock> context_blocks(const ContextIndex& plan, int64_t index) {
  std::vector<ContextBlock> blocks;
  ContextWalk walk(plan, index);
  while (const std::optional<VisibleRun> visible = walk.next()) {
    const auto run_begin = plan.run_begin.row(visible->ancestor);
    const int64_t begin = run_begin[visible->run], end = run_begin[visible->run + 1];
    const auto [row_begin, row_end] = visible->rows;
    // Runs that are adjacent and seen by the same rows follow each other on their path.
    const int64_t position = plan.path_length.row(visible->ancestor)[visible->run] - (end - begin);
    if (!blocks.empty()) {
      ContextBlock& last = blocks.back();
      if (last.ancestor == visible->ancestor && last.column_begin == end && last.row_begin == row_begin &&
          last.row_end == row_end) {
        last.column_begin = begin;
        last.position = position;
        continue;
      }
    }
    blocks.push_back({visible->ancestor, begin, end, row_begin, row_end, position});
  }
  std::reverse(blocks.begin(), blocks.end());
  return blocks;
}

int64_t context_tokens(const ContextIndex& plan, int64_t index) {
  int64_t tokens = 0;
  ContextWalk walk(plan, index);
  while (const std::optional<VisibleRun> visible = walk.next()) {
    if (visible->alone) return tokens + plan.path_length.row(visible->ancestor)[visible->run];
    const Run& run = plan.micro_batches[visible->ancestor].runs[visible->run];
    tokens += run.end - run.begin;
  }
  return tokens;
}

int64_t context_tokens(std::span<const ContextBlock> blocks) {
  int64_t tokens = 0;
  for (const ContextBlock& block : blocks) tokens += block.column_end - block.column_begin;
  return tokens;
}

Csr<int64_t> cut_runs(std::span<const MicroBatch> micro_batches) {
  std::vector<std::vector<int64_t>> runs(micro_batches.size());
  for (const MicroBatch& batch : micro_batches) {
    if (batch.parent < 0) continue;
    std::vector<int64_t>& above = runs[batch.parent];
    above.insert(above.end(), batch.context_runs.begin(), batch.context_runs.end());
  }
  Csr<int64_t> result;
  for (std::vector<int64_t>& row : runs) {
    std::sort(row.begin(), row.end());
    row.erase(std::unique(row.begin(), row.end()), row.end());
    result.push_row(row);
  }
  return result;
}

std::vector<int64_t> ancestors(std::span<const MicroBatch> micro_batches, int64_t index) {
  std::vector<int64_t> above;
  for (int64_t m = micro_batches[index].parent; m >= 0; m = micro_batches[m].parent) above.push_back(m);
  std::reverse(above.begin(), above.end());
  return above;
}

}  // namespace espalier
