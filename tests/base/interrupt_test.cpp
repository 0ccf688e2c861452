// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/interrupt.h"

#include <gtest/gtest.h>

#include <thread>

namespace espalier::testing {
namespace {

TEST(Interrupt, TheInnermostScopeIsAskedAtOnceAndThenSeldom) {
  check_interrupt();  // without a scope
  int outer = 0, inner = 0;
  const InterruptScope outside([&] { ++outer; });
  {
    const InterruptScope inside([&] { ++inner; });
    for (int i = 0; i < 1000; ++i) check_interrupt();
    EXPECT_GE(inner, 1);
    EXPECT_EQ(outer, 0);
  }
  check_interrupt();
  EXPECT_EQ(outer, 1);
}

TEST(Interrupt, OtherThreadsAreNotAsked) {
  int asked = 0;
  const InterruptScope scope([&] { ++asked; });
  std::thread(check_interrupt).join();
  EXPECT_EQ(asked, 0);
}

}  // namespace
}  // namespace espalier::testing
