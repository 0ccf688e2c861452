// SPDX-License-Identifier: Apache-2.0
// What the page of `inspect --html` shows, for the Python package, which makes the page
// (python/espalier/page).
#pragma once

#include <cstdint>
#include <string>

#include "espalier/data/trajectories.h"
#include "espalier/data/vocabulary.h"
#include "espalier/inspect/report.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// Maximum number of nodes on a page; of a larger forest, those with the largest subtrees are kept.
inline constexpr int64_t kMostPageNodes = 200'000;

struct PageContents {
  std::string title;  // valid UTF-8
  const InspectReport& report;
  const Trajectories& trajectories;
  const Forest& forest;  // of all rows of `trajectories`
  const Vocabulary* vocabulary = nullptr;
};

/// JSON with title, report (see report.h), gains (gain_figures), examples and tree. Texts are valid UTF-8 and
/// may have any characters.
///
/// `examples` has for each cause of the report a list of the messages of its examples: before, left and
/// right, of which each has the messages differing and after, and node, -1 if the page does not hold it. A
/// message is [role, text, whether it begins here, whether it ends here].
///
/// `tree` has {nodes, of, columns, num_spans, span_columns, roles, causes, texts, names}. `columns` holds
/// base64 of LEB128 numbers, one per node in preorder:
///   up            levels from the preceding node up to the parent, 0: the preceding node is the parent
///   size, multiplicity
///   ends          trajectories that end there
///   trained       tokens that some trajectory trains on
///   hidden        tree tokens of omitted branches below it
///   lost_begin, lost   first token and number of tokens of the node that another branch has, too
///   cause, other  of a branch that diverges here and loses sharing: 1 + Cause (as in `causes`), and
///                 1 + the node of the other branch; else 0
///   shown         tokens whose text is in `texts`
///   spans         how many of the spans are this node's
/// `span_columns` has the role (an index of `roles`) and the size in tokens of each span, in order; without a
/// vocabulary it is empty. `texts` has for each node a flat list of role, text, and whether the message ends
/// (0 or 1); `names` a list of the trajectories that end there. The total size of each is limited.
std::string page_data(const PageContents& contents);

}  // namespace espalier
