// SPDX-License-Identifier: Apache-2.0
// Temporary files: their names, their removal by a signal handler, and the removal of those that killed
// processes left.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace espalier {

/// "HOST-PID_NAMESPACE-PID" of this process, for the names of temporaries. It tells whether the process that
/// made a temporary is still alive.
std::string process_tag();

/// Whether `tag` names a process of this host and of this container (its namespace of process ids) that has
/// ended. False for every other text.
bool names_ended_process(std::string_view tag);

/// While the object lives, remove_registered_temporaries() removes the file at `path`. At most 64 files are
/// registered at a time; others are left to sweep_temporaries.
class RegisteredTemporary {
 public:
  RegisteredTemporary() = default;  // of no file
  explicit RegisteredTemporary(const std::filesystem::path& path);
  ~RegisteredTemporary() { forget(); }
  RegisteredTemporary(const RegisteredTemporary&) = delete;
  RegisteredTemporary& operator=(const RegisteredTemporary&) = delete;

  void forget();

 private:
  int slot_ = -1;
};

/// Unlinks all registered files. Async-signal-safe: a signal handler calls it before the process ends.
void remove_registered_temporaries() noexcept;

/// Removes temporaries of AtomicFile (base/file.h) in `folder` whose process has ended. Ignores files that
/// cannot be removed.
void sweep_temporaries(const std::filesystem::path& folder) noexcept;

/// The name of temporary number `number` of this process: ".espalier-TAG-NUMBER.tmp".
std::string temporary_name(uint64_t number);

}  // namespace espalier
