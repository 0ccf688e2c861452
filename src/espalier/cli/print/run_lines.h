// SPDX-License-Identifier: Apache-2.0
// Log lines of a training run, for steps and evaluations.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/train/run/run_state.h"

namespace espalier::cli {

/// `step` of `total`; the metrics as in metrics.jsonl.
std::string step_line(int64_t step, int64_t total, const nlohmann::ordered_json& metrics);
std::string evaluation_line(int64_t step, int64_t total, const nlohmann::ordered_json& values,
                            const EvaluationState& state);

}  // namespace espalier::cli
