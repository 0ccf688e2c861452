// SPDX-License-Identifier: Apache-2.0
// Qualification of kernels: each family is checked on a device before use, in a child process with a time
// limit. Verdicts are cached in a folder.
#pragma once

#include <nlohmann/json.hpp>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace espalier::qualify {

/// The result of the check of a kernel family.
struct Verdict {
  std::string family{};
  bool served = false;  // whether the device supports any of it
  std::string fault{};  // empty: none
  /// Whether the verdict is about the kernels; false if the process could not start or gave up, for instance
  /// out of memory.
  bool lasting = true;
};

/// The result that a child process reports for one family.
struct Finding {
  int64_t checks = 0;  // number of compared results; 0: the device does not support the family
  std::string fault{};
};

/// Writes the finding of a child to a file for its parent.
void write_finding(const Finding& finding, const std::filesystem::path& file);

struct Qualification {
  /// Identifies what verdicts are valid for: device, driver, LibTorch, build.
  nlohmann::ordered_json key{};
  /// The command that checks a family and writes its finding (write_finding) to the file.
  std::function<std::vector<std::string>(const std::string& family, const std::filesystem::path& finding)>
      command{};
  std::chrono::milliseconds limit{std::chrono::minutes(10)};  // libraries compile meanwhile
  std::filesystem::path folder{};                             // of cached verdicts
  bool again = false;                                         // check even if verdicts are cached
  /// Called before families are checked, and if verdicts cannot be saved.
  std::function<void(const std::string&)> note = [](const std::string&) {};
  /// Called with the fraction done and the next family.
  std::function<void(double, const std::string&)> progress = [](double, const std::string&) {};
};

/// The verdicts on `families`, in order: cached under the key, or new ones. A file that is damaged or lacks a
/// family is ignored. If a child process fails, that is the fault of its family. Verdicts are cached if all
/// are lasting. A process that needs the same verdicts meanwhile waits for them.
std::vector<Verdict> verdicts_on(const std::vector<std::string>& families,
                                 const Qualification& qualification);

/// The cache file of verdicts for a key.
std::filesystem::path verdict_file(const nlohmann::ordered_json& key, const std::filesystem::path& folder);

}  // namespace espalier::qualify
