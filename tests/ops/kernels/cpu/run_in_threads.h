// SPDX-License-Identifier: Apache-2.0
// Threads for tests of what any number of threads may do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

namespace espalier::testing {

/// Calls work(thread) for thread = 0 .. threads - 1, each in its own thread, and waits for all of them.
template <class Work>
void run_in_threads(int threads, const Work& work) {
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) running.emplace_back([&work, i] { work(i); });
  for (std::thread& each : running) each.join();
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

/// `count` scalars, aligned as the scratch of kernels is, all NaN: kernels must not depend on what is in it.
template <class Scalar>
std::unique_ptr<Scalar[], Free> make_scratch(int64_t count) {
  constexpr size_t kAlignment = 64;
  const size_t bytes = (static_cast<size_t>(count) * sizeof(Scalar) / kAlignment + 1) * kAlignment;
  std::unique_ptr<Scalar[], Free> scratch(static_cast<Scalar*>(std::aligned_alloc(kAlignment, bytes)));
  std::fill_n(scratch.get(), bytes / sizeof(Scalar), std::numeric_limits<Scalar>::quiet_NaN());
  return scratch;
}

}  // namespace espalier::testing
