// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/suggest.h"

#include <gtest/gtest.h>

namespace espalier::cli {
namespace {

TEST(Suggest, NearestWordNeedsToBeNear) {
  const std::vector<std::string> known{"train", "plan", "prepare"};
  EXPECT_EQ(nearest_word("trian", known), "train");
  EXPECT_EQ(nearest_word("prepair", known), "prepare");
  EXPECT_EQ(nearest_word("xyz", known), "");
  EXPECT_EQ(nearest_word("", known), "");
}

TEST(Suggest, UnknownCommandsAndFlags) {
  double rate = 0;
  std::string out;
  std::deque<Command> commands;
  OptionList& train = commands.emplace_back(Command{.name = "train", .summary = ""}).options;
  train.add("learning-rate", &rate, "");
  train.add("out", &out, "", {.letter = 'o'});
  commands.push_back({.name = "prepare", .summary = "", .pass_on = [](const auto&) {}});
  const auto fault = [&](const std::vector<std::string>& args) { return unknown_word(commands, args); };
  EXPECT_EQ(fault({"trian"}), "unknown command trian; expected one of train, prepare; did you mean train?");
  EXPECT_EQ(fault({"xyzzy"}), "unknown command xyzzy; expected one of train, prepare");
  EXPECT_EQ(fault({"train", "--lr", "1"}),
            "unknown flag --lr of `espalier train`; did you mean --learning-rate?");
  EXPECT_EQ(fault({"train", "--learning_rat=1"}),
            "unknown flag --learning_rat of `espalier train`; did you mean --learning-rate?");
  EXPECT_EQ(fault({"train", "--output-dir", "x"}),
            "unknown flag --output-dir of `espalier train`; did you mean --out?");
  EXPECT_EQ(fault({"train", "--qqqqqqqq"}), "unknown flag --qqqqqqqq of `espalier train`");
  for (const std::vector<std::string>& known : {std::vector<std::string>{},
                                                {"--version"},
                                                {"train", "--learning-rate", "-1", "-o", "x"},
                                                {"train", "--out=--lr"},
                                                {"train", "--help"},
                                                {"train", "--", "--lr"},
                                                {"prepare", "--anything"}}) {
    EXPECT_EQ(fault(known), "") << ::testing::PrintToString(known);
  }
}

}  // namespace
}  // namespace espalier::cli
