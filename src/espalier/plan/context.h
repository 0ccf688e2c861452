// SPDX-License-Identifier: Apache-2.0
// The context that the micro-batches of a partition read from their ancestors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/plan/plan.h"

namespace espalier {

/// A dense rectangle of the mask between a micro-batch and one of its ancestors: the tokens
/// [column_begin, column_end) of the ancestor are visible to exactly the tokens [row_begin, row_end) of the
/// micro-batch. Tokens are indices into the layouts of the two.
struct ContextBlock {
  int64_t ancestor;  // micro-batch
  int64_t column_begin, column_end;
  int64_t row_begin, row_end;
  int64_t position;  // of the first column on its root path; the columns follow each other there
};

/// Positions of the runs of each micro-batch. Keeps a reference to the micro-batches, which must outlive it.
/// Construction is O(runs). Row m of each array belongs to micro-batch m.
struct ContextIndex {
  explicit ContextIndex(std::span<const MicroBatch> micro_batches);

  std::span<const MicroBatch> micro_batches;
  Csr<int64_t> run_begin;    // [runs + 1] tokens in the layout: Layout::run_begin
  Csr<int64_t> root_runs;    // runs without parent, ascending
  Csr<int64_t> path_length;  // [runs] tokens of the root path that ends with the run, context included
};

/// The context of micro-batch `index`. No (row, column) pair is in two blocks. Runs that are adjacent in the
/// ancestor and have the same rows form one block. Blocks are sorted by ancestor, then by column; row ranges
/// are nested or disjoint. O(v log v) for v visible runs: other runs are not touched.
std::vector<ContextBlock> context_blocks(const ContextIndex& plan, int64_t index);

/// Context tokens that micro-batch `index` reads, each counted once: the sum of the blocks' columns. Cheaper
/// than context_blocks, because the walk ends where the root paths meet.
int64_t context_tokens(const ContextIndex& plan, int64_t index);
int64_t context_tokens(std::span<const ContextBlock> blocks);

/// Row m: the runs of micro-batch m that others continue, ascending.
Csr<int64_t> cut_runs(std::span<const MicroBatch> micro_batches);

/// The micro-batches above `index`, root first, itself not included.
std::vector<int64_t> ancestors(std::span<const MicroBatch> micro_batches, int64_t index);

}  // namespace espalier
