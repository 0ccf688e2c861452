// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/arguments.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "espalier/base/file.h"
#include "espalier/cli/flags/toml_config.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"

namespace espalier::testing {
namespace {

using Arguments = std::vector<std::string>;

// A command with options of every kind, as the commands describe theirs.
struct Program {
  std::string model, normalize = "token";
  double rate = 1e-5;
  int64_t steps = 0;
  uint64_t seed = 0;
  bool resume = false;
  std::vector<double> ratios{1, 2};
  std::vector<std::string> data;
  cli::Command command{.name = "train", .summary = "Trains"};

  Program() {
    OptionList& list = command.options;
    list.add("model", &model, "Model", {.required = true});
    list.add("normalize", &normalize, "Normaliser");
    list.add("learning-rate", &rate, "Rate");
    list.add("steps", &steps, "Steps");
    list.add("seed", &seed, "Seed");
    list.add("ratios", &ratios, "Ratios", {.has_commas = true});
    list.add("resume", &resume, "Resume");
    list.add("data", &data, "Files", {.letter = 'd'});
  }

  nlohmann::ordered_json resolve(const Arguments& arguments) {
    EXPECT_TRUE(cli::set_options(&command, arguments));
    return cli::resolved_flags(command.options);
  }
};

class TomlConfig : public ::testing::Test {
 protected:
  std::string file(const std::string& text) {
    const auto path = folder_ / "run.toml";
    write_text(path, text);
    return path.string();
  }

  std::string error_of(const std::string& text) {
    const std::string path = file(text);
    Program program;
    return message_of<InputError>([&] { cli::set_options(&program.command, {"--config", path}); });
  }

  std::string path() const { return (folder_ / "run.toml").string(); }

  ScratchFolder folder_;
};

TEST_F(TomlConfig, FileGivesFlagsAndTheCommandLineWins) {
  const std::string config =
      file("model = \"some folder/x\"\nlearning-rate = 0.5\nsteps = 7\nresume = true\n");
  for (const Arguments& arguments :
       {Arguments{"--config", config, "--steps", "9"}, Arguments{"--steps", "9", "--config", config},
        Arguments{"--steps=9", "--config=" + config}}) {
    Program program;
    program.resolve(arguments);
    EXPECT_EQ(program.model, "some folder/x");
    EXPECT_EQ(program.rate, 0.5);
    EXPECT_EQ(program.steps, 9);
    EXPECT_TRUE(program.resume);
  }
}

TEST_F(TomlConfig, UnderscoresStandForDashes) {
  Program program;
  program.resolve({"--config", file("model = 'm'\nlearning_rate = 2\n")});
  EXPECT_EQ(program.rate, 2);
}

TEST_F(TomlConfig, BooleansTurnFlagsOnAndOff) {
  Program off;
  off.resolve({"--config", file("model = 'm'\nresume = false\n")});
  EXPECT_FALSE(off.resume);
  Program on;
  on.resolve({"--resume", "--config", file("model = 'm'\nresume = false\n")});
  EXPECT_TRUE(on.resume);
}

TEST_F(TomlConfig, ArraysBecomeLists) {
  Program program;
  program.resolve({"--config", file("model = 'm'\nratios = [4, 8, 16]\n")});
  EXPECT_EQ(program.ratios, (std::vector<double>{4, 8, 16}));
}

TEST_F(TomlConfig, ListsOfTheCommandLineReplaceThoseOfTheFile) {
  const std::string config = file("model = 'm'\ndata = ['a, b.jsonl', 'c.jsonl']\n");
  Program kept;
  EXPECT_EQ(kept.resolve({"--config", config})["data"],
            nlohmann::json(std::vector<std::string>{"a, b.jsonl", "c.jsonl"}));
  EXPECT_EQ(kept.data, (std::vector<std::string>{"a, b.jsonl", "c.jsonl"}));
  for (const Arguments& arguments :
       {Arguments{"--config", config, "--data", "x", "y"}, Arguments{"-d", "x", "-dy", "--config", config},
        Arguments{"--data=x", "--config=" + config, "--data=y"}}) {
    Program program;
    program.resolve(arguments);
    EXPECT_EQ(program.data, (std::vector<std::string>{"x", "y"}));
  }
  EXPECT_NE(error_of("steps = [1, 2]\n").find(":1: key `steps`: expected one value, received a list"),
            std::string::npos);
}

TEST_F(TomlConfig, RepeatedFlagsAreRefused) {
  const auto error_of_line = [](const Arguments& line) {
    Program program;
    return message_of<cli::UsageError>([&] { program.resolve(line); });
  };
  EXPECT_EQ(error_of_line({"--model", "m", "--learning-rate", "1e-5", "--learning-rate=1e-4"}),
            "--learning-rate was given twice: 1e-5 and 1e-4");
  EXPECT_EQ(error_of_line({"--model", "m", "--model", "m"}), "--model was given twice: m and m");
  EXPECT_EQ(error_of_line({"--model", "m", "--resume", "--resume"}), "--resume was given twice");
  EXPECT_EQ(error_of_line({"--config", file("model = 'm'\nlearning-rate = 1\nlearning_rate = 2\n")}),
            "--learning-rate was given twice: 1 and 2");
  Program program;
  const std::string config = file("model = 'm'\n");
  EXPECT_EQ(message_of<cli::UsageError>([&] { program.resolve({"--config", config, "--config=b.toml"}); }),
            "--config was given twice: " + config + " and b.toml");
  Program lists;
  lists.resolve({"--model", "m", "--ratios", "3", "--ratios", "4,5"});
  EXPECT_EQ(lists.ratios, (std::vector<double>{3, 4, 5}));
}

TEST_F(TomlConfig, NumbersKeepTheirValue) {
  Program program;
  program.resolve(
      {"--config", file("model = 'm'\nlearning-rate = 1.2345678901234567e-7\nseed = 9007199254740993\n")});
  EXPECT_EQ(program.rate, 1.2345678901234567e-7);
  EXPECT_EQ(program.seed, 9007199254740993u);
}

TEST_F(TomlConfig, UnknownKeysAreRefusedWithTheirLine) {
  EXPECT_NE(error_of("steps = 1\n\nlerning-rate = 2\n").find(path() + ":3: unknown key `lerning-rate`"),
            std::string::npos);
  EXPECT_NE(error_of("help = true\n").find(":1: unknown key `help`"), std::string::npos);
  EXPECT_NE(error_of("config = \"other.toml\"\n").find(":1: unknown key `config`"), std::string::npos);
}

TEST_F(TomlConfig, TablesAreRefusedWithTheirLine) {
  EXPECT_NE(error_of("steps = 1\n[model]\nname = 2\n").find(path() + ":2: key `model`"), std::string::npos);
  EXPECT_NE(error_of("ratios = [[1], [2]]\n").find(path() + ":1: key `ratios`"), std::string::npos);
  EXPECT_NE(error_of("model = 2020-01-01\n").find(path() + ":1: key `model`"), std::string::npos);
}

TEST_F(TomlConfig, SyntaxErrorsAreRefusedWithTheirLine) {
  for (const char* text :
       {"steps = 1\nresume = yes\n", "steps = 1\nmodel = \"x\n", "steps = 1\nsteps = 2\n"}) {
    EXPECT_NE(error_of(text).find(path() + ":2: "), std::string::npos) << error_of(text);
  }
}

// What toml++ has assertions and undefined behaviour for (cli/flags/toml_config.cpp).
TEST_F(TomlConfig, SyntaxErrorsThatTheLibraryDoesNotExpectAreRefused) {
  for (const char* text : {"steps = 1\nmodel = 1979-05-27TW\n", "steps = 1\nmodel = 19\u00e9\n",
                           "steps = 1\nmodel = \u00e9\n", "steps = 1\n\u00e9 = 1\n"}) {
    EXPECT_NE(error_of(text).find(path() + ":2: "), std::string::npos) << error_of(text);
  }
}

TEST_F(TomlConfig, MissingFilesAndNamesAreRefused) {
  Program program;
  const std::string missing = (folder_ / "missing.toml").string();
  const auto set = [&](const Arguments& arguments) { cli::set_options(&program.command, arguments); };
  EXPECT_NE(message_of<InputError>([&] { set({"--config", missing}); }).find(missing), std::string::npos);
  EXPECT_EQ(message_of<cli::UsageError>([&] { set({"--config"}); }), "--config: 1 required FILE missing");
}

TEST_F(TomlConfig, CommandsWithAConfigOfTheirOwnAreLeftAlone) {
  std::string config;
  cli::Command init{.name = "init", .summary = "", .has_config = false};
  init.options.add("config", &config, "config.json");
  EXPECT_TRUE(cli::set_options(&init, {"--config", "config.json"}));
  EXPECT_EQ(config, "config.json");
}

TEST_F(TomlConfig, HelpSetsNothing) {
  for (const Arguments& arguments : {Arguments{"--help"}, Arguments{"--model", "m", "-h"}}) {
    Program program;
    EXPECT_FALSE(cli::set_options(&program.command, arguments));
    EXPECT_EQ(program.model, "");
  }
}

TEST_F(TomlConfig, WrongUsageIsNamed) {
  const auto fault_of = [](const Arguments& arguments) {
    Program program;
    return message_of<cli::UsageError>([&] { cli::set_options(&program.command, arguments); });
  };
  EXPECT_EQ(fault_of({}), "--model is required");
  EXPECT_EQ(fault_of({"--model"}), "--model: 1 required TEXT missing");
  EXPECT_EQ(fault_of({"--steps", "x"}),
            "--steps: expected a whole number in plain decimal digits, received x");
  EXPECT_EQ(fault_of({"--model", "m", "-q"}), "The following argument was not expected: -q");
  EXPECT_EQ(fault_of({"--model", "m", "--steps", "010"}),
            "--steps: expected a whole number in plain decimal digits, received 010");
  EXPECT_EQ(fault_of({"--model", "m", "--config", file("steps = \"0100\"\n")}),
            "--steps: expected a whole number in plain decimal digits, received 0100");
}

TEST_F(TomlConfig, ResolvedFlagsAreTyped) {
  Program program;
  const nlohmann::ordered_json flags =
      program.resolve({"--model", "m", "--learning-rate", "1e-3", "--resume"});
  EXPECT_EQ(flags["model"], "m");
  EXPECT_EQ(flags["normalize"], "token");
  EXPECT_TRUE(flags["learning-rate"].is_number_float());
  EXPECT_EQ(flags["learning-rate"], 1e-3);
  EXPECT_TRUE(flags["steps"].is_number_integer());
  EXPECT_EQ(flags["steps"], 0);
  EXPECT_EQ(flags["resume"], true);
  EXPECT_FALSE(flags.contains("help"));
  EXPECT_FALSE(flags.contains("config"));
}

TEST_F(TomlConfig, ResolvedFlagsHaveTheValueThatWon) {
  Program program;
  const nlohmann::ordered_json flags =
      program.resolve({"--config", file("model = \"first\"\nsteps = 7\nratios = [1, 2]\n"), "--model",
                       "second", "--steps", "9"});
  EXPECT_EQ(flags["model"], "second");
  EXPECT_EQ(flags["steps"], 9);
  EXPECT_EQ(flags["ratios"], "1,2");
}

TEST_F(TomlConfig, ResolvedFlagsReadBackAreTheSame) {
  const Arguments lines[] = {
      {"--model", "m"},
      {"--model", "a \"quoted\"\\ name", "--steps", "12", "--learning-rate", "3e-5", "--resume"},
      {"--model", "true", "--normalize", "100", "--seed", "9223372036854775807"},
      {"--model", "m7", "--normalize", "nan", "--ratios", "3,4,5"},
      {"--model", "m", "--learning-rate", "1e+20"},
      {"--model", "m", "--data", "one.jsonl"},
      {"--model", "m", "--data", "a,b.jsonl", "*.jsonl", "--data", "a,b.jsonl"},
      {"--model", "\xc3\xa9t\xc3\xa9"},
  };
  for (const Arguments& line : lines) {
    Program first;
    const nlohmann::ordered_json flags = first.resolve(line);
    const std::string toml = cli::to_toml(flags);
    SCOPED_TRACE(toml);
    Program second;
    const nlohmann::ordered_json again = second.resolve({"--config", file(toml)});
    EXPECT_EQ(flags, again);
    EXPECT_EQ(first.model, second.model);
    EXPECT_EQ(first.normalize, second.normalize);
    EXPECT_EQ(first.rate, second.rate);
    EXPECT_EQ(first.seed, second.seed);
    EXPECT_EQ(first.ratios, second.ratios);
    EXPECT_EQ(first.data, second.data);
    EXPECT_EQ(first.resume, second.resume);
  }
}

}  // namespace
}  // namespace espalier::testing
