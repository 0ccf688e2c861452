// SPDX-License-Identifier: Apache-2.0
// What a run says of each step and evaluation, in a line.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/train/run_state.h"

namespace espalier::cli {

/// `metrics`: as in metrics.jsonl.
std::string step_line(int64_t step, int64_t total, const nlohmann::ordered_json& metrics);

/// `state`: after this evaluation.
std::string evaluation_line(int64_t step, int64_t total, const nlohmann::ordered_json& values,
                            const EvaluationState& state);

}  // namespace espalier::cli
