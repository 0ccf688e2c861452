// SPDX-License-Identifier: Apache-2.0
// Output of `espalier plan --ranks`: how the trajectories of a step are distributed over processes.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/plan/ranks.h"

namespace espalier::cli {

/// A distribution over ranks, and for comparison one of whole trajectories without trees.
struct RankTable {
  RankPlan plan;
  RankPlan trajectories;
  int64_t forest_tokens = 0;
  bool has_model = false;  // seconds are predicted for a given model

  RankTable(const Forest& forest, int64_t num_ranks, const TimeModel& model, bool has_model);

  /// A few lines of figures, and a row per rank if there are few.
  std::string text() const;
  /// Everything, with the trajectories of each rank.
  nlohmann::ordered_json json() const;
};

}  // namespace espalier::cli
