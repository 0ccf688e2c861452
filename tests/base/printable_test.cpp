// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/printable.h"

#include <gtest/gtest.h>
#include <simdjson.h>

#include "espalier/base/rng.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using namespace std::string_literals;

TEST(Printable, LeavesTextAlone) {
  for (const std::string text : {"", "rows.jsonl:17: field `x`", "grün, 日本語, עברית", "👩‍👩‍👧",
                                 "a\\nb", "नमस्‍ते"}) {
    EXPECT_EQ(printable(text), text);
    EXPECT_EQ(printable_lines(text), text);
  }
}

TEST(Printable, WritesOutWhatActsOnATerminal) {
  EXPECT_EQ(printable("\x1B[2J\x1B]0;owned\x07"), "\\x1B[2J\\x1B]0;owned\\x07");
  EXPECT_EQ(printable("a\nb\rc\td\x7F\0"s), "a\\nb\\rc\\td\\x7F\\x00");
  EXPECT_EQ(printable("\xC2\x9B"
                      "31m"),
            "\\u009B31m");  // C1: CSI in one character
  EXPECT_EQ(printable("\xE2\x80\xAE"
                      "fdp.exe\xE2\x81\xA6"),
            "\\u202Efdp.exe\\u2066");  // bidirectional
  EXPECT_EQ(printable("\xE2\x80\xA8\xE2\x80\x8B\xEF\xBB\xBF"), "\\u2028\\u200B\\uFEFF");
  EXPECT_EQ(printable("\xF3\xA0\x81\x81"), "\\U000E0041");
  EXPECT_EQ(printable("\xC2\xAD\xE3\x85\xA4"), "\\u00AD\\u3164");  // soft hyphen, filler
}

TEST(Printable, WritesOutBytesThatAreNotUtf8) {
  EXPECT_EQ(printable("\xFF\xFE"), "\\xFF\\xFE");
  EXPECT_EQ(printable("\x9B"
                      "31m"),
            "\\x9B31m");                                    // CSI where a terminal is set to Latin-1
  EXPECT_EQ(printable("\xED\xA0\x80"), "\\xED\\xA0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xC0\x9B\xC3"), "\\xC0\\x9B\\xC3");  // spelled too long, and cut short
}

TEST(Printable, KeepsLineFeedsOfLines) {
  EXPECT_EQ(printable_lines("a\n\x1B[1mb\r\n"), "a\n\\x1B[1mb\\r\n");
}

TEST(Printable, RandomBytesBecomeTextWithoutControlCharacters) {
  Rng rng(testing::test_seed(11));
  for (int trial = 0; trial < 2000; ++trial) {
    std::string bytes;
    for (int64_t i = rng.below(40); i > 0; --i) bytes += static_cast<char>(rng.below(256));
    const std::string text = printable(bytes);
    EXPECT_TRUE(simdjson::validate_utf8(text));
    for (const char c : text) EXPECT_GE(static_cast<unsigned char>(c), 0x20);
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, ShortensAtACharacter) {
  EXPECT_EQ(shortened(std::string(60, 'a')), std::string(60, 'a'));
  EXPECT_EQ(shortened(std::string(61, 'a')), std::string(60, 'a') + "...");
  EXPECT_EQ(shortened(std::string(59, 'a') + "éé"), std::string(59, 'a') + "...");
  EXPECT_EQ(shortened(std::string(58, 'a') + "éé"), std::string(58, 'a') + "é...");
  EXPECT_EQ(shortened("\x1B[1mabc", 4), "\\x1B[1m...");
  EXPECT_EQ(shortened(std::string(10, '\xFF'), 2), "\\xFF\\xFF...");
}

}  // namespace
}  // namespace espalier
