// SPDX-License-Identifier: Apache-2.0
// The part of a page on where trajectories diverge and what is lost.
#pragma once

#include <string>

#include "espalier/inspect/page/page.h"
#include "espalier/inspect/page/tree.h"

namespace espalier {

/// HTML: a table of causes, and the examples of each. If the page holds a branch of an example, a button with
/// the attribute data-node makes the script show that node. Buttons with data-cause (1 + Cause, as in the
/// column "cause") step through the branches of a cause.
std::string lost_html(const PageContents& contents, const PageNodes& held);

}  // namespace espalier
