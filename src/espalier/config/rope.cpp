// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/rope.h"

#include "espalier/base/check.h"
#include "espalier/config/families/family.h"

namespace espalier {
namespace {

void read_rope_object(const ConfigReader& config, const std::string& name, DecoderConfig* result) {
  const ConfigReader rope(*config.find(name), config.file(), name + ".");
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
  rope.refuse_other_keys(known, family_names("and", ""));

  const double theta = rope.positive_number("rope_theta", result->rope_theta);
  if (config.find("rope_theta") != nullptr && theta != result->rope_theta) {
    // Transformers 4 follows the outer value and Transformers 5 the inner one.
    rope.refuse("rope_theta", fmt::format("the rope_theta beside {}, {}", name, result->rope_theta));
  }
  result->rope_theta = theta;
}

/// Reads rotary_dim. `inner` is rope_parameters or rope_scaling, null where there is neither.
void read_rotary_dim(const ConfigReader& config, const ConfigReader* inner, double family_factor,
                     DecoderConfig* result) {
  const std::string key = "partial_rotary_factor";
  const ConfigReader& reader = inner != nullptr && inner->find(key) != nullptr ? *inner : config;
  if (reader.find(key) == nullptr && family_factor == 0) return;
  const double factor = reader.positive_number(key, family_factor);
  if (config.find(key) != nullptr && config.positive_number(key) != factor) {
    reader.refuse(key, fmt::format("the {} of the file, {}", key, config.positive_number(key)));
  }
  if (family_factor == 0) {
    if (factor != 1) reader.refuse(key, "1.0");
    return;
  }
  // Rounded as Transformers does.
  result->rotary_dim = static_cast<int64_t>(static_cast<double>(result->head_dim) * factor);
  if (factor > 1 || result->rotary_dim < 2 || result->rotary_dim % 2 != 0) {
    reader.refuse(key, fmt::format("an even part of head_dim, {}", result->head_dim));
  }
}

}  // namespace

void read_rope(const ConfigReader& config, double partial_rotary_factor, DecoderConfig* result) {
  result->rope_theta = config.positive_number("rope_theta", 10000);
  std::vector<std::string> present;
  for (const std::string name : {"rope_parameters", "rope_scaling"}) {
    const nlohmann::json* value = config.find(name);
    if (value != nullptr && !(value->is_object() && value->empty())) present.push_back(name);
  }
  if (present.size() > 1) config.refuse("rope_scaling", "null where rope_parameters is given");
  if (present.empty()) return read_rotary_dim(config, nullptr, partial_rotary_factor, result);
  read_rope_object(config, present[0], result);
  const ConfigReader inner(*config.find(present[0]), config.file(), present[0] + ".");
  read_rotary_dim(config, &inner, partial_rotary_factor, result);
}

}  // namespace espalier
