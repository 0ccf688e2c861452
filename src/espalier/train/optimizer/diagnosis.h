// SPDX-License-Identifier: Apache-2.0
// What tells how a step went: values that are not finite, and norms of gradients by kind of module.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/distributed/group.h"
#include "espalier/engine/step.h"
#include "espalier/model/decoder.h"
#include "espalier/objective/loss.h"

namespace espalier {

/// "`model.norm.weight` holds 3 values of 16 that are not finite (...)" and the number of other such
/// parameters; "" if all are finite.
std::string nonfinite_parameters(const Decoder& decoder);

/// Explains why the loss or the gradients of a step are not finite. Checks parameters, log-probabilities
/// (which are recomputed) by trajectory and token, and policy ratios too large for float32; names the worst
/// gradient and the rows of the step. One clause per finding, joined by "; ".
std::string explain_nonfinite(const Decoder& decoder, const Step& step, const Loss& loss);

/// The parameter whose gradient has the largest share of values that are not finite, and how many others have
/// such values; if all are finite, the one whose gradient has the largest norm. "" without gradients.
std::string worst_gradient(const Decoder& decoder);

/// Trajectories as text: numbers and names of the first few, number of the others.
std::string row_list(const Trajectories& trajectories, const std::vector<int64_t>& rows);

/// The kind of module of a parameter, by its name in the checkpoint. In a layer: `norm`, `experts`, `router`,
/// or else the module of the layer, such as `self_attn` and `mlp`. Outside of layers: the module, such as
/// `embed_tokens` and `lm_head`, or `norm`. Matrices of an adapter belong to the module they adapt.
std::string module_kind(std::string_view parameter);

/// L2 norms of the gradients by kind, over the parts of all ranks, in float64, in the order in which the
/// kinds first appear among the parameters. Their squares add up to the square of StepTrainer::gradient_norm.
/// Synchronises the device.
std::vector<std::pair<std::string, double>> grad_norms_by_kind(const Decoder& decoder,
                                                               const Group& group = alone());

}  // namespace espalier
