// SPDX-License-Identifier: Apache-2.0
// Small JSON files of model folders, written by other programs.
#pragma once

#include <filesystem>
#include <string>
#include <system_error>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"

namespace espalier {

namespace detail {

/// Replaces Infinity, -Infinity and NaN outside of strings, which Python writes and JSON lacks, by objects as
/// Transformers 5 writes them: {"__float__": "Infinity"}.
std::string with_tagged_floats(std::string text);

}  // namespace detail

/// Parses the file at `path` into Json (nlohmann::json, or nlohmann::ordered_json to keep the order of keys).
/// Numbers that are not finite are tagged (detail::with_tagged_floats). Throws InputError naming the file if
/// it is not JSON, nests more than 64 levels deep, or is not a regular file.
template <typename Json>
Json read_json_file(const std::filesystem::path& path) {
  constexpr int kDeepest = 64;
  std::error_code unknown;
  const std::filesystem::file_status status = std::filesystem::status(path, unknown);
  // Opening a pipe would wait for a writer, and a device may have no end.
  ESPALIER_CHECK(!std::filesystem::exists(status) || std::filesystem::is_directory(status) ||
                     std::filesystem::is_regular_file(status),
                 "cannot read {}: expected a regular file, received a pipe or device", path.string());
  const std::string text = detail::with_tagged_floats(read_text(path));
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
