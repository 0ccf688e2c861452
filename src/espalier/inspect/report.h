// SPDX-License-Identifier: Apache-2.0
// The report of `inspect`, as JSON and as text.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/data/trajectories.h"
#include "espalier/data/vocabulary.h"
#include "espalier/inspect/gains.h"
#include "espalier/inspect/sharing.h"
#include "espalier/tree/statistics.h"

namespace espalier {

struct InspectReport {
  ForestStatistics statistics;
  std::vector<DepthBucket> by_depth;
  Gains gains;
  SharingReport sharing;
};

/// Flat / tree if all lost tokens were shared, a lower bound (see CauseReport::tokens).
double ratio_without_losses(const InspectReport& report);

/// A sentence on whether to train on trees, by the leading gain (Gains), and one on what to change first if
/// much is lost.
struct Verdict {
  bool worth_it = false;
  std::string text;
  std::string advice;  // empty if little is lost
};
Verdict verdict_of(const InspectReport& report);

/// How to avoid a cause of lost sharing: an imperative without a full stop.
const char* remedy(Cause cause);

/// A sentence for users on how CauseReport::tokens is counted.
extern const char* const kHowLossIsCounted;

/// The text of a token sequence, or its ids without a vocabulary.
std::string snippet(const Vocabulary* vocabulary, std::span<const int32_t> tokens);

nlohmann::ordered_json to_json(const InspectReport& report, const Trajectories& trajectories,
                               const Vocabulary* vocabulary);

/// The report as lines that are safe to print on a terminal.
std::string to_text(const InspectReport& report, const Trajectories& trajectories,
                    const Vocabulary* vocabulary, bool has_model);

}  // namespace espalier
