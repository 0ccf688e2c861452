// SPDX-License-Identifier: Apache-2.0
// The input of a fuzz target as a file, since parsers take paths.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace espalier::fuzz {

/// A file in memory that holds the input, while it lives.
class InputFile {
 public:
  InputFile(const void* data, size_t size) : descriptor_(memfd_create("input", MFD_CLOEXEC)) {
    if (descriptor_ < 0 || write(descriptor_, data, size) != static_cast<ssize_t>(size)) std::abort();
  }
  ~InputFile() { close(descriptor_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  int descriptor_;
};

/// Ends the run where `condition` does not hold; libFuzzer keeps the input then.
inline void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace espalier::fuzz
