// SPDX-License-Identifier: Apache-2.0
// Tensors in a model's files that are none of the decoder's parameters.
#pragma once

#include <optional>
#include <string>

#include "espalier/config/config.h"

namespace espalier {

/// Why such a tensor must not be passed over, in the words of config.json; nullopt for one that can be
/// carried along unchanged: buffers that follow from the config (rotary_emb.inv_freq, scales of a key-value
/// cache) and parts of a larger model that the decoder does without (vision towers, heads for rewards or for
/// more tokens at once, such as layers behind the decoder's own that the config counts). What looks like the
/// decoder's own changes what the model computes, so leaving it out would train another model than the files
/// hold: layers beyond num_hidden_layers, biases and norms that the config does not have, adapters that are
/// not merged, scales of quantised weights. `lm_head.weight` of a tied model is not judged here, since its
/// values decide.
std::optional<std::string> reason_to_refuse(const DecoderConfig& config, const std::string& tensor);

}  // namespace espalier
