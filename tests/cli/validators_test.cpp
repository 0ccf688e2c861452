// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/validators.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace espalier::testing {
namespace {

// Flags of every kind, as the commands declare theirs.
struct Flags {
  CLI::App app;
  int64_t steps = 0;
  uint64_t seed = 0, bytes = 0;
  int threads = 0;
  std::vector<int64_t> sizes;
  double rate = 0;
  std::string name;

  Flags() {
    app.add_option("--steps", steps)->check(cli::whole_from(0));
    app.add_option("--seed", seed);
    app.add_option("--bytes", bytes)->transform(cli::byte_size());
    app.add_option("--threads", threads)->check(CLI::Range(0, 64));
    app.add_option("--sizes", sizes)->delimiter(',');
    app.add_option("--rate", rate);
    app.add_option("--name", name);
    cli::require_decimal_numbers(&app);
  }

  // What is wrong with the flag; "" where nothing is.
  std::string fault_of(const std::string& argument) {
    try {
      app.parse(std::vector<std::string>{argument});
    } catch (const CLI::ParseError& error) {
      return error.what();
    }
    return "";
  }
};

TEST(Validators, WholeNumbersAreDecimal) {
  const std::vector<std::string> values = {"0100", "00",  "0x10", "0X1F", "0b11", "0o17", "1'000", "1_000",
                                           "true", "-01", "-",    " 5",   "5 ",   "5k",   "1e3",   "1.5"};
  for (const char* name : {"--steps", "--seed", "--threads", "--sizes"}) {
    for (const std::string& value : values) {
      const std::string fault = Flags().fault_of(fmt::format("{}={}", name, value));
      EXPECT_NE(fault.find(name), std::string::npos) << value << ": " << fault;
    }
  }
  EXPECT_EQ(Flags().fault_of("--steps=0100"),
            "--steps: expected a whole number in plain decimal digits, received 0100");
  EXPECT_NE(Flags().fault_of("--sizes=8,010"), "");
  Flags flags;
  EXPECT_EQ(flags.fault_of("--steps=100"), "");
  EXPECT_EQ(flags.steps, 100);
}

TEST(Validators, WholeNumbersThatDoNotFitAreRefused) {
  EXPECT_EQ(Flags().fault_of("--seed=18446744073709551616"),
            "--seed: expected a whole number of at most 18446744073709551615, received 18446744073709551616");
  EXPECT_EQ(Flags().fault_of("--steps=9223372036854775808"),
            "--steps: expected a whole number of at most 9223372036854775807, received 9223372036854775808");
  EXPECT_NE(Flags().fault_of("--seed=-1"), "");
  Flags flags;
  EXPECT_EQ(flags.fault_of("--seed=18446744073709551615"), "");
  EXPECT_EQ(flags.seed, 18446744073709551615u);
}

TEST(Validators, OtherFlagsStayAsTheyAre) {
  Flags flags;
  EXPECT_EQ(flags.fault_of("--name=010"), "");
  EXPECT_EQ(flags.name, "010");
  EXPECT_EQ(flags.fault_of("--rate=05e-1"), "");
  EXPECT_EQ(flags.rate, 0.5);
  EXPECT_EQ(flags.fault_of("--bytes=8KiB"), "");
  EXPECT_EQ(flags.bytes, 8192u);
}

}  // namespace
}  // namespace espalier::testing
