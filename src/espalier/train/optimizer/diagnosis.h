// SPDX-License-Identifier: Apache-2.0
// Why a step has no finite loss or gradient.
#pragma once

#include <string>

#include "espalier/engine/step.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/loss.h"

namespace espalier {

/// "`model.norm.weight` holds 3 values of 16 that are not finite (...)" and how many other parameters do; ""
/// where all are finite.
std::string nonfinite_parameters(const Decoder& decoder);

/// Explains why the loss or the gradients of a step that has run are not finite. It looks at parameters; at
/// log-probabilities, which are computed once more, by trajectory and token; at policy ratios too large for
/// float32; and at gradients by parameter. One clause per finding, joined by "; ".
std::string explain_nonfinite(const Decoder& decoder, const Step& step, const Loss& loss);

}  // namespace espalier
