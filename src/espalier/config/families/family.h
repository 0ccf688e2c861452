// SPDX-License-Identifier: Apache-2.0
// Families of decoders: how a config.json is read where families differ. Names of parameters follow from the
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

/// The parts of a layer that are read from keys shared by several families.
struct CommonParts {
  AttentionSpec attention;  // sizes only; empty, like the MLP, without ModelFamily::attention
  DenseMlpSpec mlp;         // width only
};

struct ModelFamily {
  const char* model_type;

  // Transformers' defaults for absent keys.
  int64_t max_position_embeddings;
  int64_t num_key_value_heads = 0;  // 0: num_attention_heads, which null means in every family
  int64_t head_dim = 0;             // 0: hidden_size / num_attention_heads
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000;
  double partial_rotary_factor = 0;  // 0: the family rotates whole heads
  bool tie_word_embeddings = false;
  bool null_head_dim = false;  // null as head_dim is hidden_size / num_attention_heads, not the default

  /// The model_type of composite models with a vision tower and this decoder in text_config; "": none.
  const char* composite_type = "";

  double initializer_range = 0.02;

  bool attention = true;  // false: no layer has attention or an MLP, and the config has no keys of either

  int64_t pad_token_id = -1;  // Transformers' default; -1: none
  bool padding_row = true;    // the embedding has a padding_idx (DecoderConfig::pad_token_id)

  bool counts_layers = false;  // `read` finds out how many layers there are

  bool only_experts = false;  // no layer has a dense MLP (of width intermediate_size)

  /// Keys of this family only, and those of all families that `read` checks or that this one ignores, with
  /// spaces between them.
  std::string_view keys = {};

  /// Which keys say whether parameters NAME.bias of a layer exist: "BEGINNING=KEY" with spaces between them,
  /// of which the first one counts that NAME begins with; no key: never.
  std::string_view bias_keys = {};

  /// Reads the family's keys (biases, norms, sliding windows) and creates the layers of `result`, whose sizes
  /// and number of layers are set. Throws InputError for values that the family does not support.
  void (*read)(const ConfigReader& config, const CommonParts& common, DecoderConfig* result);

  /// Reads rope and sliding_rope of `result`, whose max_position_embeddings is set.
  void (*read_rope)(const ConfigReader& config, DecoderConfig* result) = &espalier::read_rope;
};

extern const ModelFamily kLlamaFamily, kMistralFamily, kMinistralFamily, kMixtralFamily, kOlmo2Family,
    kOlmo3Family, kSmolLm3Family, kQwen2Family, kQwen3Family, kQwen35Family, kQwen35MoeFamily,
    kQwen3MoeFamily, kQwen3NextFamily, kGlm4MoeFamily, kGptOssFamily, kGraniteFamily, kGraniteMoeHybridFamily,
    kMamba2Family, kNemotronHFamily, kDeepseekV3Family, kSeedOssFamily, kErnie45Family, kExaone4Family,
    kPhi3Family, kGemmaFamily, kGemma2Family, kGemma3Family;

std::span<const ModelFamily* const> families();

/// The key of ModelFamily::bias_keys for a bias, by its name in the layer; "": none.
std::string_view bias_key(const DecoderConfig& config, std::string_view bias);

/// Reads attention_bias, for all four maps of attention, and mlp_bias, for those of `mlp`; without it, that
/// must be false.
void read_biases(const ConfigReader& config, AttentionSpec* attention, DenseMlpSpec* mlp = nullptr);

/// Throws InputError if attention_bias or mlp_bias is true.
void refuse_biases(const ConfigReader& config);

/// Reads the factors of Granite: attention_multiplier, embedding_multiplier, residual_multiplier and
/// logits_scaling.
void read_multipliers(const ConfigReader& config, AttentionSpec* attention, DecoderConfig* result);

/// The family with the model_type of a decoder or a composite model; nullptr if there is none.
const ModelFamily* find_family(const std::string& model_type);

/// "llama, mistral, ... CONJUNCTION qwen3": all families, each in quotes of `quote`.
std::string family_names(const std::string& conjunction, const std::string& quote);

}  // namespace espalier
