// SPDX-License-Identifier: Apache-2.0
// The report of `inspect` as JSON, of which the Python package makes its text (python/espalier/printed), and
// the gains that it predicts.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

#include "espalier/data/trajectories.h"
#include "espalier/data/vocabulary.h"
#include "espalier/inspect/sharing.h"
#include "espalier/tree/forest.h"

namespace espalier {

/// The work of computing the same loss without trees over the work with trees. 1: no gain.
struct Gains {
  double over_packing = 1;      // over every trajectory separately, packed
  double over_append_only = 1;  // over packing without trajectories that others extend (ForestStatistics)
  bool in_flops = false;        // else in tokens

  /// Quotients of work; 1 if there is no work.
  static Gains of(double packing, double append_only, double tree, bool in_flops);
  /// Of tokens: those that a plan of the forest encodes, against both ways without trees.
  static Gains in_tokens(const ForestStatistics& statistics, int64_t encoded_tokens);
};

struct InspectReport {
  ForestStatistics statistics;
  std::vector<DepthBucket> by_depth;
  Gains gains;
  SharingReport sharing;
};

/// What the rows share and lose, with gains in tokens. `vocabulary`: nullptr where there is none.
InspectReport inspect_rows(const Trajectories& trajectories, const Forest& forest,
                           const Vocabulary* vocabulary);

/// The text of a token sequence, or its ids without a vocabulary.
std::string snippet(const Vocabulary* vocabulary, std::span<const int32_t> tokens);

/// Without the verdict, which Python adds (python/espalier/printed/verdict.py).
nlohmann::ordered_json to_json(const InspectReport& report, const Trajectories& trajectories,
                               const Vocabulary* vocabulary);

}  // namespace espalier
