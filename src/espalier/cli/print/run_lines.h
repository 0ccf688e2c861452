// SPDX-License-Identifier: Apache-2.0
// Lines of a run: what its steps and evaluations came to.
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
