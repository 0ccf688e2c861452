// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/manifest.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <system_error>

#include <simdjson.h>

#include <nlohmann/json.hpp>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/hash.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr const char* kHashKey = "xxh3_128";

// Names of the regular files directly in a folder, sorted, without the manifest and without names that JSON
// cannot hold.
std::vector<std::string> file_names(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    const std::string name = entry->path().filename().string();
    const bool listed = name != kManifestFile && simdjson::validate_utf8(name.data(), name.size());
    if (listed && entry->is_regular_file(ignored)) names.push_back(name);
  }
  ESPALIER_CHECK(!error, "cannot list {}: {}", folder.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

struct Entry {
  uint64_t bytes = 0;
  std::string hash;
};

// The files that a manifest lists. Throws InputError if it is not a manifest of `title`.
std::map<std::string, Entry> read_manifest(const fs::path& path, const std::string& title) {
  const auto json = Json::parse(read_text(path), nullptr, /*allow_exceptions=*/false);
  ESPALIER_CHECK(json.is_object() && json.contains("version") && json.contains("files") &&
                     json["files"].is_object() && json.contains("title") && json["title"].is_string(),
                 "{} is damaged: expected a JSON object with version, title and files", kManifestFile);
  ESPALIER_CHECK(json["version"] == kVersion,
                 "{} has version {}: expected {} (was it written by a newer Espalier?)", kManifestFile,
                 json["version"].dump(), kVersion);
  ESPALIER_CHECK(json["title"] == title, "{} belongs to {}", kManifestFile, json["title"].dump());
  std::map<std::string, Entry> entries;
  for (const auto& [name, value] : json["files"].items()) {
    const bool fine = value.is_object() && value.contains("bytes") && value["bytes"].is_number_unsigned() &&
                      value.contains(kHashKey) && value[kHashKey].is_string();
    ESPALIER_CHECK(fine, "{} is damaged: {}: expected bytes and {}", kManifestFile, name, kHashKey);
    entries[name] = {value["bytes"].get<uint64_t>(), value[kHashKey].get<std::string>()};
  }
  return entries;
}

// Entries of the files whose names end with `suffix`: those of `known`, and else by reading them.
Json entries_of(const fs::path& folder, const std::string& suffix, const Json& known) {
  Json files = Json::object();
  for (const std::string& name : file_names(folder)) {
    if (!name.ends_with(suffix)) continue;
    files[name] = known.contains(name)
                      ? known[name]
                      : Json{{"bytes", fs::file_size(folder / name)}, {kHashKey, hash_file(folder / name)}};
  }
  return files;
}

// One sentence about the first fault of a file; "" if it is intact.
std::string fault_of(const fs::path& path, const std::string& name, const Entry& expected) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return fmt::format("{} is missing", name);
  const uint64_t bytes = fs::file_size(path, error);
  if (error) return fmt::format("{} cannot be read: {}", name, error.message());
  if (bytes != expected.bytes)
    return fmt::format("{} has {} bytes, but {} were written", name, bytes, expected.bytes);
  try {
    if (hash_file(path) != expected.hash)
      return fmt::format("{} was changed after it was written: its checksum differs", name);
  } catch (const InputError& unreadable) {
    return unreadable.what();
  }
  return "";
}

}  // namespace

std::string manifest_entries(const fs::path& folder, const std::string& suffix) {
  return entries_of(folder, suffix, Json::object()).dump();
}

void write_manifest(const fs::path& folder, const std::string& title, const std::vector<std::string>& known) {
  Json read = Json::object();
  for (const std::string& entries : known) read.update(Json::parse(entries));
  const Json files = entries_of(folder, "", read);
  const Json manifest = {{"version", kVersion}, {"title", title}, {"files", files}};
  write_text(folder / kManifestFile, manifest.dump(2) + "\n");
}

ManifestReport check_manifest(const fs::path& folder, const std::string& title) {
  ManifestReport report;
  std::error_code error;
  report.present = fs::exists(fs::symlink_status(folder / kManifestFile, error));
  if (!report.present) return report;
  std::map<std::string, Entry> entries;
  try {
    entries = read_manifest(folder / kManifestFile, title);
  } catch (const InputError& fault) {
    report.faults.emplace_back(fault.what());
    return report;
  }
  for (const auto& [name, expected] : entries) {
    std::string fault = fault_of(folder / name, name, expected);
    if (!fault.empty()) report.faults.push_back(std::move(fault));
  }
  for (const std::string& name : file_names(folder)) {
    if (!entries.contains(name)) report.extra.push_back(name);
  }
  return report;
}

std::string manifest_fault(const fs::path& folder, const std::string& title,
                           const std::function<void(const std::string&)>& note) {
  const ManifestReport report = check_manifest(folder, title);
  if (!report.present) {
    note(fmt::format("{} has no {} (an older Espalier wrote it): used without checking its files",
                     folder.string(), kManifestFile));
    return "";
  }
  if (!report.faults.empty()) return report.faults.front();
  for (const std::string& extra : report.extra) {
    // Such files would be read as part of the model.
    if (extra.ends_with(".safetensors") || extra.ends_with(".json"))
      return fmt::format("{} does not belong to it", extra);
    note(fmt::format("{} holds {}, which is not part of the checkpoint", folder.string(), extra));
  }
  return "";
}

}  // namespace espalier
