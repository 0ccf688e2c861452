// SPDX-License-Identifier: Apache-2.0
// Lets the caller interrupt long work, for example by Ctrl-C in Python.
#pragma once

#include <functional>

namespace espalier {

/// While the object lives, long work of this thread calls `poll` from time to time; `poll` stops the work by
/// throwing. Scopes may be nested: the innermost one is polled.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> poll);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  friend void check_interrupt();
  std::function<void()> poll_;
  InterruptScope* outer_;
  double next_poll_ = 0;
};

/// Polls the innermost scope of this thread, at most 20 times a second. Loops of long work call this. Does
/// nothing without a scope. Throws what `poll` throws.
void check_interrupt();

}  // namespace espalier
