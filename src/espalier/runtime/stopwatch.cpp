// SPDX-License-Identifier: Apache-2.0
#include "espalier/runtime/stopwatch.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace espalier {

c10::Event Stopwatch::mark() const {
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // has timing enabled
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return event;
}

void Stopwatch::start() {
  if (device_.is_cuda()) {
    begins_.push_back(mark());
  } else {
    begin_ = std::chrono::steady_clock::now();
  }
}

void Stopwatch::stop() {
  if (device_.is_cuda()) {
    ends_.push_back(mark());
  } else {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
}

double Stopwatch::seconds() const {
  constexpr double kSecondsPerMillisecond = 1e-3;
  double seconds = seconds_;
  for (size_t i = 0; i < ends_.size(); ++i) {
    seconds += kSecondsPerMillisecond * begins_[i].elapsedTime(ends_[i]);
  }
  return seconds;
}

}  // namespace espalier
