// SPDX-License-Identifier: Apache-2.0
// How long work takes on a device, measured without waiting for it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <utility>
#include <vector>

namespace espalier {

/// Sums the seconds between start() and stop(). On CUDA these are marks in the current stream: what is
/// measured is the device's time, from when it reaches the one to when it reaches the other.
class Stopwatch {
 public:
  explicit Stopwatch(at::Device device) : device_(device) {}

  void start();
  void stop();

  /// On CUDA the work in between must be done: the device waited for, or a result of later work read.
  double seconds() const;

 private:
  c10::Event mark() const;

  at::Device device_;
  double seconds_ = 0;
  std::chrono::steady_clock::time_point begin_;
  std::vector<c10::Event> begins_, ends_;
};

}  // namespace espalier
