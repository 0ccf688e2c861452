// SPDX-License-Identifier: Apache-2.0
// The page that `inspect --html` writes.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "espalier/data/trajectories.h"
#include "espalier/text/vocabulary.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// Nodes that a page holds at most; of a larger forest those with the largest subtrees are kept.
inline constexpr int64_t kMostPageNodes = 200'000;

/// One self-contained HTML page: the report (see report.h), and the forest of all rows of
/// `trajectories` as a chart. Everything that the data says is inside one JSON script element with id "data":
///   file, report,
///   tree: {nodes, of, columns, texts, names}
/// `columns` holds base64 of LEB128 numbers, one per node in preorder: "up" (how many levels above the node
/// before it the parent stands, 0 for that node itself), "size", "multiplicity", "ends" (trajectories that
/// end there), "trained" (tokens that some trajectory trains on), "hidden" (tree tokens of branches left out
/// below it). `texts` (first words) and `names` (of trajectories that end there) have an entry per node,
/// empty where unknown or left out: both are capped.
std::string inspect_page(const std::string& file, const nlohmann::ordered_json& report,
                         const Trajectories& trajectories, const Forest& forest,
                         const Vocabulary* vocabulary);

}  // namespace espalier
