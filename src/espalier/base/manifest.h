// SPDX-License-Identifier: Apache-2.0
// Manifests list the files of a folder, so that damage and mix-ups are detected.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace espalier {

inline constexpr const char* kManifestFile = "manifest.json";

/// Writes FOLDER/manifest.json: `title`, and name, size and hash (base/hash.h) of every other regular file
/// directly in the folder. Replaces an older manifest. `known`: manifest_entries of files that need not be
/// read again.
void write_manifest(const std::filesystem::path& folder, const std::string& title,
                    const std::vector<std::string>& known = {});

/// What a manifest says of the files whose names end with `suffix`, as JSON.
std::string manifest_entries(const std::filesystem::path& folder, const std::string& suffix);

struct ManifestReport {
  bool present = false;             // whether there is a manifest
  std::vector<std::string> faults;  // one sentence each; empty: every listed file is intact
  std::vector<std::string> extra;   // names of files that the manifest does not list
};

/// Compares a folder with its manifest, whose title must be `title`. Reads every listed file. Throws
/// InputError only if the folder cannot be listed.
ManifestReport check_manifest(const std::filesystem::path& folder, const std::string& title);

/// Checks a checkpoint against its manifest, whose title must be `title`. Returns the fault, "" if there is
/// none. Oddities that are not faults are reported to `note`. Throws like check_manifest.
std::string manifest_fault(const std::filesystem::path& folder, const std::string& title,
                           const std::function<void(const std::string&)>& note);

}  // namespace espalier
