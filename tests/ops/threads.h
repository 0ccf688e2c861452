// SPDX-License-Identifier: Apache-2.0
// The number of threads of tests.
#pragma once

#include <ATen/Parallel.h>

namespace espalier::testing {

/// Sets ATen's number of threads while it lives.
class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

}  // namespace espalier::testing
