// SPDX-License-Identifier: Apache-2.0
// Content hashes: 128-bit XXH3, which runs at memory bandwidth. They detect damage and mix-ups, not forgery.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

namespace espalier {

/// Hashes bytes that are added in chunks. The result does not depend on how they are divided.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void add(std::span<const std::byte> bytes);

  /// Adds the bytes of the values as they are in memory.
  template <typename T>
    requires std::is_arithmetic_v<T>
  void add_values(std::span<const T> values) {
    add(std::as_bytes(values));
  }

  /// The hash of all bytes so far, as 32 hexadecimal digits.
  std::string digits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The hash of a file's content. Throws InputError if it cannot be read.
std::string hash_file(const std::filesystem::path& path);

}  // namespace espalier
