// SPDX-License-Identifier: Apache-2.0
// Families of decoders: what a config.json means where families differ. Names of parameters follow from
// layers (config/layer_spec.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "espalier/config/config.h"
#include "espalier/config/config_reader.h"
#include "espalier/config/rope.h"

namespace espalier {

/// What the keys that several families have say of each layer.
struct CommonParts {
  AttentionSpec attention;  // its sizes; without `attention` (ModelFamily) empty, as is the MLP
  DenseMlpSpec mlp;         // its width
};

struct ModelFamily {
  const char* model_type;

  // Transformers' defaults for keys that are not there.
  int64_t max_position_embeddings;
  int64_t num_key_value_heads;  // 0: as many as num_attention_heads, as null says in every family
  int64_t head_dim;             // 0: hidden_size / num_attention_heads
  double rms_norm_eps = 1e-6;
  double partial_rotary_factor = 0;  // 0: the family rotates whole heads

  /// The model_type of files that hold such a decoder in their text_config, beside a vision tower; "": none.
  const char* composite_type = "";

  double initializer_range = 0.02;

  bool attention = true;  // false: no layer has any, nor an MLP, and the config no keys of either

  int64_t pad_token_id = -1;  // Transformers' default; -1: none
  bool padding_row = true;    // its embedding has a padding_idx (DecoderConfig::pad_token_id)

  bool only_experts = false;  // no layer has a dense MLP, of which intermediate_size is the width

  std::span<const std::string_view> keys = {};  // the family's own, beside those that several families have

  /// Reads the family's own keys (biases, norms, sliding windows) and makes the layers of `result`, whose
  /// sizes and number of layers are set; refuses those values that the family does not have.
  void (*read)(const ConfigReader& config, const CommonParts& common, DecoderConfig* result);

  /// Reads rope and sliding_rope of `result`, whose max_position_embeddings is set.
  void (*read_rope)(const ConfigReader& config, DecoderConfig* result) = &espalier::read_rope;
};

extern const ModelFamily kLlamaFamily, kMistralFamily, kOlmo3Family, kQwen2Family, kQwen3Family,
    kQwen35Family, kQwen35MoeFamily, kQwen3MoeFamily, kQwen3NextFamily, kGlm4MoeFamily, kGptOssFamily,
    kGraniteMoeHybridFamily, kMamba2Family;  // a file each

std::span<const ModelFamily* const> families();

/// attention_bias, of all four maps of attention, and mlp_bias, which has to be false.
void read_biases(const ConfigReader& config, AttentionSpec* attention);

/// By the model_type of a decoder or of a composite model. Null where there is no such family.
const ModelFamily* find_family(const std::string& model_type);

/// "llama, mistral, ... CONJUNCTION qwen3", all that find_family knows, each between two of `quote`.
std::string family_names(const std::string& conjunction, const std::string& quote);

}  // namespace espalier
