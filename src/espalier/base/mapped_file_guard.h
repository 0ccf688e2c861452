// SPDX-License-Identifier: Apache-2.0
// Guards against truncation of mapped files. Reading beyond the new end raises SIGBUS, which kills the
// process. The guard turns this into an error that is thrown later, where throwing is safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace espalier {

/// Registers a mapped range with the guard while the object lives.
class GuardedRange {
 public:
  /// The range is `size` bytes from `begin`, mapped from the file `name`. `descriptor` must stay open while
  /// the object lives.
  GuardedRange(const void* begin, size_t size, const std::string& name, int descriptor);
  ~GuardedRange();
  GuardedRange(const GuardedRange&) = delete;
  GuardedRange& operator=(const GuardedRange&) = delete;

  /// Like check_mapped_files, for this file alone.
  void check() const;

  struct Slot;

 private:
  Slot* slot_;
  std::unique_ptr<std::string> name_;
};

/// Installs the SIGBUS handler of the process. From then on reads beyond the end of a guarded file return
/// zeros, and check_mapped_files throws. Other bus errors stay fatal. Only the program calls this, so users
/// of Espalier as a library keep their own handlers.
void guard_mapped_files();

/// Throws InputError "FILE: was truncated while it was being read, or its disk failed" for a guarded file
/// that is mapped now and has become shorter, or that was read beyond its end since the last call that threw.
/// Code that reads mapped values calls it, or MappedFile::check_whole for one file, before it uses results:
/// after reading a file, before an optimiser step, before reporting a result. Costs one system call per file.
void check_mapped_files();

}  // namespace espalier
