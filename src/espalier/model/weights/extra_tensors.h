// SPDX-License-Identifier: Apache-2.0
// Tensors in a model's files that are not parameters of the decoder.
#pragma once

#include <optional>
#include <string>

#include "espalier/config/config.h"

namespace espalier {

/// The reason why such a tensor must not be ignored, in terms of config.json; nullopt if it can be copied
/// unchanged: buffers that follow from the config (rotary_emb.inv_freq, scales of a key-value cache) and
/// parts of a larger model (vision towers, reward heads, multi-token prediction layers). A tensor that looks
/// like part of the decoder would change what the model computes: layers beyond num_hidden_layers, biases and
/// norms that the config does not have, unmerged adapters, scales of quantised weights. Does not check
/// `lm_head.weight` of a tied model, which depends on its values.
std::optional<std::string> reason_to_refuse(const DecoderConfig& config, const std::string& tensor);

}  // namespace espalier
