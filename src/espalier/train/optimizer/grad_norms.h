// SPDX-License-Identifier: Apache-2.0
// Norms of the gradients of each kind of module.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/model/decoder.h"

namespace espalier {

/// What kind of module a parameter belongs to, by its name in the checkpoint: in a layer `norm`, `experts`,
/// `router`, or else the module of the layer, such as `self_attn` and `mlp`; outside of layers the module,
/// such as `embed_tokens` and `lm_head`, or `norm`. An adapter's matrices belong to their module.
std::string module_kind(std::string_view parameter);

/// Euclidean norms of the decoder's gradients by kind, in float64, in the order in which the kinds first
/// appear among its parameters. Their squares add up to that of Optimizer::gradient_norm. Waits for the
/// device.
std::vector<std::pair<std::string, double>> grad_norms_by_kind(const Decoder& decoder);

}  // namespace espalier
