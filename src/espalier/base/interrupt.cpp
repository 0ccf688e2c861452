// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/interrupt.h"

#include <chrono>
#include <utility>

namespace espalier {
namespace {

constexpr double kSecondsBetweenPolls = 0.05;

thread_local InterruptScope* innermost = nullptr;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

InterruptScope::InterruptScope(std::function<void()> poll) : poll_(std::move(poll)), outer_(innermost) {
  innermost = this;
}

InterruptScope::~InterruptScope() {
  innermost = outer_;
}

void check_interrupt() {
  if (innermost == nullptr) return;
  const double time = now();
  if (time < innermost->next_poll_) return;
  innermost->next_poll_ = time + kSecondsBetweenPolls;
  innermost->poll_();
}

}  // namespace espalier
