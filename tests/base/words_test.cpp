// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/words.h"

#include <gtest/gtest.h>

#include "tests/base/message_of.h"

namespace espalier::testing {
namespace {

enum class Colour { kRed, kGreen, kBlue };
constexpr auto kColours = std::to_array<Word<Colour>>({{"red", Colour::kRed}, {"green", Colour::kGreen}});

TEST(Words, AreParsedAndNamed) {
  EXPECT_EQ(parse_word(kColours, "colour", "green"), Colour::kGreen);
  EXPECT_STREQ(word_of(kColours, Colour::kRed), "red");
  EXPECT_TRUE(has_word(kColours, "red"));
  EXPECT_FALSE(has_word(kColours, "pink"));
  EXPECT_EQ(all_words(kColours), (std::vector<std::string>{"red", "green"}));
  EXPECT_EQ(list_of(std::to_array<Word<int>>({{"a", 1}, {"b", 2}, {"c", 3}})), "a, b or c");
}

TEST(Words, OthersAreRefusedWithTheList) {
  EXPECT_EQ(message_of<InputError>([] { parse_word(kColours, "colour", "pink"); }),
            "colour: expected red or green, received `pink`");
  EXPECT_THROW(word_of(kColours, Colour::kBlue), InternalError);
}

}  // namespace
}  // namespace espalier::testing
