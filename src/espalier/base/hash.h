// SPDX-License-Identifier: Apache-2.0
// Hashes of contents: XXH3 of 128 bits, which is as fast as memory. They detect damage and mix-ups, but not
// forgery.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

namespace espalier {

/// The hash of bytes that are added in chunks. The result does not depend on the chunks.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void add(std::span<const std::byte> bytes);

  /// The bytes of plain values, as they are in memory.
  template <typename T>
    requires std::is_arithmetic_v<T>
  void add_values(std::span<const T> values) {
    add(std::as_bytes(values));
  }

  /// Of all bytes so far: 32 hexadecimal digits.
  std::string digits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The hash of a file's content. Throws InputError when it cannot be read.
std::string hash_file(const std::filesystem::path& path);

}  // namespace espalier
