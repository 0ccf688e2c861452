// SPDX-License-Identifier: Apache-2.0
#include "espalier/data/large_numbers.h"

#include <gtest/gtest.h>

#include "espalier/base/check.h"
#include "tests/base/message_of.h"

namespace espalier {
namespace {

using testing::message_of;

const std::string kHuge = "1" + std::string(400, '0');

TEST(LargeNumbers, LeaveLinesAloneThatHaveNone) {
  for (const std::string line :
       {"", "{}", R"({"a":18446744073709551615,"b":-9223372036854775808,"c":1.7e308,"d":1e-999})",
        R"({"a":"99999999999999999999999","b\"":[true,null,-0,-0.0e0]})", R"({"a":[1,2)", R"({"a":"\)",
        R"({"a":12345678901234567890123.)"}) {
    EXPECT_EQ(without_large_numbers(line), std::nullopt) << line;
  }
}

TEST(LargeNumbers, BecomeZeroInFieldsOfOthers) {
  EXPECT_EQ(without_large_numbers(R"({"uuid":340282366920938463463374607431768211455,"input_ids":[1]})"),
            R"({"uuid":0,"input_ids":[1]})");
  EXPECT_EQ(without_large_numbers(R"({"meta":{"reward":[1e999,-1e400],"x":2}, "n" : )" + kHuge + "}"),
            R"({"meta":{"reward":[0,0],"x":2}, "n" : 0})");
  EXPECT_EQ(without_large_numbers(R"({"a":18446744073709551616,"b":-9223372036854775809})"),
            R"({"a":0,"b":0})");
}

TEST(LargeNumbers, BecomeTextInIds) {
  EXPECT_EQ(without_large_numbers(R"({"group_id":340282366920938463463374607431768211455,"trajectory_id": )" +
                                  kHuge + R"(,"pair_id":-18446744073709551616})"),
            R"({"group_id":"340282366920938463463374607431768211455","trajectory_id": ")" + kHuge +
                R"(","pair_id":"-18446744073709551616"})");
}

TEST(LargeNumbers, AreRefusedInOurFields) {
  EXPECT_EQ(message_of<InputError>([] { without_large_numbers(R"({"reward":1e999})"); }),
            "field `reward`: expected numbers within 64 bits, received 1e999");
  EXPECT_EQ(message_of<InputError>(
                [] { without_large_numbers(R"({"x":1,"input_ids":[1,36893488147419103232]})"); }),
            "field `input_ids`: expected numbers within 64 bits, received 36893488147419103232");
  // An id that is no integer, a list where one id belongs, and a name that escapes may hide.
  for (const std::string line :
       {R"({"group_id":1e999})", R"({"group_id":[36893488147419103232]})", R"({"\u0072eward":1e999})"}) {
    EXPECT_THROW(without_large_numbers(line), InputError) << line;
  }
}

}  // namespace
}  // namespace espalier
