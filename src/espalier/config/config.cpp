// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/config.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <vector>

#include "espalier/base/check.h"
#include "espalier/base/json_file.h"

namespace espalier {
namespace {

using Json = nlohmann::json;

// Keys that Transformers 4 and 5, exporters and trainers write and that do not touch the mathematics of a
// forward or backward pass: bookkeeping, token ids, generation defaults, classification labels, caches.
constexpr auto kHarmlessKeys = std::to_array<std::string_view>({
    "architectures",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "id2label",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "max_window_layers",
    "min_length",
    "model_max_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_last_hidden_states",
    "tokenizer_class",
    "tokenizer_model_max_length",
    "tokenizer_padding_side",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
});

// Keys that change the mathematics, with the values at which they do not. null always counts as absent.
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
      {"use_sliding_window", {false}},
      {"use_mrope", {false}},
      {"rope_interleaved", {false}},
      {"partial_rotary_factor", {1.0}},
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

std::string brief(const Json& value) {
  const auto is_nested = [](const Json& item) { return item.is_structured(); };
  if (value.is_structured() && std::any_of(value.begin(), value.end(), is_nested)) {
    return fmt::format("a nested {} of {} entries", value.type_name(), value.size());
  }
  constexpr size_t kLongest = 120;
  std::string text = value.dump();
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

std::string describe(const std::vector<Json>& values) {
  if (values.empty()) return "no such key";
  std::string text;
  for (const Json& value : values) text += (text.empty() ? "" : " or ") + value.dump();
  return text;
}

// The largest sizes that are taken: several times those of any model there is. A file with larger ones is
// broken, and what would be allocated for it could take all memory. They also keep the number of parameters,
// and of their bytes, inside 64 bits.
constexpr int64_t kMostLayers = 4096;
constexpr int64_t kMostHeads = 4096;
constexpr int64_t kMostHeadDim = 16'384;
constexpr int64_t kMostHidden = int64_t{1} << 18;
constexpr int64_t kMostIntermediate = int64_t{1} << 20;
constexpr int64_t kMostVocabulary = int64_t{1} << 24;
constexpr int64_t kMostPositions = std::numeric_limits<int32_t>::max();

/// One JSON object with typed look-ups that name file and key in their errors. null counts as absent.
class Reader {
 public:
  Reader(const Json& json, std::string file, std::string prefix = "")
      : json_(json), file_(std::move(file)), prefix_(std::move(prefix)) {
    ESPALIER_CHECK(json.is_object(), "{}: {}expected a JSON object, received {}", file_,
                   prefix_.empty() ? "" : prefix_ + ": ", json.type_name());
  }

  const Json* find(const std::string& key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }

  bool has(const std::string& key) const { return json_.contains(key); }

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    const auto it = json_.find(key);
    throw InputError(fmt::format("{}: {}{}: expected {}, received {}", file_, prefix_, key, expected,
                                 it == json_.end() ? "no such key" : brief(*it)));
  }

  int64_t positive_integer(const std::string& key, int64_t largest,
                           std::optional<int64_t> otherwise = {}) const {
    const Json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr || !value->is_number_integer() || *value < 1 || *value > largest) {
      refuse(key, fmt::format("an integer from 1 to {}", largest));
    }
    return value->get<int64_t>();
  }

  double positive_number(const std::string& key, std::optional<double> otherwise = {}) const {
    const Json* value = find(key);
    if (value == nullptr && otherwise) return *otherwise;
    if (value == nullptr || !value->is_number() || !(value->get<double>() > 0))
      refuse(key, "a number above 0");
    return value->get<double>();
  }

  bool boolean(const std::string& key, bool otherwise) const {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse(key, "true or false");
    return value->get<bool>();
  }

  std::string text(const std::string& key) const {
    const Json* value = find(key);
    if (value == nullptr) return "";
    if (!value->is_string()) refuse(key, "a string");
    return value->get<std::string>();
  }

  void refuse_other_keys(const std::vector<std::string_view>& known) const {
    for (const auto& [key, value] : json_.items()) {
      // A leading underscore marks what a library notes for itself; special tokens concern generation.
      if (value.is_null() || key.starts_with('_') || key.ends_with("_token_id") ||
          std::find(known.begin(), known.end(), key) != known.end())
        continue;
      throw InputError(fmt::format(
          "{}: {}{} = {}: unknown key, which may change the mathematics of the model; expected the keys of "
          "llama, qwen2 and qwen3 (remove the key if it has no effect)",
          file_, prefix_, key, brief(value)));
    }
  }

  const std::string& file() const { return file_; }

 private:
  const Json& json_;
  std::string file_;
  std::string prefix_;
};

void read_rope_object(const Reader& config, const std::string& name, DecoderConfig* result) {
  const Reader rope(*config.find(name), config.file(), name + ".");
  const std::string type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  const std::string type = rope.find(type_key) != nullptr ? rope.text(type_key) : "default";

  std::vector<std::string_view> known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"};
  if (type == "llama3") {
    result->llama3_rope = Llama3Rope{
        .factor = rope.positive_number("factor"),
        .low_freq_factor = rope.positive_number("low_freq_factor"),
        .high_freq_factor = rope.positive_number("high_freq_factor"),
        .original_max_position_embeddings = rope.positive_integer(
            "original_max_position_embeddings", kMostPositions, result->max_position_embeddings),
    };
    if (!(result->llama3_rope->high_freq_factor > result->llama3_rope->low_freq_factor)) {
      rope.refuse("high_freq_factor", "more than low_freq_factor");
    }
    known.insert(known.end(),
                 {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"});
  } else if (type != "default") {
    rope.refuse(type_key, "\"default\" or \"llama3\"");
  }
  if (const Json* part = rope.find("partial_rotary_factor"); part != nullptr && *part != 1.0) {
    rope.refuse("partial_rotary_factor", "1.0");
  }
  rope.refuse_other_keys(known);

  const double theta = rope.positive_number("rope_theta", result->rope_theta);
  if (config.find("rope_theta") != nullptr && theta != result->rope_theta) {
    // Transformers 4 follows the outer value and Transformers 5 the inner one.
    rope.refuse("rope_theta", fmt::format("the rope_theta beside {}, {}", name, result->rope_theta));
  }
  result->rope_theta = theta;
}

void read_rope(const Reader& config, DecoderConfig* result) {
  result->rope_theta = config.positive_number("rope_theta", 10000);
  std::vector<std::string> present;
  for (const std::string name : {"rope_parameters", "rope_scaling"}) {
    const Json* value = config.find(name);
    if (value != nullptr && !(value->is_object() && value->empty())) present.push_back(name);
  }
  if (present.size() > 1) config.refuse("rope_scaling", "null where rope_parameters is given");
  if (!present.empty()) read_rope_object(config, present[0], result);
}

void read_biases(const Reader& config, DecoderConfig* result) {
  if (result->model_type == "qwen2") {
    // Transformers hard-codes the biases of qwen2: on q, k and v, not on o.
    if (!config.boolean("attention_bias", true)) config.refuse("attention_bias", "true for qwen2");
    result->attention_bias = true;
  } else {
    result->attention_bias = config.boolean("attention_bias", false);
    result->attention_output_bias = result->attention_bias;
  }
  result->mlp_bias = config.boolean("mlp_bias", false);
  if (result->mlp_bias && result->model_type != "llama") config.refuse("mlp_bias", "false");
}

void read_head_sizes(const Reader& config, DecoderConfig* result) {
  // Transformers' defaults: null means all heads, and so does a missing key for llama, but 32 for qwen
  // models.
  const bool all_heads = result->model_type == "llama" || config.has("num_key_value_heads");
  result->num_key_value_heads = config.positive_integer("num_key_value_heads", kMostHeads,
                                                        all_heads ? result->num_attention_heads : 32);
  if (result->num_attention_heads % result->num_key_value_heads != 0) {
    config.refuse("num_key_value_heads",
                  fmt::format("a divisor of num_attention_heads, {}", result->num_attention_heads));
  }

  if (config.find("head_dim") == nullptr && result->model_type == "qwen3") {
    result->head_dim = 128;
  } else if (config.find("head_dim") == nullptr) {
    if (result->hidden_size % result->num_attention_heads != 0) {
      config.refuse("hidden_size",
                    fmt::format("a multiple of num_attention_heads, {}", result->num_attention_heads));
    }
    result->head_dim = result->hidden_size / result->num_attention_heads;
  } else {
    result->head_dim = config.positive_integer("head_dim", kMostHeadDim);
  }
  if (result->head_dim % 2 != 0) {
    config.refuse("head_dim", fmt::format("an even size for rotary embedding (here {})", result->head_dim));
  }
}

void refuse_unsupported_values(const Reader& config, const DecoderConfig& result) {
  for (const FixedKey& fixed : fixed_keys()) {
    const std::string key(fixed.key);
    const Json* value = config.find(key);
    if (value == nullptr) continue;
    if (std::find(fixed.accepted.begin(), fixed.accepted.end(), *value) == fixed.accepted.end()) {
      config.refuse(key, describe(fixed.accepted));
    }
  }
  if (const Json* types = config.find("layer_types"); types != nullptr) {
    const bool fits =
        types->is_array() && static_cast<int64_t>(types->size()) == result.num_hidden_layers &&
        std::all_of(types->begin(), types->end(), [](const Json& type) { return type == "full_attention"; });
    if (!fits) {
      config.refuse("layer_types", fmt::format("{} times \"full_attention\"", result.num_hidden_layers));
    }
  }
  // qwen models use the window only where use_sliding_window says so; llama models have no such switch.
  if (result.model_type == "llama" && config.find("sliding_window") != nullptr &&
      config.find("use_sliding_window") == nullptr) {
    config.refuse("sliding_window", "null");
  }
  if (const Json* map = config.find("auto_map"); map != nullptr) {
    for (const auto& [name, unused] : map->items()) {
      if (name != "AutoTokenizer") config.refuse("auto_map", "no classes of its own but AutoTokenizer");
    }
  }
}

void refuse_unknown_keys(const Reader& config) {
  std::vector<std::string_view> known = {"model_type",
                                         "vocab_size",
                                         "hidden_size",
                                         "intermediate_size",
                                         "num_hidden_layers",
                                         "num_attention_heads",
                                         "num_key_value_heads",
                                         "head_dim",
                                         "max_position_embeddings",
                                         "rms_norm_eps",
                                         "initializer_range",
                                         "rope_theta",
                                         "rope_scaling",
                                         "rope_parameters",
                                         "tie_word_embeddings",
                                         "attention_bias",
                                         "mlp_bias",
                                         "dtype",
                                         "torch_dtype",
                                         "layer_types",
                                         "sliding_window",
                                         "auto_map"};
  known.insert(known.end(), kHarmlessKeys.begin(), kHarmlessKeys.end());
  for (const FixedKey& fixed : fixed_keys()) known.push_back(fixed.key);
  config.refuse_other_keys(known);
}

}  // namespace

DecoderConfig parse_config(const nlohmann::json& json, const std::string& file) {
  const Reader config(json, file);
  DecoderConfig result;
  result.model_type = config.text("model_type");
  if (result.model_type != "llama" && result.model_type != "qwen2" && result.model_type != "qwen3") {
    config.refuse("model_type", "\"llama\", \"qwen2\" or \"qwen3\"");
  }
  result.vocab_size = config.positive_integer("vocab_size", kMostVocabulary);
  result.hidden_size = config.positive_integer("hidden_size", kMostHidden);
  result.intermediate_size = config.positive_integer("intermediate_size", kMostIntermediate);
  result.num_hidden_layers = config.positive_integer("num_hidden_layers", kMostLayers);
  result.num_attention_heads = config.positive_integer("num_attention_heads", kMostHeads);
  read_head_sizes(config, &result);
  result.max_position_embeddings = config.positive_integer("max_position_embeddings", kMostPositions,
                                                           result.model_type == "llama" ? 2048 : 32768);
  result.rms_norm_eps = config.positive_number("rms_norm_eps", 1e-6);
  // Transformers, too, takes 0 as not given.
  const Json* range = config.find("initializer_range");
  const bool range_is_given = range != nullptr && *range != 0;
  result.initializer_range = range_is_given ? config.positive_number("initializer_range") : 0.02;
  read_rope(config, &result);
  result.tie_word_embeddings = config.boolean("tie_word_embeddings", false);
  read_biases(config, &result);
  result.query_key_norm = result.model_type == "qwen3";
  result.dtype = config.text(config.find("dtype") != nullptr ? "dtype" : "torch_dtype");
  refuse_unsupported_values(config, result);
  refuse_unknown_keys(config);
  return result;
}

DecoderConfig read_config(const std::filesystem::path& model_folder) {
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
