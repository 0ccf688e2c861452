// SPDX-License-Identifier: Apache-2.0
// The trees of a page as JSON, and its part on where trajectories diverge and what is lost.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "espalier/inspect/page/page.h"

namespace espalier {

/// The nodes of a forest that a page holds.
struct PageNodes {
  std::vector<int64_t> nodes;  // forest nodes, in preorder
  std::vector<int64_t> index;  // [num_nodes] index in `nodes` of every forest node; -1 if omitted

  /// The `most` nodes with the largest subtrees, and with each node its ancestors.
  static PageNodes of(const Forest& forest, int64_t most);
};

/// The member "tree" of the page's data (see page.h).
nlohmann::ordered_json tree_to_json(const PageContents& contents, const PageNodes& held);

/// HTML: a table of causes, and the examples of each. If the page holds a branch of an example, a button with
/// the attribute data-node makes the script show that node. Buttons with data-cause (1 + Cause, as in the
/// column "cause") step through the branches of a cause.
std::string lost_html(const PageContents& contents, const PageNodes& held);

}  // namespace espalier
