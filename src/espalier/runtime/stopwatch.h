// SPDX-License-Identifier: Apache-2.0
// Measures the time of work on a device without synchronisation.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <vector>

namespace espalier {

/// Accumulates the seconds between start() and stop(). On CUDA these record events in the current stream,
/// which measure device time.
class Stopwatch {
 public:
  explicit Stopwatch(at::Device device) : device_(device) {}

  void start();
  void stop();

  /// On CUDA the measured work must have finished: synchronise first, or read a result of later work.
  double seconds() const;

 private:
  c10::Event mark() const;

  at::Device device_;
  double seconds_ = 0;
  std::chrono::steady_clock::time_point begin_;
  std::vector<c10::Event> begins_, ends_;
};

}  // namespace espalier
