// SPDX-License-Identifier: Apache-2.0
#include "espalier/inspect/report.h"

#include <gtest/gtest.h>

namespace espalier::testing {
namespace {

TEST(Gains, ThatOneLeadsWhichApplies) {
  // Turns of conversations: merging alone brings most of the gain.
  const Gains turns = Gains::of(1050, 121, 100, true);
  EXPECT_TRUE(turns.merging_helps());
  EXPECT_EQ(both_gains(turns), "1.21x over append-only merging and 10.50x over sequence packing");
  // A group of answers: there is nothing to merge, except two that happen to be equal.
  const Gains group = Gains::of(1050, 1040, 100, true);
  EXPECT_FALSE(group.merging_helps());
  EXPECT_EQ(both_gains(group), "10.50x over sequence packing and 10.40x over append-only merging");
}

TEST(Gains, NoWorkIsNoGain) {
  for (const Gains& gains : {Gains::of(0, 0, 0, true), Gains::of(5, 5, 0, true), Gains::of(0, 0, 5, true)}) {
    EXPECT_EQ(gains.over_packing, 1);
    EXPECT_EQ(gains.over_append_only, 1);
  }
}

}  // namespace
}  // namespace espalier::testing
