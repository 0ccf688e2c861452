// SPDX-License-Identifier: Apache-2.0
// Random sequences and the forest that they must give, found by comparing prefixes one by one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/base/rng.h"
#include "espalier/tree/forest.h"
#include "espalier/tree/layout.h"

namespace espalier::testing {

/// Sequences that own their arrays.
struct Rows {
  Csr<int32_t> tokens;
  std::vector<uint64_t> merge_keys;
  std::vector<int64_t> tree_keys;

  TokenSequences view() const { return {tokens.offsets, tokens.values, merge_keys, tree_keys}; }
};

inline Forest forest_of(const Csr<int32_t>& rows) {
  return build_forest({.offsets = rows.offsets, .tokens = rows.values});
}

Rows make_rows(const std::vector<std::vector<int32_t>>& rows);

/// Up to 12 short rows over a tiny vocabulary, many of which extend, equal or branch off others; merge keys
/// and tree keys in some.
Rows random_rows(Rng& rng);

/// All rows, or a random subset of them in random order.
std::vector<int64_t> random_subset(Rng& rng, const Rows& rows);

/// Compares the forest, the layout of the whole forest and the path vectors with what the rows' prefixes say.
/// Returns the first difference, or "" when there is none.
std::string difference_from_naive(const Rows& rows, std::span<const int64_t> subset, const Forest& forest);

/// The same for one layout: row r of the forest's rows ends at the end of run `end_run[r]`.
std::string layout_difference(const Rows& rows, std::span<const int64_t> subset, const Layout& layout,
                              std::span<const int64_t> end_run);

}  // namespace espalier::testing
