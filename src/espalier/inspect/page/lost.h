// SPDX-License-Identifier: Apache-2.0
// The part of a page that says where trajectories part, and what was lost.
#pragma once

#include <string>

#include "espalier/inspect/page/page.h"
#include "espalier/inspect/page/tree.h"

namespace espalier {

/// HTML: the causes as a table, and the examples of each. Where the page holds a branch of an example, a
/// button with the attribute data-node names it; the script shows that node. Buttons with data-cause (1 +
/// Cause, as in the column "cause") go through the branches of a cause.
std::string lost_html(const PageContents& contents, const PageNodes& held);

}  // namespace espalier
