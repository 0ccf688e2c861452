// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/config_reader.h"

#include <algorithm>

#include "espalier/base/check.h"

namespace espalier {
namespace {

using Json = nlohmann::json;

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

}  // namespace

ConfigReader::ConfigReader(const Json& json, std::string file, std::string prefix)
    : json_(json), file_(std::move(file)), prefix_(std::move(prefix)) {
  ESPALIER_CHECK(json.is_object(), "{}: {}expected a JSON object, received {}", file_,
                 prefix_.empty() ? "" : prefix_ + ": ", json.type_name());
}

const Json* ConfigReader::find(const std::string& key) const {
  const auto it = json_.find(key);
  return it == json_.end() || it->is_null() ? nullptr : &*it;
}

void ConfigReader::refuse(const std::string& key, const std::string& expected) const {
  const auto it = json_.find(key);
  throw InputError(fmt::format("{}: {}{}: expected {}, received {}", file_, prefix_, key, expected,
                               it == json_.end() ? "no such key" : brief(*it)));
}

int64_t ConfigReader::integer(const std::string& key, int64_t least, int64_t largest,
                              std::optional<int64_t> otherwise) const {
  const Json* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  if (value == nullptr || !value->is_number_integer() || *value < least || *value > largest) {
    refuse(key, fmt::format("an integer from {} to {}", least, largest));
  }
  return value->get<int64_t>();
}

double ConfigReader::positive_number(const std::string& key, std::optional<double> otherwise) const {
  const Json* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  if (value == nullptr || !value->is_number() || !(value->get<double>() > 0)) refuse(key, "a number above 0");
  return value->get<double>();
}

double ConfigReader::non_negative_number(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr || !value->is_number() || !(value->get<double>() >= 0)) {
    refuse(key, "a number from 0 on");
  }
  return value->get<double>();
}

bool ConfigReader::boolean(const std::string& key, bool otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::string ConfigReader::text(const std::string& key) const {
  const Json* value = find(key);
  if (value == nullptr) return "";
  if (!value->is_string()) refuse(key, "a string");
  return value->get<std::string>();
}

void ConfigReader::require_text(const std::string& key, const std::string& value) const {
  const std::string given = text(key);
  if (!given.empty() && given != value) refuse(key, fmt::format("\"{}\"", value));
}

void ConfigReader::refuse_other_keys(const std::vector<std::string_view>& known,
                                     const std::string& families) const {
  for (const auto& [key, value] : json_.items()) {
    // Keys with a leading underscore are internal to libraries; special tokens concern generation.
    if (value.is_null() || key.starts_with('_') || key.ends_with("_token_id") ||
        std::find(known.begin(), known.end(), key) != known.end())
      continue;
    throw InputError(fmt::format(
        "{}: {}{} = {}: unknown key, which may change the mathematics of the model; expected the keys of "
        "{} (remove the key if it has no effect)",
        file_, prefix_, key, brief(value), families));
  }
}

}  // namespace espalier
