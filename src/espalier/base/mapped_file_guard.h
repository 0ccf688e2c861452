// SPDX-License-Identifier: Apache-2.0
// Files that become shorter while they are mapped. A process that reads beyond the new end gets the signal
// SIGBUS, which kills it. The guard turns this into an error that is thrown later, where it is safe to throw.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace espalier {

/// Registers a mapped range with the guard for the lifetime of the object.
class GuardedRange {
 public:
  /// The range is `size` bytes from `begin`, mapped from the file `name` by `descriptor`, which must stay
  /// open as long as the object lives.
  GuardedRange(const void* begin, size_t size, const std::string& name, int descriptor);
  ~GuardedRange();
  GuardedRange(const GuardedRange&) = delete;
  GuardedRange& operator=(const GuardedRange&) = delete;

  /// check_mapped_files for this file alone.
  void check() const;

  struct Slot;

 private:
  Slot* slot_;
  std::unique_ptr<std::string> name_;
};

/// Installs the signal handler, once for the process. From then on a read beyond the end of a guarded file
/// gives zeros and does not kill the process, and check_mapped_files throws. Any other bus error is fatal as
/// before. Only the program calls this, so users of Espalier as a library keep their own handlers.
void guard_mapped_files();

/// Throws InputError "FILE: was truncated while it was being read, or its disk failed" if that has happened
/// to a guarded file. This covers files that are mapped now (even if the missing part was not read) and files
/// that were read beyond their end since the last call that threw. Code that reads mapped values calls it, or
/// MappedFile::check_whole for one file, before it uses results: after reading a file, before an optimiser
/// step, before reporting a result. Costs one system call per file.
void check_mapped_files();

}  // namespace espalier
