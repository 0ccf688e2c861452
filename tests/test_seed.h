// SPDX-License-Identifier: Apache-2.0
// Other random numbers for the same tests.
#pragma once

#include <cstdint>

namespace espalier::testing {

/// `seed`, or another one for each value of the environment variable ESPALIER_TEST_SEED (a whole number, 0
/// when unset): every test that draws random numbers takes its seeds through here, so that the suite can be
/// run on numbers that nobody has tried. Output and failures name the variable's value.
uint64_t test_seed(uint64_t seed);

/// While it lives, test_seed leaves seeds as they are: for tests of what holds for one instance only.
class PinnedSeeds {
 public:
  PinnedSeeds();
  ~PinnedSeeds();
  PinnedSeeds(const PinnedSeeds&) = delete;
  PinnedSeeds& operator=(const PinnedSeeds&) = delete;
};

}  // namespace espalier::testing
