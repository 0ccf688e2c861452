// SPDX-License-Identifier: Apache-2.0
// Linearisation: the tokens of one micro-batch in preorder, with the arrays that define which tokens are
// visible to which.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// A contiguous range of forest tokens inside a micro-batch. Runs are in preorder: parent < own index, and
/// the descendants of a run follow it directly. The same forest tokens may be in several runs (a repeated
/// prefix). A run starts where its parent ends on the root path. Its tokens are consecutive on one root path:
/// a node, a part of one, or a node and its first descendants.
struct Run {
  int64_t begin;   // into Forest::tokens
  int64_t end;     // one past the last
  int64_t parent;  // index of the preceding run on the path, -1 at a root run
};

/// The T tokens of one micro-batch in preorder.
struct Layout {
  std::vector<int64_t> forest_token;  // [T] index into Forest::tokens
  std::vector<int32_t> input_ids;     // [T]
  std::vector<int32_t> position_ids;  // [T] position on the root path
  std::vector<int32_t> subtree_end;   // [T] one past the last token of the subtree of the token's run
  std::vector<int32_t> prev;          // [T] the preceding token on the path, -1 at a root
  std::vector<int64_t> run_begin;     // [num_runs + 1] run k is tokens [run_begin[k], run_begin[k + 1])
  std::vector<int64_t> run_parent;    // [num_runs]

  int64_t num_tokens() const { return static_cast<int64_t>(input_ids.size()); }
  int64_t num_runs() const { return static_cast<int64_t>(run_parent.size()); }
};

/// Where root runs may begin: only at tree roots, or anywhere, if the preceding tokens of their paths are
/// context from other micro-batches.
enum class RootRuns { kAtTreeRoots, kContinueContext };

/// Throws InternalError unless the runs are in preorder, are not empty and continue their parents. Throws
/// InputError if they hold more tokens than an int32 can count.
Layout make_layout(const Forest& forest, std::span<const Run> runs,
                   RootRuns root_runs = RootRuns::kAtTreeRoots);

/// One run per node: the whole forest as one micro-batch.
std::vector<Run> whole_forest(const Forest& forest);

/// The node that holds a forest token, the position of the token on its root path, and the forest token
/// before it on the path (-1 at a root). O(log nodes) each.
int64_t node_of_token(const Forest& forest, int64_t token);
int64_t token_position(const Forest& forest, int64_t token);
int64_t token_before(const Forest& forest, int64_t token);

/// Token indices of the root path that ends with run `end_run`, from the root run on. These are the expand
/// indices of a trajectory that ends there. Without context their number is the trajectory's length.
std::vector<int64_t> path_tokens(const Layout& layout, int64_t end_run);

/// The root paths that end with the runs `end_runs`, one row each (path_tokens).
Csr<int64_t> all_path_tokens(const Layout& layout, std::span<const int64_t> end_runs);

/// [T] how many of the paths that end with the runs `end_runs` pass through each token.
std::vector<int64_t> token_multiplicity(const Layout& layout, std::span<const int64_t> end_runs);

/// Visible (query, key) pairs: the sum of position_ids + 1.
int64_t visible_pairs(const Layout& layout);

}  // namespace espalier
