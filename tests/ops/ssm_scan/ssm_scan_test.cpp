// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/ssm_scan/ssm_scan.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace espalier::testing {
namespace {

TEST(SsmScan, LeavesOutWhatDMultiplies) {
  SsmScan given{.x = at::randn({3, 2, 4}),
                .dt = at::rand({3, 2}),
                .a = -at::rand({2}),
                .b = at::randn({3, 1, 5}),
                .c = at::randn({3, 1, 5}),
                .d = {},
                .prev = at::tensor({-1, 0, 0}, at::kInt),
                .states = {},
                .ends = at::empty({0}, at::kLong)};
  const SsmScanOutput without = ssm_scan(given);
  EXPECT_EQ(without.states.sizes(), (std::vector<int64_t>{0, 2, 5, 4}));
  given.d = at::zeros({2});
  EXPECT_TRUE(ssm_scan(given).out.equal(without.out));
}

TEST(SsmScan, RefusesWhatIsNotAsSaid) {
  const auto problem = [] {
    return SsmScan{.x = at::randn({3, 2, 4}),
                   .dt = at::ones({3, 2}),
                   .a = -at::ones({2}),
                   .b = at::randn({3, 1, 5}),
                   .c = at::randn({3, 1, 5}),
                   .d = at::ones({2}),
                   .prev = at::tensor({-1, 0, 1}, at::kInt),
                   .states = {},
                   .ends = at::tensor({2}, at::kLong)};
  };
  EXPECT_NO_THROW(ssm_scan(problem()));
  const auto refuses = [&](const auto& spoil) {
    SsmScan given = problem();
    spoil(&given);
    EXPECT_ANY_THROW(ssm_scan(given));
  };
  refuses([](SsmScan* given) { given->b = at::randn({3, 3, 5}); });
  refuses([](SsmScan* given) { given->c = given->c.to(at::kBFloat16); });
  refuses([](SsmScan* given) { given->dt = given->dt.to(at::kDouble); });
  refuses([](SsmScan* given) { given->a = at::ones({1}); });
  refuses([](SsmScan* given) { given->d = at::ones({4}); });
  refuses([](SsmScan* given) { given->states = at::zeros({1, 2, 4, 5}); });
  refuses([](SsmScan* given) { given->prev = at::tensor({-1, 0, -2}, at::kInt); });
  refuses([](SsmScan* given) { given->ends = at::tensor({3}, at::kLong); });
  refuses([](SsmScan* given) { given->chunk_size = 48; });
}

}  // namespace
}  // namespace espalier::testing
