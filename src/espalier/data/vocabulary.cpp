// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/vocabulary.h"

#include <unordered_map>

#include "espalier/base/json_file.h"
#include "espalier/base/printable.h"

namespace espalier {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";    // U+FFFD
constexpr std::string_view kSentenceSpace = "\xE2\x96\x81";  // U+2581
constexpr int64_t kLargestId = int64_t{1} << 24;

enum class Spelling { kPlain, kByteLevel, kSentencePiece, kWordPiece };

/// Whether a component of the tokenizer, or one component of a sequence, has this type.
bool has_type(const Json& part, std::string_view type) {
  if (!part.is_object()) return false;
  if (part.contains("type") && part["type"] == type) return true;
  for (const char* name : {"decoders", "pretokenizers", "normalizers"}) {
    if (!part.contains(name) || !part[name].is_array()) continue;
    for (const Json& inner : part[name]) {
      if (has_type(inner, type)) return true;
    }
  }
  return false;
}

Spelling spelling_of(const Json& tokenizer) {
  const Json decoder = tokenizer.value("decoder", Json());
  const Json pre_tokenizer = tokenizer.value("pre_tokenizer", Json());
  if (has_type(decoder, "ByteLevel") || has_type(pre_tokenizer, "ByteLevel")) return Spelling::kByteLevel;
  if (has_type(decoder, "WordPiece") || tokenizer["model"].value("type", "") == "WordPiece")
    return Spelling::kWordPiece;
  if (has_type(decoder, "Metaspace") || has_type(decoder, "Replace") || has_type(decoder, "ByteFallback") ||
      has_type(pre_tokenizer, "Metaspace")) {
    return Spelling::kSentencePiece;
  }
  return Spelling::kPlain;
}

std::string decode_byte_level(std::string_view piece) {
  static const std::unordered_map<std::string, char> byte_of = [] {
    std::unordered_map<std::string, char> bytes;
    for (const std::string& character : byte_characters()) {
      bytes.emplace(character, static_cast<char>(bytes.size()));
    }
    return bytes;
  }();
  std::string bytes;
  for (size_t i = 0; i < piece.size();) {
    const size_t size = std::max<size_t>(1, character_size(piece, i));
    const std::string character(piece.substr(i, size));
    const auto found = byte_of.find(character);
    if (found == byte_of.end()) return std::string(piece);  // not spelled in bytes: a token added as text
    bytes += found->second;
    i += size;
  }
  return bytes;
}

int hex_digit(char c) {
  return c >= '0' && c <= '9'   ? c - '0'
         : c >= 'A' && c <= 'F' ? c - 'A' + 10
         : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                : -1;
}

std::string decode_sentence_piece(std::string_view piece) {
  if (piece.size() == 6 && piece.starts_with("<0x") && piece[5] == '>' && hex_digit(piece[3]) >= 0 &&
      hex_digit(piece[4]) >= 0) {
    return {static_cast<char>(hex_digit(piece[3]) * 16 + hex_digit(piece[4]))};
  }
  std::string bytes;
  for (size_t i = 0; i < piece.size();) {
    const bool space = piece.substr(i).starts_with(kSentenceSpace);
    bytes += space ? ' ' : piece[i];
    i += space ? kSentenceSpace.size() : 1;
  }
  return bytes;
}

std::string decode(Spelling spelling, std::string_view piece) {
  switch (spelling) {
    case Spelling::kByteLevel:
      return decode_byte_level(piece);
    case Spelling::kSentencePiece:
      return decode_sentence_piece(piece);
    case Spelling::kWordPiece:
      return piece.starts_with("##") ? std::string(piece.substr(2)) : fmt::format(" {}", piece);
    case Spelling::kPlain:
      break;
  }
  return std::string(piece);
}

void put(std::vector<std::string>* tokens, int64_t id, std::string bytes) {
  ESPALIER_CHECK(id >= 0 && id < kLargestId, "expected token ids from 0 to {}, received {}", kLargestId - 1,
                 id);
  if (static_cast<int64_t>(tokens->size()) <= id) tokens->resize(id + 1);
  (*tokens)[id] = std::move(bytes);
}

std::vector<std::string> read_tokens(const Json& tokenizer) {
  const Spelling spelling = spelling_of(tokenizer);
  const Json& vocabulary = tokenizer["model"].at("vocab");
  ESPALIER_CHECK(vocabulary.is_structured(), "expected model.vocab to be an object or a list, received {}",
                 vocabulary.type_name());
  std::vector<std::string> tokens;
  if (vocabulary.is_array()) {  // Unigram: [piece, score] in the order of the ids
    for (const Json& entry : vocabulary) {
      tokens.push_back(decode(spelling, entry.at(0).get_ref<const std::string&>()));
    }
  } else {
    for (const auto& [piece, id] : vocabulary.items())
      put(&tokens, id.get<int64_t>(), decode(spelling, piece));
  }
  for (const Json& added : tokenizer.value("added_tokens", Json::array())) {
    put(&tokens, added.at("id").get<int64_t>(), added.at("content").get<std::string>());
  }
  return tokens;
}

}  // namespace

Vocabulary Vocabulary::read(const std::filesystem::path& tokenizer_json) {
  const Json tokenizer = read_json_file<Json>(tokenizer_json);
  ESPALIER_CHECK(tokenizer.is_object() && tokenizer.contains("model") && tokenizer["model"].is_object() &&
                     tokenizer["model"].contains("vocab"),
                 "{}: expected an object with model.vocab", tokenizer_json.string());
  Vocabulary vocabulary;
  try {
    vocabulary.tokens_ = read_tokens(tokenizer);
  } catch (const Json::exception& error) {
    throw InputError(fmt::format("{}: expected a tokenizer: {}", tokenizer_json.string(), error.what()));
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", tokenizer_json.string(), error.what()));
  }
  return vocabulary;
}

std::string_view Vocabulary::bytes(int32_t id) const {
  return id >= 0 && id < size() ? std::string_view(tokens_[id]) : std::string_view();
}

std::string Vocabulary::text(std::span<const int32_t> ids) const {
  std::string all;
  for (const int32_t id : ids) all += bytes(id);
  return valid_utf8(all);
}

std::string valid_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (size_t i = 0; i < bytes.size();) {
    const size_t size = character_size(bytes, i);
    text += size == 0 ? kReplacement : bytes.substr(i, size);
    i += std::max<size_t>(1, size);
  }
  return text;
}

}  // namespace espalier
