// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

namespace espalier::testing {
namespace {

using ::testing::ExitedWithCode;
using ::testing::KilledBySignal;

constexpr int kStopped = 3, kGoesOn = 0, kNotAsked = 1;

cli::StopRequest request{.exit_code = kStopped};

/// In a separate process: sends itself `signal` in step `step`, `times` times, well apart, and ends with
/// kGoesOn where it lives to be asked to stop.
[[noreturn]] void run_into(int signal, int64_t step, int times = 1) {
  ::signal(SIGHUP, SIG_DFL);
  cli::prepare_process();
  cli::stop_on_signals(&request);
  request.step = step;
  for (int i = 0; i < times; ++i) {
    if (i > 0) ::usleep(700'000);
    ::raise(signal);
  }
  std::_Exit(request.requested ? kGoesOn : kNotAsked);
}

class Signals : public ::testing::TestWithParam<int> {};

TEST_P(Signals, SayAtOnceWhatIsFinished) {
  EXPECT_EXIT(run_into(GetParam(), 12), ExitedWithCode(kGoesOn),
              "espalier: finishing step 12, then saving; interrupt again to stop at once");
}

TEST_P(Signals, EndARunThatHasNothingToSave) {
  EXPECT_EXIT(run_into(GetParam(), 0), ExitedWithCode(kStopped), "espalier: stopped before the first step");
}

INSTANTIATE_TEST_SUITE_P(Stopping, Signals, ::testing::Values(SIGINT, SIGTERM, SIGHUP));

TEST(Signals, TheSecondInterruptEndsTheRunAndOthersDoNot) {
  EXPECT_EXIT(run_into(SIGINT, 12, 2), KilledBySignal(SIGINT), "finishing step 12");
  EXPECT_EXIT(run_into(SIGTERM, 12, 2), ExitedWithCode(kGoesOn), "finishing step 12");
  EXPECT_EXIT(run_into(SIGHUP, 12, 3), ExitedWithCode(kGoesOn), "finishing step 12");
}

}  // namespace
}  // namespace espalier::testing
