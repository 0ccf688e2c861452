// SPDX-License-Identifier: Apache-2.0
// What the page of `inspect --html` shows, for the Python package, which makes the page
// (python/espalier/page).
#pragma once

#include <string>

#include "espalier/data/trajectories.h"
#include "espalier/data/vocabulary.h"
#include "espalier/inspect/report.h"
#include "espalier/tree/forest.h"

namespace espalier {

struct PageContents {
  std::string title;  // valid UTF-8
  const InspectReport& report;
  const Trajectories& trajectories;
  const Forest& forest;  // of all rows of `trajectories`
  const Vocabulary* vocabulary = nullptr;
};

/// JSON with title, report (see report.h), examples and tree. Texts are valid UTF-8 and
/// may have any characters.
///
/// `examples` has for each cause of the report a list of the nodes of its examples: [left, right], each -1 if
/// the page does not hold it.
///
/// `tree` has `of` (the number of nodes of the forest), `causes` (their words), columns, names and, with a
/// vocabulary, texts and spans, which have one entry per node that the page holds, in preorder:
///   columns: parent (-1 at a root), subtree (tokens of the node and of all below it), size, multiplicity,
///     ends (trajectories that end there), trained (tokens that some trajectory trains on),
///     lost_begin, lost (first token and number of tokens that another branch has, too),
///     cause, other (of a branch that diverges here and loses sharing: 1 + Cause, and 1 + the node of the
///     other branch; else 0), shown (tokens whose text is in `texts`)
///   names of the trajectories that end there
///   texts: [header, text]; header is the part of a message's header that precedes the node, null if the node
///     does not begin in a header
///   spans: [role, size in tokens] of the message that goes on at the beginning of the node (of size 0 if the
///     node begins with a marker), then of each message that begins in it. A token belongs to the message in
///     which it begins.
/// The total size of names and texts is limited.
std::string page_data(const PageContents& contents);

}  // namespace espalier
