// SPDX-License-Identifier: Apache-2.0
// The main function of all test programs. It ends with status 77, which CTest reports as skipped, where every
// test skipped itself: such as those of a GPU on a machine that has none.
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  const auto& tests = *::testing::UnitTest::GetInstance();
  const bool all_skipped =
      tests.test_to_run_count() > 0 && tests.skipped_test_count() == tests.test_to_run_count();
  return status == 0 && all_skipped ? 77 : status;
}
