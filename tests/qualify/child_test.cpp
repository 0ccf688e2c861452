// SPDX-License-Identifier: Apache-2.0
#include "espalier/qualify/child.h"

#include <gtest/gtest.h>

#include <signal.h>

#include <stdexcept>

#include "espalier/base/interrupt.h"

namespace espalier::testing {
namespace {

using namespace std::chrono_literals;
using How = qualify::ChildEnd::How;

qualify::ChildEnd shell(const std::string& script, std::chrono::milliseconds limit = 60s) {
  return qualify::run_child({"/bin/sh", "-c", script}, limit);
}

TEST(Child, ItsEndIsTold) {
  EXPECT_TRUE(shell("exit 0").good());
  const qualify::ChildEnd status = shell("echo dropped; echo first >&2; echo the last >&2; exit 3");
  EXPECT_EQ(status.how, How::kExited);
  EXPECT_EQ(describe(status, 60s), "exited with status 3: the last");
  const qualify::ChildEnd killed = shell("kill -SEGV $$");
  EXPECT_EQ(killed.how, How::kKilled);
  EXPECT_EQ(killed.code, SIGSEGV);
  EXPECT_EQ(describe(killed, 60s), "was killed by signal 11 (Segmentation fault)");
  const qualify::ChildEnd absent = qualify::run_child({"/nowhere/program"}, 60s);
  EXPECT_EQ(absent.how, How::kNotStarted);
  EXPECT_EQ(describe(absent, 60s), "cannot be started: No such file or directory");
}

TEST(Child, AHangEndsAtTheLimit) {
  const qualify::ChildEnd end = shell("echo waiting >&2; trap '' TERM; while :; do sleep 0.1; done", 500ms);
  EXPECT_EQ(end.how, How::kTimedOut);
  EXPECT_EQ(describe(end, 500ms), "did not end within 0.5 s: waiting");
}

// A child that says more than a pipe holds neither hangs nor is kept whole.
TEST(Child, MayWriteMuch) {
  const qualify::ChildEnd end = shell(
      "i=0; while [ $i -lt 3000 ]; do echo 'a line of some length that is repeated' >&2; "
      "i=$((i+1)); done; echo end >&2; exit 1");
  EXPECT_EQ(end.last_line, "end");
}

TEST(Child, FindsSignalsAsAShellWouldLeaveThem) {
  void (*const before)(int) = ::signal(SIGPIPE, SIG_IGN);
  EXPECT_EQ(shell("kill -PIPE $$; exit 0").how, How::kKilled);
  ::signal(SIGPIPE, before);
}

TEST(Child, AnInterruptEndsIt) {
  const InterruptScope scope([] { throw std::runtime_error("stop"); });
  EXPECT_THROW(shell("sleep 600"), std::runtime_error);
}

}  // namespace
}  // namespace espalier::testing
