// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/report.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

TEST(Gains, AreQuotients) {
  const Gains gains = Gains::of(1050, 121, 100, true);
  EXPECT_EQ(gains.over_packing, 10.5);
  EXPECT_EQ(gains.over_append_only, 1.21);
}

TEST(Gains, NoWorkIsNoGain) {
  for (const Gains& gains : {Gains::of(0, 0, 0, true), Gains::of(5, 5, 0, true), Gains::of(0, 0, 5, true)}) {
    EXPECT_EQ(gains.over_packing, 1);
    EXPECT_EQ(gains.over_append_only, 1);
  }
}

}  // namespace
}  // namespace espalier::testing
