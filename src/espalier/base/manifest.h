// SPDX-License-Identifier: Apache-2.0
// Manifests list what a folder held when it was written, so that damage and mix-ups are detected.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace espalier {

inline constexpr const char* kManifestFile = "manifest.json";

/// Writes FOLDER/manifest.json: `title`, and of every other regular file directly in the folder its name,
/// size and hash (base/hash.h). Replaces an older manifest.
void write_manifest(const std::filesystem::path& folder, const std::string& title);

struct ManifestReport {
  bool present = false;             // whether there is a manifest at all
  std::vector<std::string> faults;  // what is wrong, one sentence each; empty: the folder is whole
  std::vector<std::string> extra;   // names of files that the manifest does not list
};

/// Compares a folder with its manifest, whose title is to be `title`; reads every file that is listed. Throws
/// InputError only where the folder cannot be listed.
ManifestReport check_manifest(const std::filesystem::path& folder, const std::string& title);

}  // namespace espalier
