// SPDX-License-Identifier: Apache-2.0
// The page that `inspect --html` writes.
#pragma once

#include <string>
#include <string_view>

#include "espalier/data/trajectories.h"
#include "espalier/data/vocabulary.h"
#include "espalier/inspect/report.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// Maximum number of nodes on a page; of a larger forest, those with the largest subtrees are kept.
inline constexpr int64_t kMostPageNodes = 200'000;

struct PageContents {
  std::string file;  // name of the data
  const InspectReport& report;
  const Trajectories& trajectories;
  const Forest& forest;  // of all rows of `trajectories`
  const Vocabulary* vocabulary = nullptr;
};

/// One self-contained HTML page. Verdict, gains, totals and lost sharing are HTML; the script draws the chart
/// of the forest, search and distributions from one JSON script element with id "data":
///   file, report (see report.h),
///   tree: {nodes, of, columns, num_spans, span_columns, roles, causes, texts, names}
/// `columns` holds base64 of LEB128 numbers, one per node in preorder:
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
/// (0 or 1); `names` a list of the trajectories that end there. The total size of each is limited. Texts and
/// names have passed visible() (text.h).
std::string inspect_page(const PageContents& contents);

/// The page without its data, in whose slots, such as {{data}}, that is put: page.html, page.css and the
/// scripts of this folder, joined by CMake.
extern const std::string_view kInspectPage;

}  // namespace espalier
