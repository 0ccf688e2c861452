// SPDX-License-Identifier: Apache-2.0
// Prints how much two trajectories with a common prefix share.
#include <cstdio>
#include <vector>

#include "espalier/tree/forest.h"

int main() {
  const std::vector<int64_t> offsets{0, 5, 9};
  const std::vector<int32_t> tokens{1, 2, 3, 4, 5, 1, 2, 3, 6};
  const espalier::ForestStatistics statistics =
      espalier::forest_statistics(espalier::build_forest({offsets, tokens}));
  std::printf("%lld of %lld tokens\n", static_cast<long long>(statistics.tree_tokens),
              static_cast<long long>(statistics.flat_tokens));
}
