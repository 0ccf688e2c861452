// How a plan is shown.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "espalier/plan/plan.h"
#include "espalier/tree/forest.h"

namespace espalier::cli {

/// A table of the micro-batches (the first `max_rows`), and totals.
std::string plan_table(const Forest& forest, const Plan& plan, int64_t max_rows);

/// Totals and, per micro-batch, tokens, pairs, trajectories and runs (begin, end, parent).
nlohmann::ordered_json plan_json(const Forest& forest, const Plan& plan);

}  // namespace espalier::cli
