// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/stop_ids.h"

#include <algorithm>
#include <limits>

#include "espalier/base/json_file.h"
#include "espalier/base/printable.h"

namespace espalier {
namespace {

constexpr const char* kKey = "eos_token_id";

int32_t read_id(const nlohmann::json& value, const std::string& file) {
  const bool fits = value.is_number_integer() && value >= 0 && value <= std::numeric_limits<int32_t>::max();
  ESPALIER_CHECK(fits, "{}: {}: expected a token id or a list of them, received {}", file, kKey,
                 shortened(value.dump()));
  return value.get<int32_t>();
}

std::vector<int32_t> ids_of(const nlohmann::json& json, const std::string& file) {
  ESPALIER_CHECK(json.is_object(), "{}: expected an object, received {}", file, shortened(json.dump()));
  const auto found = json.find(kKey);
  std::vector<int32_t> ids;
  if (found == json.end() || found->is_null()) return ids;
  if (found->is_array()) {
    for (const nlohmann::json& value : *found) ids.push_back(read_id(value, file));
  } else {
    ids.push_back(read_id(*found, file));
  }
  std::ranges::sort(ids);
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

std::vector<int32_t> parse_stop_ids(const nlohmann::json& json, const std::string& file) {
  const std::vector<int32_t> ids = ids_of(json, file);
  const auto text = json.find("text_config");
  return ids.empty() && text != json.end() && text->is_object() ? ids_of(*text, file) : ids;
}

std::vector<int32_t> read_stop_ids(const std::filesystem::path& model_folder) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::filesystem::path path = model_folder / name;
    if (!std::filesystem::exists(path)) continue;
    const std::vector<int32_t> ids = parse_stop_ids(read_json_file<nlohmann::json>(path), path.string());
    if (!ids.empty()) return ids;
  }
  return {};
}

}  // namespace espalier
