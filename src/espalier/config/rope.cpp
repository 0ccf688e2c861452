// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/rope.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/config/families/family.h"

namespace espalier {
namespace {

using Keys = std::vector<std::string_view>;

Llama3Rope read_llama3(const ConfigReader& rope, int64_t max_position_embeddings, Keys* known) {
  const Llama3Rope result{
      .factor = rope.positive_number("factor"),
      .low_freq_factor = rope.positive_number("low_freq_factor"),
      .high_freq_factor = rope.positive_number("high_freq_factor"),
      .original_max_position_embeddings =
          rope.positive_integer("original_max_position_embeddings", kMostPositions, max_position_embeddings),
  };
  if (!(result.high_freq_factor > result.low_freq_factor)) {
    rope.refuse("high_freq_factor", "more than low_freq_factor");
  }
  known->insert(known->end(),
                {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"});
  return result;
}

}  // namespace

double yarn_scale(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

namespace {

YarnRope read_yarn(const ConfigReader& rope, int64_t max_position_embeddings, Keys* known) {
  YarnRope result{
      .factor = rope.positive_number("factor"),
      .original_max_position_embeddings =
          rope.positive_integer("original_max_position_embeddings", kMostPositions, max_position_embeddings),
      .beta_fast = rope.positive_number("beta_fast", 32),
      .beta_slow = rope.positive_number("beta_slow", 1),
      .truncate = rope.boolean("truncate", true),
  };
  if (result.beta_fast < result.beta_slow) rope.refuse("beta_fast", "at least beta_slow");
  double attention_factor = yarn_scale(result.factor, 1);
  const bool has_mscale = rope.find("mscale") != nullptr, has_all = rope.find("mscale_all_dim") != nullptr;
  const double mscale = has_mscale ? rope.non_negative_number("mscale") : 0;
  result.mscale_all_dim = has_all ? rope.non_negative_number("mscale_all_dim") : 0;
  if (mscale > 0 && result.mscale_all_dim > 0) {
    attention_factor = yarn_scale(result.factor, mscale) / yarn_scale(result.factor, result.mscale_all_dim);
  }
  result.attention_factor = rope.positive_number("attention_factor", attention_factor);
  known->insert(known->end(), {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
                               "truncate", "mscale", "mscale_all_dim", "attention_factor"});
  return result;
}

/// Reads an object that describes a rope. `rope_theta` is the default; `more_keys` are ignored.
Rope read_rope_object(const ConfigReader& rope, double rope_theta, int64_t max_position_embeddings,
                      const Keys& more_keys = {}) {
  const std::string type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  const std::string type = rope.find(type_key) != nullptr ? rope.text(type_key) : "default";
  Rope result{.rope_theta = rope.positive_number("rope_theta", rope_theta)};
  Keys known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"};
  if (type == "linear") {
    result.scaling = LinearRope{.factor = rope.positive_number("factor")};
    known.emplace_back("factor");
  } else if (type == "llama3") {
    result.scaling = read_llama3(rope, max_position_embeddings, &known);
  } else if (type == "yarn") {
    result.scaling = read_yarn(rope, max_position_embeddings, &known);
  } else if (type != "default") {
    rope.refuse(type_key, "\"default\", \"linear\", \"llama3\" or \"yarn\"");
  }
  known.insert(known.end(), more_keys.begin(), more_keys.end());
  rope.refuse_other_keys(known, family_names("and", ""));
  return result;
}

/// "rope_parameters" or "rope_scaling", whichever is present; "" if neither is.
std::string rope_object_name(const ConfigReader& config) {
  std::vector<std::string> present;
  for (const std::string name : {"rope_parameters", "rope_scaling"}) {
    const nlohmann::json* value = config.find(name);
    if (value != nullptr && !(value->is_object() && value->empty())) present.push_back(name);
  }
  if (present.size() > 1) config.refuse("rope_scaling", "null where rope_parameters is given");
  return present.empty() ? "" : present[0];
}

}  // namespace

void read_rope(const ConfigReader& config, DecoderConfig* result) {
  read_rope_or(config, nlohmann::json::object(), result);
}

void read_rope_or(const ConfigReader& config, const nlohmann::json& rope_parameters, DecoderConfig* result) {
  const ModelFamily& family = *find_family(result->model_type);
  const double theta = config.positive_number("rope_theta", family.rope_theta);
  result->rope = {.rope_theta = theta};
  const std::string name = rope_object_name(config);
  // Transformers reads an empty rope_parameters as a rope without scaling, whatever the default.
  if (name.empty() && (rope_parameters.empty() || config.find("rope_parameters") != nullptr)) return;
  const nlohmann::json& given = name.empty() ? rope_parameters : *config.find(name);
  const ConfigReader rope(given, config.file(), (name.empty() ? "rope_parameters" : name) + ".");
  // Text has the same position in all three sections, so they have no effect.
  const bool has_sections = *family.composite_type != '\0';
  const Keys sections = has_sections ? Keys{"mrope_section", "mrope_interleaved"} : Keys{};
  result->rope = read_rope_object(rope, theta, result->max_position_embeddings, sections);
  if (config.find("rope_theta") != nullptr && result->rope.rope_theta != theta) {
    // Transformers 4 uses the outer value, Transformers 5 the inner one.
    rope.refuse("rope_theta", fmt::format("the rope_theta outside of {}, {}", name, theta));
  }
}

void read_rope_by_layer_type(const ConfigReader& config, double rope_theta, double sliding_theta,
                             DecoderConfig* result) {
  const std::string name = rope_object_name(config);
  const auto read = [&](const ConfigReader& rope, Rope* otherwise) {
    // Transformers looks for it outside of the objects and never finds it.
    if (!rope.boolean("truncate", true)) rope.refuse("truncate", "true");
    if (rope.positive_number("partial_rotary_factor", 1) != 1) rope.refuse("partial_rotary_factor", "1.0");
    *otherwise = read_rope_object(rope, otherwise->rope_theta, result->max_position_embeddings);
  };
  result->rope = {.rope_theta = rope_theta};
  result->sliding_rope = {.rope_theta = sliding_theta};
  if (name == "rope_scaling") {
    read({*config.find(name), config.file(), name + "."}, &result->rope);
  } else if (!name.empty()) {
    const ConfigReader both(*config.find(name), config.file(), name + ".");
    both.refuse_other_keys({"full_attention", "sliding_attention"}, result->model_type);
    for (const auto& [key, rope] : {std::pair("full_attention", &result->rope),
                                    std::pair("sliding_attention", &*result->sliding_rope)}) {
      if (both.find(key) != nullptr) read({*both.find(key), config.file(), name + "." + key + "."}, rope);
    }
  }
}

void read_rotary_dim(const ConfigReader& config, double partial_rotary_factor, AttentionSpec* attention) {
  const std::string key = "partial_rotary_factor", name = rope_object_name(config);
  std::optional<ConfigReader> rope;
  if (!name.empty()) rope.emplace(*config.find(name), config.file(), name + ".");
  const ConfigReader& reader = rope && rope->find(key) != nullptr ? *rope : config;
  if (reader.find(key) == nullptr && partial_rotary_factor == 0) return;
  const double factor = reader.positive_number(key, partial_rotary_factor);
  if (config.find(key) != nullptr && config.positive_number(key) != factor) {
    reader.refuse(key, fmt::format("the {} of the file, {}", key, config.positive_number(key)));
  }
  if (partial_rotary_factor == 0) {
    if (factor != 1) reader.refuse(key, "1.0");
    return;
  }
  // Rounded like in Transformers.
  const auto rotary_dim = static_cast<int64_t>(static_cast<double>(attention->head_dim) * factor);
  if (factor > 1 || rotary_dim < 2 || rotary_dim % 2 != 0) {
    reader.refuse(key, fmt::format("an even part of head_dim, {}", attention->head_dim));
  }
  attention->rotary_dim = rotary_dim == attention->head_dim ? 0 : rotary_dim;
}

}  // namespace espalier
