// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/volatile_text.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

TEST(VolatileText, DatesAndNumbers) {
  for (const char* text : {"7", "2024-05-31", "15:00:05", "2024-05-31T15:00:05Z", "Monday, 3rd May", "9 pm",
                           "1,024.5", "31/12/99", "Fri Sep 5 10:11:12 UTC 2025"}) {
    EXPECT_TRUE(is_date_or_number(text)) << text;
  }
  for (const char* text : {"", "never", "a", "z", "x7", "(3)", "room 7", "$5"}) {
    EXPECT_FALSE(is_date_or_number(text)) << text;
  }
}

TEST(VolatileText, Identifiers) {
  for (const char* word :
       {"123e4567-e89b-12d3-a456-426614174000", "req_8f21ac", "HAT136", "deadbeef42", "id=9f8e7d6c",
        "(req-00017a),", "https://host/trace/5f2c91", "call_0aBcDeFgHiJk", "session:a1b2c3", "#4f5e6d7c"}) {
    EXPECT_TRUE(is_identifier(word)) << word;
  }
  for (const char* word : {"", "facade", "decade", "2024", "gpt", "gpt-4o", "3rd", "A1", "hello-world", "x7",
                           "caf\xC3\xA9"
                           "42"}) {
    EXPECT_FALSE(is_identifier(word)) << word;
  }
}

TEST(VolatileText, DifferencesByWords) {
  const auto kind = [](std::string_view left, std::string_view right) {
    return volatile_difference(left, right).kind;
  };
  EXPECT_EQ(kind("15:00", "16:30"), Volatile::kNumber);
  EXPECT_EQ(kind("at 15:00 on Monday", "at 16:30 on Tuesday"), Volatile::kNumber) << "words that both have";
  EXPECT_EQ(kind("17 req_8f21ac", "18 req_77b0de"), Volatile::kIdentifier);
  // Controls: a word, nothing on one side, equal texts, too long to be a detail.
  EXPECT_EQ(kind("at 15:00", "on 16:30"), Volatile::kNone);
  EXPECT_EQ(kind("17", ""), Volatile::kNone);
  EXPECT_EQ(kind("17", "17"), Volatile::kNone);
  EXPECT_EQ(kind("17 " + std::string(600, ' '), "18"), Volatile::kNone);
  const VolatileDifference found = volatile_difference("at 15:00 on Monday", "at 16:30 on Tuesday");
  EXPECT_EQ(found.left, "15:00 Monday");
  EXPECT_EQ(found.right, "16:30 Tuesday");
}

TEST(VolatileText, PartsOfWords) {
  EXPECT_EQ(word_end("Request req_10"), "req_10");
  EXPECT_EQ(word_end("(\"id\": \"8f"), "8f");
  EXPECT_EQ(word_end("Request "), "");
  EXPECT_EQ(word_start("2ac, and"), "2ac");
  EXPECT_EQ(word_start("<|im_end|>"), "");
  EXPECT_EQ(word_start("abc def"), "") << "letters after a number begin a new word";
  EXPECT_EQ(word_start("abcdefghijklmnopq1"), "") << "too few digits for an id";
}

}  // namespace
}  // namespace espalier::testing
