// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/words.h"

#include <gtest/gtest.h>

#include "tests/base/message_of.h"

namespace espalier::testing {
namespace {

enum class Shade { kRed, kGreen, kBlue };
constexpr auto kShades = std::to_array<Word<Shade>>({{"red", Shade::kRed}, {"green", Shade::kGreen}});

TEST(Words, AreParsedAndNamed) {
  EXPECT_EQ(parse_word(kShades, "colour", "green"), Shade::kGreen);
  EXPECT_STREQ(word_of(kShades, Shade::kRed), "red");
  EXPECT_TRUE(has_word(kShades, "red"));
  EXPECT_FALSE(has_word(kShades, "pink"));
  EXPECT_EQ(all_words(kShades), (std::vector<std::string>{"red", "green"}));
  EXPECT_EQ(list_of(std::to_array<Word<int>>({{"a", 1}, {"b", 2}, {"c", 3}})), "a, b or c");
}

TEST(Words, OthersAreRefusedWithTheList) {
  EXPECT_EQ(message_of<InputError>([] { parse_word(kShades, "colour", "pink"); }),
            "colour: expected red or green, received `pink`");
  EXPECT_THROW(word_of(kShades, Shade::kBlue), InternalError);
}

}  // namespace
}  // namespace espalier::testing
