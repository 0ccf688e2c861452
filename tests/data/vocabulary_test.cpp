// SPDX-License-Identifier: Apache-2.0
#include "tests/data/vocabulary.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

TEST(Vocabulary, TokensMayBePartsOfCharacters) {
  const Vocabulary vocabulary = vocabulary_of({"Z", "\xC3", "\xBC", "", " rich"});
  const auto text = [&](const std::vector<int32_t>& ids) { return vocabulary.text(ids); };
  EXPECT_EQ(vocabulary.size(), 5);
  EXPECT_EQ(vocabulary.bytes(1), "\xC3");
  EXPECT_EQ(text({0, 1, 2, 4}), "Z\u00fc rich");
  EXPECT_EQ(text({0, 1}), "Z\uFFFD") << "half a character";
  EXPECT_EQ(text({2, 1, 0}), "\uFFFD\uFFFDZ") << "halves in the wrong order";
  for (const int32_t unknown : {3, 5, -1}) EXPECT_EQ(vocabulary.bytes(unknown), "") << unknown;
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
