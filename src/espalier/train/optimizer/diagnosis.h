// SPDX-License-Identifier: Apache-2.0
// Diagnosis of steps whose loss or gradient is not finite.
#pragma once

#include <string>

#include "espalier/engine/step.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/loss.h"

namespace espalier {

/// "`model.norm.weight` holds 3 values of 16 that are not finite (...)" and the number of other such
/// parameters; "" if all are finite.
std::string nonfinite_parameters(const Decoder& decoder);

/// Explains why the loss or the gradients of a step are not finite. Checks parameters, log-probabilities
/// (which are recomputed) by trajectory and token, policy ratios too large for float32, and gradients by
/// parameter. One clause per finding, joined by "; ".
std::string explain_nonfinite(const Decoder& decoder, const Step& step, const Loss& loss);

}  // namespace espalier
