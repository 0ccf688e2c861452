// SPDX-License-Identifier: Apache-2.0
// Gradient norms by kind of module.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "espalier/model/decoder.h"

namespace espalier {

/// The kind of module of a parameter, by its name in the checkpoint. In a layer: `norm`, `experts`, `router`,
/// or else the module of the layer, such as `self_attn` and `mlp`. Outside of layers: the module, such as
/// `embed_tokens` and `lm_head`, or `norm`. Matrices of an adapter belong to the module they adapt.
std::string module_kind(std::string_view parameter);

/// L2 norms of the decoder's gradients by kind, in float64, in the order in which the kinds first appear
/// among its parameters. Their squares add up to the square of Optimizer::gradient_norm. Synchronises the
/// device.
std::vector<std::pair<std::string, double>> grad_norms_by_kind(const Decoder& decoder);

}  // namespace espalier
