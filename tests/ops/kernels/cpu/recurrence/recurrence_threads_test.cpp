// SPDX-License-Identifier: Apache-2.0
// Recurrences whose tasks several threads take from one counter: bitwise identical as by one thread.
#include <gtest/gtest.h>

#include <atomic>

#include "tests/ops/kernels/cpu/recurrence/recurrence_problem.h"
#include "tests/ops/kernels/cpu/run_in_threads.h"

namespace espalier::testing {
namespace {

TEST(RecurrenceThreads, TasksMayRunAtOnceAndInAnyOrder) {
  for (const bool delta : {true, false}) {
    const RecurrenceRun<float> run(delta, 1);
    EXPECT_GE(run.forest.groups.num_rows(), 2);
    const auto with_threads = [&](int threads) {
      return outcome_of(run, [&](int64_t tasks, const auto& work) {
        std::atomic<int64_t> next{0};
        run_in_threads(threads, [&](int) {
          for (int64_t task = next++; task < tasks; task = next++) work(tasks - 1 - task, tasks - task);
        });
      });
    };
    const auto one = outcome_of(run, [](int64_t tasks, const auto& work) { work(0, tasks); });
    for (const int threads : {1, 2, 5}) EXPECT_TRUE(with_threads(threads) == one) << threads << " " << delta;
  }
}

}  // namespace
}  // namespace espalier::testing
