// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/config.h"

#include <algorithm>
#include <string_view>
#include <system_error>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/hub_name.h"
#include "espalier/base/json_file.h"
#include "espalier/config/config_reader.h"
#include "espalier/config/families/family.h"
#include "espalier/config/rope.h"

namespace espalier {
namespace {

using Json = nlohmann::json;

// Keys written by Transformers 4 and 5, exporters and trainers that do not affect a forward or backward pass:
// bookkeeping, token ids, generation defaults, classification labels, caches.
constexpr std::string_view kHarmlessKeys =
    "do_sample architectures attn_implementation begin_suppress_tokens id2label bad_words_ids "
    "diversity_penalty chunk_size_feed_forward is_decoder early_stopping max_sequence_length "
    "encoder_no_repeat_ngram_size label2id finetuning_task max_window_layers "
    "exponential_decay_length_penalty max_length is_llama_config model_max_length "
    "keys_to_ignore_at_inference min_length length_penalty no_repeat_ngram_size remove_invalid_values "
    "num_beams name_or_path num_beam_groups return_dict_in_generate num_labels output_scores "
    "num_return_sequences task_specific_params prefix problem_type output_attentions tie_last_hidden_states "
    "return_dict temperature output_hidden_states tokenizer_model_max_length top_k tf_legacy_loss "
    "repetition_penalty tokenizer_padding_side top_p torchscript suppress_tokens transformers.js_config "
    "typical_p unsloth_fixed tokenizer_class transformers_version use_cache use_bfloat16 unsloth_version";

constexpr std::string_view kCommonKeys =
    "model_type vocab_size hidden_size num_hidden_layers initializer_range tie_word_embeddings dtype "
    "torch_dtype auto_map";

// Keys of layers with attention and an MLP.
constexpr std::string_view kAttentionKeys =
    "intermediate_size num_attention_heads num_key_value_heads head_dim max_position_embeddings rms_norm_eps "
    "rope_theta rope_scaling rope_parameters partial_rotary_factor attention_bias mlp_bias layer_types "
    "sliding_window use_sliding_window";

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (size_t end = 0; !text.empty(); text.remove_prefix(std::min(end + 1, text.size()))) {
    end = std::min(text.find(' '), text.size());
    words.push_back(text.substr(0, end));
  }
  return words;
}

// Keys that change the mathematics, with the values at which they have no effect. null counts as absent.
struct FixedKey {
  std::string_view key;
  std::vector<Json> accepted;
};

const std::vector<FixedKey>& fixed_keys() {
  static const std::vector<FixedKey> keys = {
      {"hidden_act", {"silu", "swish"}},
      {"attention_dropout", {0.0}},
      {"hidden_dropout", {0.0}},
      {"resid_pdrop", {0.0}},
      {"embd_pdrop", {0.0}},
      {"use_mrope", {false}},
      {"rope_interleaved", {false}},
      {"output_router_logits", {false, true}},  // flags of train set the router losses
      {"router_jitter_noise", {0.0}},
      {"pretraining_tp", {1}},
      {"is_encoder_decoder", {false}},
      {"add_cross_attention", {false}},
      {"tie_encoder_decoder", {false}},
      {"pruned_heads", {Json::object()}},
      {"per_layer_config", {Json::object()}},
      {"quantization_config", {}},
      {"compression_config", {}},
      {"cross_attention_hidden_size", {}},
  };
  return keys;
}

std::string describe(const std::vector<Json>& values) {
  if (values.empty()) return "no such key";
  std::string text;
  for (const Json& value : values) text += (text.empty() ? "" : " or ") + value.dump();
  return text;
}

void read_head_sizes(const ConfigReader& config, const ModelFamily& family, int64_t hidden_size,
                     AttentionSpec* result) {
  const bool has_default = family.num_key_value_heads > 0 && !config.has("num_key_value_heads");
  result->num_key_value_heads =
      config.positive_integer("num_key_value_heads", kMostHeads,
                              has_default ? family.num_key_value_heads : result->num_attention_heads);
  if (result->num_attention_heads % result->num_key_value_heads != 0) {
    config.refuse("num_key_value_heads",
                  fmt::format("a divisor of num_attention_heads, {}", result->num_attention_heads));
  }

  if (config.find("head_dim") != nullptr) {
    result->head_dim = config.positive_integer("head_dim", kMostHeadDim);
  } else if (family.head_dim > 0 && !(family.null_head_dim && config.has("head_dim"))) {
    result->head_dim = family.head_dim;
  } else {
    if (hidden_size % result->num_attention_heads != 0) {
      config.refuse("hidden_size",
                    fmt::format("a multiple of num_attention_heads, {}", result->num_attention_heads));
    }
    result->head_dim = hidden_size / result->num_attention_heads;
  }
  if (family.partial_rotary_factor == 0 && result->head_dim % 2 != 0) {
    config.refuse("head_dim", fmt::format("an even size for rotary embedding (here {})", result->head_dim));
  }
}

void refuse_unsupported_values(const ConfigReader& config, std::string_view other_keys = {}) {
  const std::vector<std::string_view> others = words_of(other_keys);
  const auto is_other = [&](std::string_view key) { return std::ranges::find(others, key) != others.end(); };
  for (const FixedKey& fixed : fixed_keys()) {
    if (is_other(fixed.key)) continue;
    const std::string key(fixed.key);
    const Json* value = config.find(key);
    if (value == nullptr) continue;
    if (std::find(fixed.accepted.begin(), fixed.accepted.end(), *value) == fixed.accepted.end()) {
      config.refuse(key, describe(fixed.accepted));
    }
  }
  if (const Json* map = config.find("auto_map"); map != nullptr && !is_other("auto_map")) {
    for (const auto& [name, unused] : map->items()) {
      if (name != "AutoTokenizer") config.refuse("auto_map", "no custom classes except AutoTokenizer");
    }
  }
}

void refuse_unknown_keys(const ConfigReader& config, const ModelFamily& family) {
  std::vector<std::string_view> known;
  for (const auto keys : {kCommonKeys, kHarmlessKeys, family.attention ? kAttentionKeys : "", family.keys}) {
    for (const std::string_view key : words_of(keys)) known.push_back(key);
  }
  for (const FixedKey& fixed : fixed_keys()) known.push_back(fixed.key);
  config.refuse_other_keys(known, family_names("and", ""));
}

/// Reads sizes and rotary positions of attention, and related keys.
CommonParts read_common(const ConfigReader& config, const ModelFamily& family, DecoderConfig* result) {
  CommonParts common;
  if (!family.only_experts)
    common.mlp.intermediate_size = config.positive_integer("intermediate_size", kMostIntermediate);
  common.attention.num_attention_heads = config.positive_integer("num_attention_heads", kMostHeads);
  read_head_sizes(config, family, result->hidden_size, &common.attention);
  result->max_position_embeddings =
      config.positive_integer("max_position_embeddings", kMostPositions, family.max_position_embeddings);
  result->rms_norm_eps = config.positive_number("rms_norm_eps", family.rms_norm_eps);
  family.read_rope(config, result);
  read_rotary_dim(config, family.partial_rotary_factor, &common.attention);
  return common;
}

/// Like torch.nn.Embedding: negative ids count from the end. Ids out of range mean no token.
int64_t read_pad_token(const ConfigReader& config, const ModelFamily& family, int64_t vocab_size) {
  if (!family.padding_row) return -1;
  const Json* value = config.find("pad_token_id");
  if (value == nullptr) {
    const bool is_token = !config.has("pad_token_id") && family.pad_token_id < vocab_size;
    return is_token ? family.pad_token_id : -1;
  }
  if (!value->is_number_integer() || *value < -vocab_size || *value >= vocab_size) return -1;
  const auto id = value->get<int64_t>();
  return id < 0 ? id + vocab_size : id;
}

DecoderConfig parse_decoder(const ConfigReader& config, const ModelFamily& family) {
  DecoderConfig result;
  result.model_type = family.model_type;
  result.vocab_size = config.positive_integer("vocab_size", kMostVocabulary);
  result.hidden_size = config.positive_integer("hidden_size", kMostHidden);
  if (!family.counts_layers) result.layers.resize(config.positive_integer("num_hidden_layers", kMostLayers));
  // Transformers also treats 0 as absent.
  const Json* range = config.find("initializer_range");
  const bool range_is_given = range != nullptr && *range != 0;
  result.initializer_range =
      range_is_given ? config.positive_number("initializer_range") : family.initializer_range;
  const CommonParts common = family.attention ? read_common(config, family, &result) : CommonParts();
  result.tie_word_embeddings = config.boolean("tie_word_embeddings", family.tie_word_embeddings);
  result.pad_token_id = read_pad_token(config, family, result.vocab_size);
  family.read(config, common, &result);
  if (result.sliding_rope) result.rope_tables = 2;
  result.dtype = config.text(config.find("dtype") != nullptr ? "dtype" : "torch_dtype");
  refuse_unsupported_values(config, family.keys);
  refuse_unknown_keys(config, family);
  return result;
}

/// Parses the text decoder of a model with a vision tower.
DecoderConfig parse_composite(const ConfigReader& config, const ModelFamily& family) {
  const Json* text = config.find("text_config");
  if (text == nullptr) config.refuse("text_config", fmt::format("the config of a {}", family.model_type));
  const ConfigReader inner(*text, config.file(), "text_config.");
  if (inner.text("model_type") != family.model_type) {
    inner.refuse("model_type", fmt::format("\"{}\"", family.model_type));
  }
  DecoderConfig result = parse_decoder(inner, family);
  result.parameter_prefix = "model.language_model.";
  // Transformers reads one or the other, depending on the class that loads the file.
  if (config.boolean("tie_word_embeddings", false) != result.tie_word_embeddings) {
    config.refuse("tie_word_embeddings", fmt::format("that of text_config, {}", result.tie_word_embeddings));
  }
  const std::string dtype = config.text(config.find("dtype") != nullptr ? "dtype" : "torch_dtype");
  if (!dtype.empty()) result.dtype = dtype;
  refuse_unsupported_values(config);
  std::vector<std::string_view> known = words_of(kHarmlessKeys);
  for (const char* key : {"model_type", "text_config", "vision_config", "tie_word_embeddings", "dtype",
                          "torch_dtype", "auto_map"}) {
    known.emplace_back(key);
  }
  config.refuse_other_keys(known, family_names("and", ""));
  return result;
}

}  // namespace

DecoderConfig parse_config(const nlohmann::json& json, const std::string& file) {
  const ConfigReader config(json, file);
  const std::string model_type = config.text("model_type");
  const ModelFamily* family = find_family(model_type);
  if (family == nullptr) config.refuse("model_type", family_names("or", "\""));
  return model_type == family->model_type ? parse_decoder(config, *family) : parse_composite(config, *family);
}

DecoderConfig read_config(const std::filesystem::path& model_folder) {
  std::error_code unknown;
  const std::filesystem::file_status status = std::filesystem::status(model_folder, unknown);
  ESPALIER_CHECK(std::filesystem::exists(status), "{}: expected a Hugging Face model folder, received {}{}",
                 model_folder.string(), model_folder.empty() ? "an empty name" : "a name that does not exist",
                 hub_advice(model_folder, HubKind::kModel));
  ESPALIER_CHECK(std::filesystem::is_directory(status),
                 "{}: expected a Hugging Face model folder, received a file", model_folder.string());
  return read_config_file(model_folder / "config.json");
}

DecoderConfig read_config_file(const std::filesystem::path& path) {
  return parse_config(read_json_file<Json>(path), path.string());
}

std::string config_with_dtype(const std::filesystem::path& path, const std::string& dtype) {
  auto json = read_json_file<nlohmann::ordered_json>(path);
  ESPALIER_CHECK(json.is_object(), "{}: expected a JSON object, received {}", path.string(),
                 json.type_name());
  return config_with_dtype(std::move(json), dtype);
}

std::string config_with_dtype(nlohmann::ordered_json config, const std::string& dtype) {
  const bool has_old_key = config.contains("torch_dtype");
  if (has_old_key) config["torch_dtype"] = dtype;
  if (!has_old_key || config.contains("dtype")) config["dtype"] = dtype;
  return config.dump(2) + "\n";
}

}  // namespace espalier
