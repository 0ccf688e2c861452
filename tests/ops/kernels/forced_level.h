// The CPU level of tests.
#pragma once

#include <cstdlib>

namespace espalier::testing {

/// Sets ESPALIER_CPU while it lives.
class ForcedLevel {
 public:
  explicit ForcedLevel(const char* name) { setenv("ESPALIER_CPU", name, 1); }
  ~ForcedLevel() { unsetenv("ESPALIER_CPU"); }
};

}  // namespace espalier::testing
