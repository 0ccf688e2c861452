// SPDX-License-Identifier: Apache-2.0
// The config.json of a Hugging Face decoder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/config/gated_delta_spec.h"
#include "espalier/config/moe_spec.h"
#include "espalier/config/ssm_spec.h"

namespace espalier {

/// Rotary position embedding of type `linear`: all frequencies are slowed alike.
struct LinearRope {
  double factor = 1;
};

/// Of type `llama3` (Llama 3.1): frequencies are slowed by wavelength.
struct Llama3Rope {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
};

/// Of type `yarn` (Peng et al., YaRN, 2023): frequencies are slowed by the turns that they make in the
/// original context, and queries and keys scaled.
struct YarnRope {
  double factor = 1;
  int64_t original_max_position_embeddings = 0;
  double beta_fast = 32;  // with as many turns, frequencies stay as they are,
  double beta_slow = 1;   // with as few, they are slowed by `factor`
  bool truncate = true;   // the bounds between them to whole dimensions
  double attention_factor =
      1;  // of cos and sin; computed from factor, mscale and mscale_all_dim if not given
};

/// Rotary position embedding.
struct Rope {
  double rope_theta = 10000;
  std::variant<std::monostate, LinearRope, Llama3Rope, YarnRope> scaling = {};  // none: type `default`
};

/// What the decoder needs of config.json; names as there.
struct DecoderConfig {
  std::string model_type;  // of a family (config/families/family.h)
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  Rope rope;
  std::optional<Rope> sliding_rope;  // olmo3: of the layers with a sliding window
  int64_t sliding_window = 0;        // of the layers that have one
  std::vector<bool> sliding_layers;  // by layer, whether it has one; empty: none has
  bool tie_word_embeddings = false;
  bool attention_bias = false;  // bias of q, k, v (and of o where attention_output_bias)
  bool attention_output_bias = false;
  bool mlp_bias = false;
  bool query_key_norm = false;             // qwen3, olmo3: RMSNorm of q and k, per head
  bool query_key_norm_over_heads = false;  // olmo3: over all heads at once
  bool norm_outputs = false;           // olmo3: norms of what attention and MLP give, not of what they take
  bool attention_sinks = false;        // gpt_oss: a learned logit per head in the softmax's denominator
  int64_t rotary_dim = 0;              // leading elements of a head that are rotated; 0: all
  bool attention_output_gate = false;  // qwen3_5: q_proj also gives a gate for the output of each head
  bool zero_centered_norm = false;     // qwen3_5: norms of hidden states, q and k multiply by 1 + weight
  GatedDeltaSpec gated_delta;          // the mixer of gated_delta_layers; the others have attention
  std::vector<int64_t> gated_delta_layers;  // ascending
  MoeSpec moe;                              // the MLP of moe_layers; the other layers have a dense one
  std::vector<int64_t> moe_layers;          // ascending
  int64_t num_prediction_layers = 0;  // behind the decoder's in the files (GLM: num_nextn_predict_layers)
  bool rotary = true;                 // attention has rotary positions, those of `rope`
  SsmSpec ssm;                        // the mixer of ssm_layers
  std::optional<SsmInit> ssm_init;    // mamba2
  std::vector<int64_t> ssm_layers;    // ascending
  bool only_mixers = false;           // mamba2: layers have no MLP
  bool fused_mlp = false;             // granitemoehybrid: gate and up of dense MLPs are one matrix
  bool residual_in_fp32 = false;      // mamba2: hidden states between layers are float32 at least
  double embedding_multiplier = 1;    // granitemoehybrid: of what the embedding gives,
  double attention_multiplier = 0;    // of attention's scores (0: 1 / sqrt(head_dim)),
  double residual_multiplier = 1;     // of what mixers and MLPs add to hidden states
  double logits_scaling = 1;          // by which logits are divided
  std::string parameter_prefix = "model.";  // of all parameters but the LM head
  std::string embedding_name = "embed_tokens";
  std::string final_norm_name = "norm";
  /// The token whose row of the embedding Transformers gives no gradient (padding_idx of torch.nn.Embedding,
  /// but where the embedding is also the LM head, from that side); -1: none.
  int64_t pad_token_id = -1;
  /// The same here. Not of config.json: a run chooses (Decoder::freeze_pad_embedding).
  bool freeze_pad_embedding = false;
  std::string dtype;  // dtype that the file declares, "" if none
};

/// Reads config.json as Transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype)
/// write it. A feature that the family does not have (a sliding window, other rope types, dropout > 0,
/// quantisation, another hidden_act, unknown model_type, ...) throws InputError naming key, value and file.
/// Of a composite model (vision and text) the text decoder is read, from `text_config`.
DecoderConfig read_config(const std::filesystem::path& model_folder);
DecoderConfig read_config_file(const std::filesystem::path& path);
DecoderConfig parse_config(const nlohmann::json& json, const std::string& file);

/// The text of the config.json at `path` with its dtype key set to `dtype` ("float32", ...): `dtype` or
/// `torch_dtype`, whichever is there, `dtype` where neither is. All else stays, the order of keys included.
std::string config_with_dtype(const std::filesystem::path& path, const std::string& dtype);
/// The same of a config.json that has been read.
std::string config_with_dtype(nlohmann::ordered_json config, const std::string& dtype);

}  // namespace espalier
