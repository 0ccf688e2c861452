// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/options.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/base/message_of.h"

namespace espalier::testing {
namespace {

enum class Colour { kRed, kBlue };
constexpr auto kColours = std::to_array<Word<Colour>>({{"red", Colour::kRed}, {"blue", Colour::kBlue}});

// Options of every kind.
struct Settings {
  int64_t steps = 3, bytes = int64_t{1} << 30;
  uint64_t seed = 0;
  int threads = 0;
  double rate = 1e-5, part = 0.5, positive = 1;
  std::string name, other;
  bool flag = false;
  Colour colour = Colour::kBlue;
  std::optional<Colour> shade;
  std::vector<std::string> files;
  std::vector<double> ratios{1, 2.5};
  std::vector<int32_t> ids;
  OptionList list;

  Settings() {
    list.add("steps", &steps, "Steps", {.least = 0});
    list.add("seed", &seed, "Seed");
    list.add("threads", &threads, "Threads", {.least = 0, .most = 64});
    list.add("bytes", &bytes, "Bytes", {.bytes = true, .fewest_bare = 1024});
    list.add("rate", &rate, "Rate");
    list.add("part", &part, "Part", {.least = 0, .below = 1});
    list.add("positive", &positive, "Positive", {.above = 0});
    list.group("Others");
    list.add("name", &name, "Name", {.letter = 'n', .path = PathKind::kFile});
    list.add("flag", &flag, "Flag", {.may_change = true});
    list.add("colour", &colour, kColours, "Colour", {.then = [this] { part = 0; }});
    list.add("shade", &shade, kColours, "Shade", {.derived = "by colour"});
    list.add("files", &files, "Files");
    list.add("ratios", &ratios, "Ratios", {.has_commas = true});
    list.add("ids", &ids, "Ids", {.least = 0});
    list.add("other", &other, "Other", {.excludes = "name"});
  }

  std::string fault_of(const std::string& option, const std::string& text) {
    try {
      list.set({{option, text}});
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  }
};

TEST(Options, TextsBecomeValues) {
  Settings settings;
  settings.list.set({{"ratios", "3,4"},
                     {"steps", "7"},
                     {"rate", "1e-3"},
                     {"flag", "true"},
                     {"colour", "red"},
                     {"files", "b, c"},
                     {"files", "a"},
                     {"bytes", "8KiB"},
                     {"ids", "5"},
                     {"ids", "0"},
                     {"shade", "blue"}});
  EXPECT_EQ(settings.steps, 7);
  EXPECT_EQ(settings.rate, 1e-3);
  EXPECT_TRUE(settings.flag);
  EXPECT_EQ(settings.colour, Colour::kRed);
  EXPECT_EQ(settings.shade, Colour::kBlue);
  EXPECT_EQ(settings.part, 0);  // what follows from the colour
  EXPECT_EQ(settings.files, (std::vector<std::string>{"b, c", "a"}));
  EXPECT_EQ(settings.ratios, (std::vector<double>{3, 4}));
  EXPECT_EQ(settings.ids, (std::vector<int32_t>{5, 0}));
  EXPECT_EQ(settings.bytes, 8192);
  EXPECT_FALSE(settings.list.at("seed").is_given());
}

TEST(Options, AreSetInTheOrderOfTheList) {
  Settings settings;
  settings.list.set({{"colour", "red"}, {"part", "0.25"}});
  EXPECT_EQ(settings.part, 0);
}

TEST(Options, WholeNumbersAreDecimal) {
  for (const char* option : {"steps", "seed", "threads", "ids"}) {
    for (const char* text : {"0100", "00", "0x10", "0X1F", "0b11", "1'000", "1_000", "true", "-01", "-", " 5",
                             "5 ", "5k", "1e3", "1.5", ""}) {
      EXPECT_TRUE(
          Settings().fault_of(option, text).starts_with(fmt::format("--{}: expected a whole number", option)))
          << option << " " << text;
    }
  }
  EXPECT_EQ(Settings().fault_of("steps", "0100"),
            "--steps: expected a whole number in plain decimal digits, received 0100");
  EXPECT_EQ(Settings().fault_of("steps", "-1"),
            "--steps: expected a whole number of at least 0, received -1");
  EXPECT_EQ(Settings().fault_of("steps", "1.5"),
            "--steps: expected a whole number of at least 0, received 1.5");
  EXPECT_EQ(Settings().fault_of("threads", "65"),
            "--threads: expected a whole number of at most 64, received 65");
  EXPECT_EQ(Settings().fault_of("steps", "9223372036854775808"),
            "--steps: expected a whole number of at most 9223372036854775807, received 9223372036854775808");
  EXPECT_EQ(Settings().fault_of("seed", "18446744073709551616"),
            "--seed: expected a whole number of at most 18446744073709551615, received 18446744073709551616");
  EXPECT_NE(Settings().fault_of("seed", "-1"), "");
  Settings settings;
  EXPECT_EQ(settings.fault_of("seed", "18446744073709551615"), "");
  EXPECT_EQ(settings.seed, 18446744073709551615u);
}

TEST(Options, RealNumbersAreInTheirRange) {
  for (const char* text : {"nan", "inf", "-inf", "1e999", "x", "", " 1", "1x"}) {
    EXPECT_EQ(Settings().fault_of("rate", text),
              fmt::format("--rate: expected a finite number, received {}", text));
  }
  EXPECT_EQ(Settings().fault_of("part", "1"), "--part: expected a number from 0 to below 1, received 1");
  EXPECT_EQ(Settings().fault_of("part", "nan"), "--part: expected a number from 0 to below 1, received nan");
  EXPECT_EQ(Settings().fault_of("positive", "0"), "--positive: expected a finite number above 0, received 0");
  EXPECT_EQ(Settings().fault_of("positive", "4.9e-324"), "");
  EXPECT_EQ(Settings().fault_of("part", "0"), "");
  EXPECT_EQ(Settings().fault_of("ratios", "1,b"), "--ratios: expected a finite number, received b");
}

TEST(Options, OtherTextsAreRefused) {
  EXPECT_EQ(Settings().fault_of("colour", "green"), "--colour: expected red or blue, received `green`");
  EXPECT_EQ(Settings().fault_of("flag", "maybe"), "--flag: expected true or false, received maybe");
  EXPECT_EQ(Settings().fault_of("bytes", "8 gigs"),
            "--bytes: expected a size such as 8GiB or 500MB, received 8 gigs");
  EXPECT_EQ(Settings().fault_of("bytes", "8"),
            "--bytes: expected a size with its unit, such as 8GiB or 8MB, received 8, which is 8 bytes");
  Settings both;
  EXPECT_EQ(message_of<InputError>([&] { both.list.set({{"name", "a"}, {"other", "b"}}); }),
            "--other: cannot be combined with --name");
}

TEST(Options, PresentValuesAreChecked) {
  Settings settings;
  settings.list.check();
  settings.part = 1;
  EXPECT_EQ(message_of<InputError>([&] { settings.list.check(); }),
            "--part: expected a number from 0 to below 1, received 1");
  settings.part = 0;
  settings.steps = -1;
  EXPECT_EQ(message_of<InputError>([&] { settings.list.check(); }),
            "--steps: expected a whole number of at least 0, received -1");
}

// What --help and config.toml show.
TEST(Options, DefaultsAreThePresentValues) {
  const Settings settings;
  const auto shown = [&](const char* name) { return settings.list.at(name).text().default_value; };
  EXPECT_EQ(shown("steps"), "3");
  EXPECT_EQ(shown("rate"), "1e-05");
  EXPECT_EQ(shown("bytes"), "1.0 GiB");
  EXPECT_EQ(shown("colour"), "blue");
  EXPECT_EQ(shown("shade"), "by colour");
  EXPECT_EQ(shown("ratios"), "1,2.5");
  for (const char* none : {"name", "flag", "files", "ids"}) EXPECT_EQ(shown(none), "");
  EXPECT_EQ(settings.list.at("name").text().group, "Others");
}

TEST(Options, KeptValuesAreThoseThatWereGiven) {
  Settings settings;
  settings.list.set({{"rate", "1"},
                     {"seed", "18446744073709551615"},
                     {"name", "007"},
                     {"bytes", "8KiB"},
                     {"files", "a"},
                     {"files", "b"},
                     {"ratios", "4"}});
  const auto kept = [&](const char* name) { return settings.list.at(name).kept().dump(); };
  EXPECT_EQ(kept("rate"), "1");
  EXPECT_EQ(kept("seed"), "\"18446744073709551615\"");
  EXPECT_EQ(kept("name"), "\"007\"");
  EXPECT_EQ(kept("bytes"), "8192");
  EXPECT_EQ(kept("files"), R"(["a","b"])");
  EXPECT_EQ(kept("ratios"), "4");
  EXPECT_EQ(kept("steps"), "3");
  EXPECT_EQ(kept("flag"), "false");
  EXPECT_EQ(kept("colour"), "\"blue\"");
  EXPECT_EQ(kept("ids"), "null");
  EXPECT_EQ(kept("shade"), "null");
}

TEST(Options, SettingsAreThoseThatMayNotChange) {
  const Settings settings;
  const auto fixed = settings.list.settings();
  EXPECT_FALSE(fixed.contains("flag"));
  EXPECT_EQ(fixed["rate"], 1e-5);
  EXPECT_EQ(fixed["colour"], "blue");
}

TEST(Options, DescriptionsSayWhatThereIs) {
  const Settings settings;
  const auto all = settings.list.description();
  ASSERT_EQ(all.size(), settings.list.all().size());
  EXPECT_EQ(all[0].dump(),
            R"({"name":"steps","letter":"","kind":"whole","value":"N","words":[],"default":"3","list":false,)"
            R"("path":"","required":false,"hidden":false,"group":"Options","help":"Steps"})");
}

}  // namespace
}  // namespace espalier::testing
