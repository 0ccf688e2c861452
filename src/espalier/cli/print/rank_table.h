// SPDX-License-Identifier: Apache-2.0
// What espalier plan --ranks shows: how the trajectories of a step are distributed over processes.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/plan/ranks.h"

namespace espalier::cli {

/// A distribution over ranks, and for comparison that of whole trajectories without trees.
struct RankTable {
  RankPlan plan;
  RankPlan trajectories;
  int64_t forest_tokens = 0;
  bool has_model = false;  // the seconds are those of a model that was given

  RankTable(const Forest& forest, int64_t num_ranks, const TimeModel& model, bool has_model);

  /// The figures in a few lines, and a row for each rank where they are few.
  std::string text() const;
  /// All of it, with the trajectories of each rank.
  nlohmann::ordered_json json() const;
};

}  // namespace espalier::cli
