// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/qualify.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/base/hash.h"
#include "espalier/base/json_file.h"
#include "espalier/qualify/child.h"

namespace espalier::qualify {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

// nullopt if the file is missing, damaged, or has another key.
std::optional<std::vector<Verdict>> read_verdicts(const fs::path& path, const Json& key,
                                                  const std::vector<std::string>& families) {
  std::ifstream file(path);
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("key", Json()) != key) return std::nullopt;
  const Json kept = json.value("verdicts", Json());
  std::vector<Verdict> verdicts;
  for (const std::string& family : families) {
    const Json verdict = kept.is_object() ? kept.value(family, Json()) : Json();
    if (!verdict.is_object()) return std::nullopt;
    const Json served = verdict.value("served", Json()), fault = verdict.value("fault", Json());
    if (!served.is_boolean() || !fault.is_string()) return std::nullopt;
    verdicts.push_back({.family = family, .served = served.get<bool>(), .fault = fault.get<std::string>()});
  }
  return verdicts;
}

void keep_verdicts(const std::vector<Verdict>& verdicts, const Json& key, const fs::path& path) {
  Json kept = Json::object();
  for (const Verdict& verdict : verdicts) {
    kept[verdict.family] = {{"served", verdict.served}, {"fault", verdict.fault}};
  }
  fs::create_directories(path.parent_path());
  write_text(path, Json{{"key", key}, {"verdicts", std::move(kept)}}.dump(2, ' ', false,
                                                                          Json::error_handler_t::replace) +
                       "\n");
}

// A temporary file, removed on destruction.
class FindingFile {
 public:
  FindingFile() {
    std::string name = (fs::temp_directory_path() / "espalier-finding-XXXXXX").string();
    const int descriptor = ::mkstemp(name.data());
    ESPALIER_CHECK(descriptor >= 0, "cannot create {}: {}", name, system_message(errno));
    ::close(descriptor);
    path_ = name;
  }
  ~FindingFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  FindingFile(const FindingFile&) = delete;
  FindingFile& operator=(const FindingFile&) = delete;

  const fs::path& path() const { return path_; }

  std::optional<Finding> read() const {
    std::ifstream file(path_);
    const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return std::nullopt;
    const Json checks = json.value("checks", Json()), fault = json.value("fault", Json());
    if (!checks.is_number_integer() || !fault.is_string()) return std::nullopt;
    return Finding{checks.get<int64_t>(), fault.get<std::string>()};
  }

 private:
  fs::path path_;
};

/// Waits until no other process checks for the same file: those of one machine start at once. Without a lock
/// where the file system has none, and after a signal.
class Turn {
 public:
  explicit Turn(const fs::path& file) {
    std::error_code ignored;
    fs::create_directories(file.parent_path(), ignored);
    descriptor_ = ::open((file.string() + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) [[maybe_unused]]
      const int unlocked = ::flock(descriptor_, LOCK_EX);
  }
  ~Turn() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  int descriptor_;
};

Verdict judge(const std::string& family, const Qualification& qualification) {
  const FindingFile file;
  const ChildEnd end = run_child(qualification.command(family, file.path()), qualification.limit);
  if (!end.good()) {
    const bool gave_up = end.how == ChildEnd::How::kExited || end.how == ChildEnd::How::kNotStarted;
    return {.family = family,
            .served = true,
            .fault = "its check " + describe(end, qualification.limit),
            .lasting = !gave_up};
  }
  const std::optional<Finding> finding = file.read();
  if (!finding) return {.family = family, .served = true, .fault = "its check ended without a finding"};
  return {
      .family = family, .served = finding->checks > 0 || !finding->fault.empty(), .fault = finding->fault};
}

}  // namespace

void write_finding(const Finding& finding, const fs::path& file) {
  write_text(file, Json{{"checks", finding.checks}, {"fault", finding.fault}}.dump(
                       -1, ' ', false, Json::error_handler_t::replace));
}

fs::path verdict_file(const Json& key, const fs::path& folder) {
  Hasher hasher;
  const std::string text = key.dump();
  hasher.add(std::as_bytes(std::span(text)));
  return folder / fmt::format("kernels-{}.json", hasher.digits().substr(0, 16));
}

std::vector<Verdict> verdicts_on(const std::vector<std::string>& families,
                                 const Qualification& qualification) {
  const fs::path path = verdict_file(qualification.key, qualification.folder);
  std::optional<Turn> turn;
  if (!qualification.again) {
    if (auto kept = read_verdicts(path, qualification.key, families)) return *std::move(kept);
    turn.emplace(path);
    if (auto kept = read_verdicts(path, qualification.key, families)) return *std::move(kept);
  }
  qualification.note(
      fmt::format("checking the kernels on this device (once for this build; kept in {})", path.string()));
  std::vector<Verdict> verdicts;
  for (const std::string& family : families) {
    const auto done = static_cast<double>(verdicts.size()) / static_cast<double>(families.size());
    qualification.progress(done, family);
    verdicts.push_back(judge(family, qualification));
  }
  if (!std::ranges::all_of(verdicts, &Verdict::lasting)) return verdicts;
  try {
    keep_verdicts(verdicts, qualification.key, path);
  } catch (const std::exception& error) {
    qualification.note(fmt::format("the verdicts cannot be saved: {}", error.what()));
  }
  return verdicts;
}

}  // namespace espalier::qualify
