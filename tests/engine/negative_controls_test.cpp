// SPDX-License-Identifier: Apache-2.0
// What the comparison with per-trajectory training must catch. Each test spoils one thing on the way from the
// trajectories to the loss; the unspoilt way passes at 1e-12.
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "espalier/base/check.h"
#include "espalier/ops/attention/tree_attention.h"
#include "espalier/ops/edge_logprobs/edge_logprobs.h"
#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"
#include "tests/model/tiny_models.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/edge_logprobs/reference.h"

namespace espalier::testing {
namespace {

constexpr double kExact = 1e-12;
constexpr double kCaught = 1e-4;

// Prefix of 5 tokens; three branches, the middle one of which branches again; a duplicate at the end.
//   [1 2 3 4 5] - [6 7 8]
//               - [9 10] - [11 12 13]
//                        - [14 15 16 17]
//               - [3 2 1 0]
constexpr int64_t kPrefixEnd = 5, kFirstEnd = 8, kMiddleEnd = 10, kMiddleSubtreeEnd = 17, kTokens = 21;

class NegativeControls : public ::testing::Test {
 protected:
  NegativeControls()
      : decoder_(tiny_decoder(tiny_config(Family::kQwen3, 19), 5)),
        trajectories_(from_rows({{1, 2, 3, 4, 5, 6, 7, 8},
                                 {1, 2, 3, 4, 5, 9, 10, 11, 12, 13},
                                 {1, 2, 3, 4, 5, 9, 10, 14, 15, 16, 17},
                                 {1, 2, 3, 4, 5, 3, 2, 1, 0},
                                 {1, 2, 3, 4, 5, 6, 7, 8}})),
        step_(make_step(trajectories_, all_rows(trajectories_), {.objective = objective_})),
        reference_(reference_outcome(decoder_, trajectories_, objective_)) {}

  // Worst error of loss and gradients of a step as one micro-batch, after `spoil` has had its way with it.
  template <typename Spoil>
  double error_of(Spoil spoil) const {
    std::vector<Batch> batches = make_batches(trajectories_, step_, objective_);
    EXPECT_EQ(batches.size(), 1u);
    EXPECT_EQ(batches[0].num_tokens(), kTokens);
    spoil(&batches[0]);
    return error_of(batches);
  }

  double error_of(const std::vector<Batch>& batches) const {
    return distance(batch_outcome(decoder_, batches, objective_));
  }

  double error_of(const Step& step) const {
    return distance(tree_outcome(decoder_, trajectories_, step, objective_));
  }

  double distance(const Outcome& outcome) const {
    return std::max(loss_error(outcome, reference_), gradient_error(outcome, reference_));
  }

  // Final hidden states of a batch under the dense reference of the mask, which takes any subtree_end.
  at::Tensor hidden_states(const Batch& batch) const {
    const FunctionSequence sequence(
        [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options) {
          return reference::tree_attention(q, k, v, {batch.subtree_end}, options);
        });
    return decoder_.forward(batch.input_ids, batch.position_ids, sequence);
  }

  // As error_of(spoil), but the attention is the dense reference of whatever mask subtree_end describes.
  template <typename Spoil>
  double dense_error_of(Spoil spoil) const {
    Batch batch = make_batches(trajectories_, step_, objective_)[0];
    spoil(&batch);
    const at::Tensor logprobs =
        reference::edge_logprobs(hidden_states(batch).index_select(0, batch.logit_rows),
                                 decoder_.lm_head().weight, batch.edge_row, batch.edge_target)
            .index_select(0, batch.term_edge);
    const ObjectiveValue value = make_objective(objective_)->value(logprobs, batch.terms, {});
    Outcome outcome;
    outcome.loss = value.loss.item<double>();
    decoder_.zero_gradients();
    torch::autograd::backward({value.loss}, {});
    outcome.gradients = decoder_.gradients();
    return distance(outcome);
  }

  static void shift_ends(Batch* batch, int64_t begin, int64_t end, int64_t shift) {
    batch->subtree_end = batch->subtree_end.clone();
    batch->subtree_end.slice(0, begin, end).add_(shift);
  }

  Decoder decoder_;
  ObjectiveOptions objective_;
  Trajectories trajectories_;
  Step step_;
  Outcome reference_;
};

TEST_F(NegativeControls, TheUnspoiltWayPasses) {
  EXPECT_LE(error_of([](Batch*) {}), kExact);
  EXPECT_LE(dense_error_of([](Batch*) {}), kExact);
  EXPECT_LE(error_of(step_), kExact);
}

TEST_F(NegativeControls, MaskOneTooFarIsCaught) {
  // The next branch's first token sees this branch.
  const auto spoil = [](Batch* batch) { shift_ends(batch, kPrefixEnd, kFirstEnd, 1); };
  EXPECT_GT(dense_error_of(spoil), kCaught);
  // No forest has such a mask, and the op says so.
  EXPECT_ANY_THROW(error_of(spoil));
}

TEST_F(NegativeControls, MaskOneShortIsCaught) {
  // The last token of a subtree misses its prefix. It predicts nothing, so that only its own output can tell.
  Batch batch = make_batches(trajectories_, step_, objective_)[0];
  const at::Tensor before = hidden_states(batch);
  shift_ends(&batch, 0, kPrefixEnd, -1);
  const at::Tensor change = (hidden_states(batch) - before).norm(2, {1});
  EXPECT_GT(change[kTokens - 1].item<double>(), kCaught);
  EXPECT_EQ(change.slice(0, 0, kTokens - 1).max().item<double>(), 0);
  // One more short, and the loss tells.
  EXPECT_GT(dense_error_of([](Batch* spoilt) { shift_ends(spoilt, 0, kPrefixEnd, -2); }), kCaught);
  // In the middle of the forest, the inner node's branch is cut off from it.
  EXPECT_GT(dense_error_of([](Batch* spoilt) { shift_ends(spoilt, kFirstEnd, kMiddleEnd, -2); }), kCaught);
}

TEST_F(NegativeControls, ASiblingLeakingIsCaught) {
  // The first branch becomes an ancestor of its sibling.
  const auto leak = [](Batch* batch) {
    batch->subtree_end = batch->subtree_end.clone();
    batch->subtree_end.slice(0, kPrefixEnd, kFirstEnd).fill_(kMiddleSubtreeEnd);
  };
  EXPECT_GT(error_of(leak), kCaught);
  EXPECT_GT(dense_error_of(leak), kCaught);
}

TEST_F(NegativeControls, IsolationIsLostWhenASiblingLeaks) {
  Batch batch = make_batches(trajectories_, step_, objective_)[0];
  const Layout layout = make_layout(step_.forest, step_.plan.micro_batches[0].runs);
  const auto is_isolated = [&](int64_t placement) {
    const int64_t run = step_.plan.micro_batches[0].trajectories[placement].run;
    return isolated(decoder_, {{batch}, {path_tokens(layout, run)}}, path_logprobs(decoder_, {batch}), 7);
  };
  for (const int64_t placement : {0, 1, 2, 3, 4}) EXPECT_TRUE(is_isolated(placement));
  batch.subtree_end = batch.subtree_end.clone();
  batch.subtree_end.slice(0, kPrefixEnd, kFirstEnd).fill_(kMiddleSubtreeEnd);
  EXPECT_TRUE(is_isolated(0));  // what leaks, sees nothing of the others itself
  EXPECT_FALSE(is_isolated(1));
  EXPECT_FALSE(is_isolated(2));
  EXPECT_TRUE(is_isolated(3));
}

TEST_F(NegativeControls, EveryDroppedEdgeIsCaught) {
  const Step whole = step_;
  for (int64_t k = 0; k < whole.terms.num_rows(); ++k) {
    for (int64_t dropped = 0; dropped < whole.terms.row_size(k); ++dropped) {
      SCOPED_TRACE(fmt::format("trajectory {}, term {}", k, dropped));
      Step spoilt = whole;
      spoilt.terms = {};
      for (int64_t other = 0; other < whole.terms.num_rows(); ++other) {
        for (int64_t t = 0; t < whole.terms.row_size(other); ++t) {
          if (other != k || t != dropped) spoilt.terms.values.push_back(whole.terms.row(other)[t]);
        }
        spoilt.terms.end_row();
      }
      EXPECT_GT(error_of(spoilt), kCaught);
    }
  }
}

TEST_F(NegativeControls, DroppedFirstTokensOfBranchesAreCaught) {
  // The edges whose target starts a node: what a trainer loses that cuts labels at the branch.
  Step spoilt = step_;
  spoilt.terms = {};
  const int64_t branch_positions[] = {5, 7};
  int64_t dropped = 0;
  for (int64_t k = 0; k < step_.terms.num_rows(); ++k) {
    for (const Term& term : step_.terms.row(k)) {
      const bool starts_node = term.position == branch_positions[0] ||
                               (term.position == branch_positions[1] && (k == 1 || k == 2));
      dropped += starts_node;
      if (!starts_node) spoilt.terms.values.push_back(term);
    }
    spoilt.terms.end_row();
  }
  EXPECT_EQ(dropped, 7);
  EXPECT_GT(error_of(spoilt), kCaught);
}

TEST_F(NegativeControls, PositionsInLayoutOrderAreCaught) {
  EXPECT_GT(error_of([](Batch* batch) { batch->position_ids = at::arange(kTokens, at::kLong); }), kCaught);
  // One branch alone is enough, and so is one token of it that predicts something.
  EXPECT_GT(error_of([](Batch* batch) {
              batch->position_ids = batch->position_ids.clone();
              batch->position_ids.slice(0, kMiddleSubtreeEnd, kTokens).add_(1);
            }),
            kCaught);
  EXPECT_GT(error_of([](Batch* batch) {
              batch->position_ids = batch->position_ids.clone();
              batch->position_ids.slice(0, kMiddleSubtreeEnd, kMiddleSubtreeEnd + 1).add_(1);
            }),
            kCaught);
}

TEST_F(NegativeControls, EdgesFromTheTokenBeforeInLayoutOrderAreCaught) {
  // The first token of a later branch predicted by the last token of the branch before it.
  EXPECT_GT(error_of([](Batch* batch) {
              std::vector<int64_t> rows;
              for (const int64_t token : batch->edge_token) rows.push_back(token - 1);
              batch->logit_rows = at::arange(kTokens, at::kLong);
              batch->edge_row = at::tensor(rows, at::kLong);
              const auto [sorted, order] = batch->edge_row.sort();
              batch->edge_row = sorted;
              batch->edge_target = batch->edge_target.index_select(0, order);
              batch->term_edge = order.argsort().index_select(0, batch->term_edge);
            }),
            kCaught);
}

TEST_F(NegativeControls, AMeanOfMeansIsCaught) {
  const PlanOptions cut{Strategy::kTreePacking, 11};
  const Step step = make_step(trajectories_, all_rows(trajectories_), {.plan = cut, .objective = objective_});
  std::vector<Batch> batches = make_batches(trajectories_, step, objective_);
  ASSERT_GT(batches.size(), 1u);
  EXPECT_LE(error_of(batches), kExact);
  for (Batch& batch : batches) {
    const double share = batch.terms.coefficient.sum().item<double>() * static_cast<double>(batches.size());
    batch.terms.coefficient = batch.terms.coefficient / share;
  }
  EXPECT_GT(error_of(batches), kCaught);
}

TEST_F(NegativeControls, SharedTargetsMixedUpAreCaught) {
  ObjectiveOptions once = objective_;
  once.shared_targets = SharedTargets::kOnce;
  const Step step = make_step(trajectories_, all_rows(trajectories_), {.objective = once});
  EXPECT_GT(error_of(step), kCaught);
  const Outcome truth = reference_outcome(decoder_, trajectories_, once);
  EXPECT_LE(gradient_error(tree_outcome(decoder_, trajectories_, step, once), truth), kExact);
  EXPECT_GT(gradient_error(reference_, truth), kCaught);
}

TEST_F(NegativeControls, ADroppedDuplicateIsCaught) {
  EXPECT_GT(error_of(make_step(trajectories_, {0, 1, 2, 3}, {.objective = objective_})), kCaught);
  EXPECT_LE(error_of(make_step(trajectories_, {4, 2, 3, 1, 0}, {.objective = objective_})), kExact);
}

TEST_F(NegativeControls, AWrongTargetIsCaught) {
  EXPECT_GT(error_of([](Batch* batch) {
              batch->edge_target = batch->edge_target.clone();
              batch->edge_target[0] = (batch->edge_target[0] + 1) % 19;
            }),
            kCaught);
}

TEST_F(NegativeControls, AGradientCollectedTwiceIsCaught) {
  std::vector<Batch> batches = make_batches(trajectories_, step_, objective_);
  batches.push_back(batches[0]);
  EXPECT_GT(error_of(batches), kCaught);
}

}  // namespace
}  // namespace espalier::testing
