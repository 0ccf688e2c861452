// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/vocabulary.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

Vocabulary read(const std::string& json) {
  ScratchFolder folder;
  write_text(folder / "tokenizer.json", json);
  return Vocabulary::read(folder / "tokenizer.json");
}

std::string text(const Vocabulary& vocabulary, const std::vector<int32_t>& ids) {
  return vocabulary.text(ids);
}

// U+0120 encodes the byte 0x20, U+010A 0x0A, U+00C3 0xC3 and U+00BC 0xBC.
constexpr const char* kByteLevel = R"({
  "added_tokens": [{"id": 5, "content": "<|im_start|>"}, {"id": 9, "content": "caf\u00e9 \u0120"}],
  "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]},
  "decoder": {"type": "ByteLevel"},
  "model": {"type": "BPE", "merges": [],
            "vocab": {"Z": 0, "\u00c3": 1, "\u00bc": 2, "\u0120rich": 3, "\u010a\u010a": 4}}
})";

TEST(Vocabulary, ByteLevel) {
  const Vocabulary vocabulary = read(kByteLevel);
  EXPECT_EQ(vocabulary.size(), 10);
  EXPECT_EQ(vocabulary.bytes(3), " rich");
  EXPECT_EQ(vocabulary.bytes(1), "\xC3");
  EXPECT_EQ(text(vocabulary, {5, 0, 1, 2, 3, 4}), "<|im_start|>Z\u00fc rich\n\n");
  EXPECT_EQ(vocabulary.bytes(9), "caf\u00e9 \u0120") << "added tokens are not spelled in bytes";
  EXPECT_EQ(vocabulary.bytes(6), "") << "an id between";
  EXPECT_EQ(vocabulary.bytes(10), "");
  EXPECT_EQ(vocabulary.bytes(-1), "");
  // Half a character, and halves in the wrong order.
  EXPECT_EQ(text(vocabulary, {0, 1}), "Z\uFFFD");
  EXPECT_EQ(text(vocabulary, {2, 1, 0}), "\uFFFD\uFFFDZ");
}

TEST(Vocabulary, ControlTheSamePiecesAreOtherTextWithoutTheByteLevelDecoder) {
  std::string plain = kByteLevel;
  for (size_t at; (at = plain.find("ByteLevel")) != std::string::npos;) plain.replace(at, 9, "Fuse");
  EXPECT_EQ(read(plain).bytes(3), "\u0120rich");
}

constexpr const char* kSentencePiece = R"({
  "added_tokens": [{"id": 0, "content": "<s>"}],
  "decoder": {"type": "Sequence",
              "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                           {"type": "ByteFallback"}, {"type": "Fuse"}]},
  "model": {"type": "BPE", "byte_fallback": true,
            "vocab": {"<s>": 0, "\u2581Hello": 1, "<0xC3>": 2, "<0xbc>": 3, "\u2581\u2581": 4, "<0xZZ>": 5,
                      "lo": 6}}
})";

TEST(Vocabulary, SentencePiece) {
  const Vocabulary vocabulary = read(kSentencePiece);
  EXPECT_EQ(text(vocabulary, {0, 1, 6, 4, 2, 3}), "<s> Hellolo  \u00fc");
  EXPECT_EQ(vocabulary.bytes(5), "<0xZZ>");
}

TEST(Vocabulary, UnigramAndWordPiece) {
  const Vocabulary unigram =
      read(R"({"pre_tokenizer": {"type": "Metaspace"}, "decoder": {"type": "Metaspace"},
      "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581a", -1.5], ["b", -2.0]]}})");
  EXPECT_EQ(text(unigram, {1, 2, 1}), " ab a");
  const Vocabulary words = read(R"({"decoder": {"type": "WordPiece"},
      "model": {"type": "WordPiece", "vocab": {"play": 0, "##ing": 1}}})");
  EXPECT_EQ(text(words, {0, 1, 0}), " playing play");
}

TEST(Vocabulary, BadFilesAreNamed) {
  for (const char* json : {"[]", "{", "{}", R"({"model": 3})", R"({"model": {"vocab": 3}})",
                           R"({"model": {"vocab": {"a": "b"}}})", R"({"model": {"vocab": {"a": -1}}})",
                           R"({"model": {"vocab": {"a": 99999999999}}})", R"({"model": {"vocab": [3]}})",
                           R"({"model": {"vocab": {}}, "added_tokens": [{"id": 1}]})",
                           R"({"model": {"vocab": {}}, "added_tokens": 1})"}) {
    const std::string message = message_of<InputError>([&] { read(json); });
    EXPECT_NE(message.find("tokenizer.json"), std::string::npos) << json << ": " << message;
  }
  EXPECT_NE(message_of<InputError>([] { Vocabulary::read("/no/such/tokenizer.json"); }), "");
}

TEST(Vocabulary, ValidUtf8) {
  EXPECT_EQ(valid_utf8("a\u00fc\u20ac\U0001F600"), "a\u00fc\u20ac\U0001F600");
  EXPECT_EQ(valid_utf8("\xC0\x80"), "\uFFFD\uFFFD") << "spelled too long";
  EXPECT_EQ(valid_utf8("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD") << "half a surrogate pair";
  EXPECT_EQ(valid_utf8("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD") << "beyond the last character";
  EXPECT_EQ(valid_utf8("\xE2\x82"), "\uFFFD\uFFFD");
}

}  // namespace
}  // namespace espalier::testing
