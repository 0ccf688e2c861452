// SPDX-License-Identifier: Apache-2.0
// Temporary files: names, removal by a signal handler, and removal of those that killed processes left.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace espalier {

/// "HOST-PID_NAMESPACE-PID" of this process. Names of temporary files contain it, so that names_ended_process
/// can tell whether their process is still alive.
std::string process_tag();

/// Whether `tag` names a process of this host and PID namespace that has ended. False for any other text.
bool names_ended_process(std::string_view tag);

/// While the object lives, remove_registered_temporaries() removes the file at `path`. At most 64 files are
/// registered at a time; sweep_temporaries removes others.
class RegisteredTemporary {
 public:
  RegisteredTemporary() = default;  // registers nothing
  explicit RegisteredTemporary(const std::filesystem::path& path);
  ~RegisteredTemporary() { forget(); }
  RegisteredTemporary(const RegisteredTemporary&) = delete;
  RegisteredTemporary& operator=(const RegisteredTemporary&) = delete;

  void forget();

 private:
  int slot_ = -1;
};

/// Unlinks all registered files. Async-signal-safe.
void remove_registered_temporaries() noexcept;

/// Removes temporary files of AtomicFile (base/file.h) in `folder` whose process has ended. Failures are
/// ignored.
void sweep_temporaries(const std::filesystem::path& folder) noexcept;

/// The name of temporary number `number` of this process: ".espalier-TAG-NUMBER.tmp".
std::string temporary_name(uint64_t number);

}  // namespace espalier
