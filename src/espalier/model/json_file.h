// JSON files of model folders: small, written by others.
#pragma once

#include <filesystem>
#include <string>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"

namespace espalier {

/// Parses the whole file at `path` into Json (nlohmann::json, or nlohmann::ordered_json to keep the order of
/// keys). Throws InputError naming the file where it is not JSON or nests more than 64 levels deep.
template <typename Json>
Json read_json_file(const std::filesystem::path& path) {
  constexpr int kDeepest = 64;
  const std::string text = read_text(path);
  const auto check_depth = [&](int depth, typename Json::parse_event_t, Json&) {
    ESPALIER_CHECK(depth <= kDeepest, "{}: expected JSON of at most {} levels, received more", path.string(),
                   kDeepest);
    return true;
  };
  try {
    return Json::parse(text, check_depth);
  } catch (const typename Json::exception& error) {
    throw InputError(fmt::format("{}: expected JSON: {}", path.string(), error.what()));
  }
}

}  // namespace espalier
