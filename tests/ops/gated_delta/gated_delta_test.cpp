// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/gated_delta/gated_delta.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace espalier::testing {
namespace {

TEST(GatedDelta, RefusesWhatIsNotAsSaid) {
  const auto problem = [] {
    return GatedDeltaRule{.q = at::randn({3, 1, 4}),
                          .k = at::randn({3, 1, 4}),
                          .v = at::randn({3, 2, 5}),
                          .g = at::zeros({3, 2}),
                          .beta = at::ones({3, 2}),
                          .prev = at::tensor({-1, 0, 1}, at::kInt),
                          .states = {},
                          .ends = at::tensor({2}, at::kLong)};
  };
  EXPECT_NO_THROW(gated_delta_rule(problem()));
  const auto refuses = [&](const auto& spoil) {
    GatedDeltaRule given = problem();
    spoil(&given);
    EXPECT_ANY_THROW(gated_delta_rule(given));
  };
  refuses([](GatedDeltaRule* given) { given->k = at::randn({3, 2, 4}); });
  refuses([](GatedDeltaRule* given) { given->v = given->v.to(at::kBFloat16); });
  refuses([](GatedDeltaRule* given) { given->g = given->g.to(at::kDouble); });
  refuses([](GatedDeltaRule* given) { given->states = at::zeros({1, 2, 5, 4}); });
  refuses([](GatedDeltaRule* given) { given->prev = at::tensor({-1, 0, -2}, at::kInt); });
  refuses([](GatedDeltaRule* given) { given->ends = at::tensor({3}, at::kLong); });
  refuses([](GatedDeltaRule* given) { given->chunk_size = 48; });
}

}  // namespace
}  // namespace espalier::testing
