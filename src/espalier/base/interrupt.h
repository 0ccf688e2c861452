// SPDX-License-Identifier: Apache-2.0
// How whoever called for long work can stop it, such as by Ctrl-C in Python.
#pragma once

#include <functional>

namespace espalier {

/// Within, long work of this thread calls `look` from time to time, which stops the work by an exception.
/// Scopes may be nested: the innermost is asked.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> look);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  friend void check_interrupt();
  std::function<void()> look_;
  InterruptScope* outer_;
  double next_look_ = 0;
};

/// What loops of long work call: asks the scope of this thread, at once and then 20 times a second at most.
/// Does nothing without a scope. Throws what the scope's function throws.
void check_interrupt();

}  // namespace espalier
