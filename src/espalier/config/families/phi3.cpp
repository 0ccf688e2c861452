// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/family.h"
#include "espalier/config/sliding_window.h"

namespace espalier {
namespace {

void read_phi3(const ConfigReader& config, const CommonParts& common, DecoderConfig* result) {
  refuse_biases(config);
  auto [attention, mlp] = common;
  attention.fused = true;
  mlp.names = {.gate = "gate_up_proj", .up = "", .down = "down_proj"};
  result->layers.assign(result->layers.size(), {attention, mlp});
  read_common_window(config, /*default_window=*/0, result);
}

// Transformers has longrope besides, whose frequencies depend on the length of a sequence: the trajectories
// of a tree would rotate their common tokens differently.
void read_plain_rope(const ConfigReader& config, DecoderConfig* result) {
  for (const std::string name : {"rope_parameters", "rope_scaling"}) {
    if (config.find(name) == nullptr) continue;
    const ConfigReader rope(*config.find(name), config.file(), name + ".");
    for (const char* key : {"rope_type", "type"}) {
      const std::string type = rope.text(key);
      if (!type.empty() && type != "default") rope.refuse(key, "\"default\"");
    }
  }
  read_rope(config, result);
}

}  // namespace

constexpr ModelFamily kPhi3Family{
    .model_type = "phi3",
    .max_position_embeddings = 4096,
    .rms_norm_eps = 1e-5,
    .partial_rotary_factor = 1,
    .pad_token_id = 32000,
    // Only longrope reads original_max_position_embeddings.
    .keys = "original_max_position_embeddings",
    .read = read_phi3,
    .read_rope = read_plain_rope,
};

}  // namespace espalier
