// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/units.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

TEST(Units, BytesAreReadWithTheirUnit) {
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("8GiB"), int64_t{8} << 30);
  EXPECT_EQ(parse_bytes("500MB"), 500'000'000);
  EXPECT_EQ(parse_bytes("1.5 gb"), 1'500'000'000);
  EXPECT_EQ(parse_bytes("3k"), 3000);
  EXPECT_EQ(parse_bytes("3Ki"), 3072);
  EXPECT_EQ(parse_bytes("12b"), 12);
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("7EiB"), int64_t{7} << 60);
}

TEST(Units, OtherTextIsNoSize) {
  for (const char* text :
       {"", "GiB", "8 GiB more", "8xB", "-1", "nan", "inf", "8ib", "8i", "8EiB", "1e30", "0x10"})
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
}

TEST(Units, OneIsSingular) {
  EXPECT_EQ(count_of(1, "micro-batch", "micro-batches"), "1 micro-batch");
  EXPECT_EQ(count_of(0, "micro-batch", "micro-batches"), "0 micro-batches");
  EXPECT_EQ(count_of(1200, "micro-batch", "micro-batches"), "1,200 micro-batches");
}

}  // namespace
}  // namespace espalier
