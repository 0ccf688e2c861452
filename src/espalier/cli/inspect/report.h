// What `inspect` found, and how it is written down.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/cli/inspect/sharing.h"
#include "espalier/data/trajectories.h"
#include "espalier/model/vocabulary.h"
#include "espalier/tree/statistics.h"

namespace espalier::cli {

/// Work of the same loss laid out in other ways, over that of the forest; 1 is no gain.
struct Prediction {
  double over_packing = 1;
  double over_append_only = 1;
  bool in_flops = false;  // else in tokens
};

struct InspectReport {
  ForestStatistics statistics;
  std::vector<DepthBucket> by_depth;
  Prediction prediction;
  SharingReport sharing;
};

/// Flat / tree, had what was lost been shared: the least that it would be (see CauseReport::tokens).
double ratio_without_losses(const InspectReport& report);

/// Whether to train on trees, in one sentence, and what to change first where much is lost, in another.
struct Verdict {
  bool worth_it = false;
  std::string text;
  std::string advice;  // empty where nothing much is lost
};
Verdict verdict_of(const InspectReport& report);

/// How CauseReport::tokens is counted, for people.
extern const char* const kHowLossIsCounted;

/// The text of a run of tokens, or its ids where there is no vocabulary.
std::string snippet(const Vocabulary* vocabulary, std::span<const int32_t> tokens);

nlohmann::ordered_json to_json(const InspectReport& report, const Trajectories& trajectories,
                               const Vocabulary* vocabulary);

/// Prints the report to standard output.
void print(const InspectReport& report, const Trajectories& trajectories, const Vocabulary* vocabulary);

}  // namespace espalier::cli
