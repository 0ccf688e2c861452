// SPDX-License-Identifier: Apache-2.0
// The config.json of a Hugging Face decoder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <variant>

#include <nlohmann/json.hpp>

#include "espalier/config/layer_spec.h"

namespace espalier {

/// Rotary position embedding of type `linear`: all frequencies are divided by `factor`.
struct LinearRope {
  double factor = 1;
};

/// Type `llama3` (Llama 3.1): frequencies are scaled depending on their wavelength.
struct Llama3Rope {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
};

/// Type `yarn` (Peng et al., YaRN, 2023): frequencies are scaled depending on their number of rotations in
/// the original context, and queries and keys are scaled.
struct YarnRope {
  double factor = 1;
  int64_t original_max_position_embeddings = 0;
  double beta_fast = 32;      // from this many rotations on, frequencies stay unchanged
  double beta_slow = 1;       // up to this many, they are divided by `factor`
  bool truncate = true;       // round the bounds of the interpolation to whole dimensions
  double mscale_all_dim = 0;  // attention with its own scale (deepseek_v3); 0: none
  double attention_factor =
      1;  // of cos and sin; computed from factor, mscale and mscale_all_dim if not given
};

/// Rotary position embedding.
struct Rope {
  double rope_theta = 10000;
  std::variant<std::monostate, LinearRope, Llama3Rope, YarnRope> scaling = {};  // monostate: type `default`
};

/// The values of config.json that the decoder needs, with their names there.
struct DecoderConfig : ModelSpec {
  std::string model_type;  // of a family (config/families/family.h)
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  Rope rope;
  std::optional<Rope> sliding_rope;   // of layers with a sliding window, if different
  int64_t num_prediction_layers = 0;  // stored after the decoder's layers (GLM: num_nextn_predict_layers)
  std::optional<SsmInit> ssm_init;
  bool residual_in_fp32 = false;            // hidden states between layers are at least float32
  double embedding_multiplier = 1;          // scales the output of the embedding
  bool round_embedding_multiplier = false;  // to the dtype of the weights
  double residual_multiplier = 1;           // scales the outputs of mixers and MLPs before they are added
  double logits_scaling = 1;                // divides logits
  /// Logits z become final_logit_softcapping * tanh(z / final_logit_softcapping); 0: as they are.
  double final_logit_softcapping = 0;
  /// The token whose embedding row gets no gradient in Transformers (padding_idx of torch.nn.Embedding),
  /// except from the LM head if it is tied; -1: none.
  int64_t pad_token_id = -1;
  /// Whether this row gets no gradient here either. Not from config.json: an option of training
  /// (Decoder::freeze_pad_embedding).
  bool freeze_pad_embedding = false;
  std::string dtype;  // as declared in the file, "" if none
};

/// Reads config.json as written by Transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5
/// (rope_parameters, dtype). An unsupported feature (a sliding window, other rope types, dropout > 0,
/// quantisation, another hidden_act, unknown model_type, ...) throws InputError naming key, value and file.
/// For a composite model (vision and text) it reads the text decoder from `text_config`.
DecoderConfig read_config(const std::filesystem::path& model_folder);
DecoderConfig read_config_file(const std::filesystem::path& path);
DecoderConfig parse_config(const nlohmann::json& json, const std::string& file);

/// The text of the config.json at `path` with its key `dtype` or `torch_dtype`, whichever is present
/// (otherwise `dtype`), set to `dtype` ("float32", ...). Everything else stays, including the order of keys.
std::string config_with_dtype(const std::filesystem::path& path, const std::string& dtype);
/// Likewise for a parsed config.json.
std::string config_with_dtype(nlohmann::ordered_json config, const std::string& dtype);

}  // namespace espalier
