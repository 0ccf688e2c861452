// SPDX-License-Identifier: Apache-2.0
// Decodes token ids for reports. Encoding is done in Python, by the tokenizer itself.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace espalier {

/// The text of each token id, from a `tokenizer.json` of Hugging Face tokenizers: byte-level models (GPT-2
/// and later), SentencePiece models (pieces with U+2581 for a space, bytes as "<0xNN>"), and WordPiece ("##"
/// continues a word). Special tokens are shown literally. The space that a SentencePiece decoder strips from
/// the start of a text is kept, because a token sequence rarely starts a text.
class Vocabulary {
 public:
  /// Throws InputError naming the file if it is not such a JSON file.
  static Vocabulary read(const std::filesystem::path& tokenizer_json);

  /// The bytes of one token, which may be part of a character; empty for an unknown id.
  std::string_view bytes(int32_t id) const;

  /// The text of a token sequence: valid UTF-8, with U+FFFD for each invalid byte.
  std::string text(std::span<const int32_t> ids) const;

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }

 private:
  std::vector<std::string> tokens_;  // by id; empty where the id is not used
};

/// `bytes` with U+FFFD for each byte that is not part of valid UTF-8.
std::string valid_utf8(std::string_view bytes);

}  // namespace espalier
