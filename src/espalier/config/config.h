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

#include "espalier/config/layer_spec.h"

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
struct DecoderConfig : ModelSpec {
  std::string model_type;  // of a family (config/families/family.h)
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  Rope rope;
  std::optional<Rope> sliding_rope;   // of the layers with a sliding window, where they have their own
  int64_t num_prediction_layers = 0;  // behind the decoder's in the files (GLM: num_nextn_predict_layers)
  std::optional<SsmInit> ssm_init;
  bool residual_in_fp32 = false;    // hidden states between layers are float32 at least
  double embedding_multiplier = 1;  // of what the embedding gives,
  double residual_multiplier = 1;   // of what mixers and MLPs add to hidden states
  double logits_scaling = 1;        // by which logits are divided
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
