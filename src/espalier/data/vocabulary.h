// SPDX-License-Identifier: Apache-2.0
// The texts of tokens, for reports. Tokenizers are read, and texts encoded, in Python.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

/// The bytes of each token id (espalier/vocabulary.py has them of a tokenizer.json).
class Vocabulary {
 public:
  /// Token id is bytes[offsets[id], offsets[id + 1]).
  Vocabulary(std::vector<int64_t> offsets, std::string bytes);

  /// The bytes of one token, which may be part of a character; empty for an unknown id.
  std::string_view bytes(int32_t id) const;

  /// The text of a token sequence: valid UTF-8, with U+FFFD for each invalid byte.
  std::string text(std::span<const int32_t> ids) const;

  int64_t size() const { return std::ssize(offsets_) - 1; }

 private:
  std::vector<int64_t> offsets_;
  std::string bytes_;
};

/// `bytes` with U+FFFD for each byte that is not part of valid UTF-8.
std::string valid_utf8(std::string_view bytes);

}  // namespace espalier
