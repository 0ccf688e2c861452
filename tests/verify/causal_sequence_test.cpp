// SPDX-License-Identifier: Apache-2.0
// Attention of a plain sequence, as verify has it, and of the same tokens as a tree of one path.
#include "espalier/verify/causal_sequence.h"
#include "espalier/ops/attention/tree_attention.h"

#include <gtest/gtest.h>

#include "tests/ops/attention/reference.h"
#include "tests/ops/comparison.h"
#include "tests/torch_seed.h"

namespace espalier::testing {
namespace {

TEST(CausalSequence, WindowsSinksAndSoftcaps) {
  seed_torch(5);
  constexpr int64_t kTokens = 20;
  std::vector<at::Tensor> inputs = {at::randn({kTokens, 4, 8}, at::kDouble),
                                    at::randn({kTokens, 2, 8}, at::kDouble),
                                    at::randn({kTokens, 2, 8}, at::kDouble), at::randn({4}, at::kDouble)};
  const at::Tensor grad_out = at::randn_like(inputs[0]);
  const ForestTokens tokens{at::full({kTokens}, kTokens, at::kInt), at::arange(kTokens, at::kInt)};
  const CausalSequence sequence(kTokens);
  for (const bool sinks : {false, true}) {
    for (const int64_t window : {0, 1, 2, 7, 20, 100}) {
      const double softcap = window % 2 == 0 ? 0 : 0.8;
      const auto options = [&](const std::vector<at::Tensor>& leaves, int64_t of_window) {
        return AttentionOptions{0.3, of_window, sinks ? leaves[3] : at::Tensor(), softcap};
      };
      const std::vector<at::Tensor> leaves(inputs.begin(), inputs.begin() + (sinks ? 4 : 3));
      const auto plain = [&](const std::vector<at::Tensor>& in) {
        return sequence.attention(0, in[0], in[1], in[2], options(in, window));
      };
      const auto tree = [&](int64_t of_window) {
        return with_gradients(
            [&](const std::vector<at::Tensor>& in) {
              return reference::tree_attention(in[0], in[1], in[2], tokens, options(in, of_window));
            },
            leaves, grad_out);
      };
      SCOPED_TRACE(::testing::Message() << "window " << window << ", sinks " << sinks);
      const Results results = with_gradients(plain, leaves, grad_out);
      EXPECT_LE(worst_error(results, tree(window)), 1e-12);
      if (0 < window && window < kTokens) {
        EXPECT_GT(worst_error(results, tree(window + 1)), 1e-3);
      }
    }
  }
}

}  // namespace
}  // namespace espalier::testing
