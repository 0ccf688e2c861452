// SPDX-License-Identifier: Apache-2.0
// Families of kernels prove themselves on a device before they are used: each in a process of its own with a
// time limit. Verdicts are kept for the next time.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace espalier::qualify {

/// What a family of kernels was found to be.
struct Verdict {
  std::string family{};
  bool served = false;  // whether the device runs anything of it
  std::string fault{};  // what is wrong; empty: nothing
  /// Whether that says something about the kernels: not where their process did not start or gave up, as for
  /// want of memory.
  bool lasting = true;
};

/// What a check of one family found, as the process that ran it hands it on.
struct Finding {
  int64_t checks = 0;  // results that were compared; 0: the device runs nothing of the family
  std::string fault{};
};

/// Writes what a child found where its parent reads it.
void write_finding(const Finding& finding, const std::filesystem::path& file);

struct Qualification {
  /// What verdicts hold for: device, driver, LibTorch, build.
  nlohmann::ordered_json key{};
  /// The process that checks a family and writes its finding (write_finding) into the file.
  std::function<std::vector<std::string>(const std::string& family, const std::filesystem::path& finding)>
      command{};
  std::chrono::milliseconds limit{std::chrono::minutes(2)};
  std::filesystem::path folder{};  // of kept verdicts
  bool again = false;              // although verdicts are kept
  /// Told when families are about to be checked, and when the verdicts cannot be kept.
  std::function<void(const std::string&)> note = [](const std::string&) {};
  /// The share that is done, and the family that comes next.
  std::function<void(double, const std::string&)> progress = [](double, const std::string&) {};
};

/// The verdicts on `families`, in their order: those kept under the key, or new ones. A file that is damaged
/// or lacks a family is as none. A family whose process does not end well has that as its fault. Verdicts are
/// kept where all are lasting.
std::vector<Verdict> verdicts_on(const std::vector<std::string>& families,
                                 const Qualification& qualification);

/// Where verdicts under this key are kept.
std::filesystem::path verdict_file(const nlohmann::ordered_json& key, const std::filesystem::path& folder);

}  // namespace espalier::qualify
