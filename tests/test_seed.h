// SPDX-License-Identifier: Apache-2.0
// Other random numbers for the same tests.
#pragma once

#include <cstdint>

namespace espalier::testing {

/// `seed`, or another one for each value of the environment variable ESPALIER_TEST_SEED (a whole number, 0
/// when unset): every test that draws random numbers takes its seeds through here, so that the suite can be
/// run on numbers that nobody has tried. Output and failures name the variable's value.
uint64_t test_seed(uint64_t seed);

/// Sanitizers look for other faults than wrong numbers, and take ten times as long.
#ifdef ESPALIER_SANITIZED
inline constexpr bool kIsSanitized = true;
#else
inline constexpr bool kIsSanitized = false;
#endif

/// How many random problems to try: `count`, or a tenth under sanitizers. Statistics over all of them are
/// left to the tests without.
constexpr uint64_t seeds(uint64_t count) {
  return kIsSanitized ? (count + 9) / 10 : count;
}

/// While it lives, test_seed leaves seeds as they are: for tests of what holds for one instance only.
class PinnedSeeds {
 public:
  PinnedSeeds();
  ~PinnedSeeds();
  PinnedSeeds(const PinnedSeeds&) = delete;
  PinnedSeeds& operator=(const PinnedSeeds&) = delete;
};

}  // namespace espalier::testing
