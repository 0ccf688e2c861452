// The implementation of tree attention on CUDA, in tests.
#pragma once

#include <cstdlib>

namespace espalier::testing {

/// Sets ESPALIER_ATTENTION while it lives; null: unsets it.
class ForcedAttention {
 public:
  explicit ForcedAttention(const char* name) {
    name == nullptr ? unsetenv("ESPALIER_ATTENTION") : setenv("ESPALIER_ATTENTION", name, 1);
  }
  ~ForcedAttention() { unsetenv("ESPALIER_ATTENTION"); }
};

}  // namespace espalier::testing
