// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/batch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "espalier/base/check.h"
#include "espalier/plan/partition.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

std::vector<int64_t> ints(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kLong).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

std::vector<double> reals(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

using Ints = std::vector<int64_t>;
using Reals = std::vector<double>;

// [7 8] - [1 2]      layout: 7 8 1 2 3 4, the third row ends inside the tree
//       - [3 4]
Trajectories branching() {
  TrajectoriesBuilder builder;
  builder.append(
      {.input_ids = {7, 8, 1, 2}, .loss_weights = {9, 0, 1, 2}, .logprobs = {0, -1, -2, -3}, .advantage = 5});
  builder.append({.input_ids = {7, 8, 3, 4}, .loss_weights = {0, 0.5, 3, 0}, .advantages = {6, 7, 8, 9}});
  builder.append({.input_ids = {7, 8}, .loss_weights = {0, 1.5}, .logprobs = {0, -4}, .advantage = -1});
  return builder.finish();
}

ObjectiveOptions grpo_summed() {
  return {.kind = ObjectiveKind::kGrpo, .normalize = Normalize::kConstant, .normalize_constant = 1};
}

TEST(Batch, HasTheTokensTheMaskAndOnlyTheEdgesWithLoss) {
  const Trajectories trajectories = branching();
  const Step step = make_step(trajectories, {0, 1, 2}, {.objective = grpo_summed()});
  ASSERT_EQ(step.plan.micro_batches.size(), 1u);
  EXPECT_EQ(step.flat_tokens(), 10);
  const Batch batch = make_batch(step, 0, Loss(trajectories, grpo_summed()));
  EXPECT_EQ(ints(batch.input_ids), (Ints{7, 8, 1, 2, 3, 4}));
  EXPECT_EQ(ints(batch.position_ids), (Ints{0, 1, 2, 3, 2, 3}));
  EXPECT_EQ(ints(batch.subtree_end), (Ints{6, 6, 4, 4, 6, 6}));
  EXPECT_EQ(batch.subtree_end.scalar_type(), at::kInt);
  // Edges by the row that predicts: 7 -> 8, 8 -> 1, 8 -> 3, 1 -> 2. Token 4 carries no loss.
  EXPECT_EQ(ints(batch.logit_rows), (Ints{0, 1, 2}));
  EXPECT_EQ(ints(batch.edge_row), (Ints{0, 1, 1, 2}));
  EXPECT_EQ(ints(batch.edge_target), (Ints{8, 1, 3, 2}));
  EXPECT_EQ(batch.edge_token, (Ints{1, 2, 4, 3}));
}

TEST(Batch, ExpandsEdgesToTheTermsOfEveryTrajectory) {
  const Trajectories trajectories = branching();
  const Step step = make_step(trajectories, {0, 1, 2}, {.objective = grpo_summed()});
  const Batch batch = make_batch(step, 0, Loss(trajectories, grpo_summed()));
  // Row 0: tokens 2, 3; row 1: tokens 1, 2; row 2: token 1. Weights of first tokens never count.
  EXPECT_EQ(batch.term_token, (Ints{2, 3, 5, 6, 9}));
  EXPECT_EQ(ints(batch.term_edge), (Ints{1, 3, 0, 2, 0}));
  EXPECT_EQ(reals(batch.terms.coefficient), (Reals{1, 2, 0.5, 3, 1.5}));
  ASSERT_EQ(batch.terms.columns.size(), 2u);
  EXPECT_EQ(reals(batch.terms.columns[0]), (Reals{5, 5, 7, 8, -1}));
  const Reals old_logprobs = reals(batch.terms.columns[1]);
  EXPECT_EQ(old_logprobs[0], -2);
  EXPECT_EQ(old_logprobs[1], -3);
  EXPECT_TRUE(std::isnan(old_logprobs[2]) && std::isnan(old_logprobs[3]));  // row 1 has none
  EXPECT_EQ(old_logprobs[4], -4);
  EXPECT_EQ(batch.terms.coefficient.scalar_type(), at::kDouble);
}

TEST(Batch, SftNeedsNoAdvantages) {
  const Trajectories trajectories = branching();
  const ObjectiveOptions sft;
  const Step step = make_step(trajectories, {0, 1, 2}, {.objective = sft});
  const Batch batch = make_batch(step, 0, Loss(trajectories, sft));
  EXPECT_TRUE(batch.terms.columns.empty());
  EXPECT_EQ(reals(batch.terms.coefficient), (Reals{1.0 / 8, 2.0 / 8, 0.5 / 8, 3.0 / 8, 1.5 / 8}));
}

TEST(Batch, RowsKeepTheirOwnColumnsInAnyOrder) {
  const Trajectories trajectories = branching();
  const ObjectiveOptions objective = grpo_summed();
  const Step step = make_step(trajectories, {2, 0}, {.objective = objective});
  const Batch batch = make_batch(step, 0, Loss(trajectories, objective));
  EXPECT_EQ(ints(batch.input_ids), (Ints{7, 8, 1, 2}));
  EXPECT_EQ(batch.term_token, (Ints{9, 2, 3}));
  EXPECT_EQ(reals(batch.terms.columns[1]), (Reals{-4, -2, -3}));
}

TEST(Batch, EdgesAscendByRowWhereBranchesComeLate) {
  // A branch at token 1 whose later child is laid out after a deep first child.
  const Trajectories trajectories = from_rows({{5, 1, 1, 1, 1}, {5, 1, 2}, {5, 3}});
  const Step step = make_step(trajectories, {0, 1, 2}, {});
  const Batch batch = make_batch(step, 0, Loss(trajectories, ObjectiveOptions{}));
  EXPECT_EQ(ints(batch.input_ids), (Ints{5, 1, 1, 1, 1, 2, 3}));
  EXPECT_EQ(ints(batch.logit_rows), (Ints{0, 1, 2, 3}));
  EXPECT_EQ(ints(batch.edge_row), (Ints{0, 0, 1, 1, 2, 3}));
  EXPECT_EQ(ints(batch.edge_target), (Ints{1, 3, 1, 2, 1, 1}));
  EXPECT_EQ(batch.edge_token, (Ints{1, 6, 2, 5, 3, 4}));
  EXPECT_EQ(ints(batch.term_edge), (Ints{0, 2, 4, 5, 0, 3, 1}));
}

TEST(Batch, SplitTreesCountEveryTermOnce) {
  const Trajectories trajectories = from_rows({{5, 1, 1, 1}, {5, 1, 2, 2}, {5, 3, 3, 3}});
  const Step step = make_step(trajectories, {0, 1, 2}, {.plan = {Strategy::kTreePacking, 4}});
  ASSERT_GT(step.plan.micro_batches.size(), 1u);
  Ints tokens;
  double sum = 0;
  for (size_t m = 0; m < step.plan.micro_batches.size(); ++m) {
    const Batch batch = make_batch(step, static_cast<int64_t>(m), Loss(trajectories, ObjectiveOptions{}));
    tokens.insert(tokens.end(), batch.term_token.begin(), batch.term_token.end());
    sum += batch.terms.coefficient.sum().item<double>();
  }
  std::sort(tokens.begin(), tokens.end());
  EXPECT_EQ(tokens, (Ints{1, 2, 3, 5, 6, 7, 9, 10, 11}));
  EXPECT_NEAR(sum, 1, 1e-15);
}

TEST(Batch, EdgesOverACutBelongToTheMicroBatchOfTheirSource) {
  const Trajectories trajectories = from_rows({{5, 1, 1, 1}, {5, 1, 2, 2}});
  Step step = make_step(trajectories, {0, 1}, {});
  // 5 1 | 1 1 and 2 2: the prefix predicts the first token of either branch.
  const std::vector<int64_t> cuts{2, 4};
  set_plan(&step, {{.strategy = Strategy::kPartition}, partition_at(step.forest, cuts, 2, Merge::kNone)});
  ASSERT_EQ(step.plan.micro_batches.size(), 3u);
  const Batch prefix = make_batch(step, 0, Loss(trajectories, ObjectiveOptions{}));
  EXPECT_EQ(ints(prefix.edge_row), (Ints{0, 1, 1}));
  EXPECT_EQ(ints(prefix.edge_target), (Ints{1, 1, 2}));
  EXPECT_EQ(prefix.edge_token, (Ints{1, -1, -1}));
  EXPECT_EQ(prefix.term_token, (Ints{1, 2, 5, 6}));
  EXPECT_TRUE(prefix.ancestors.empty());
  const Batch branch = make_batch(step, 2, Loss(trajectories, ObjectiveOptions{}));
  EXPECT_EQ(ints(branch.position_ids), (Ints{2, 3}));
  EXPECT_EQ(branch.term_token, (Ints{7}));
  EXPECT_EQ(branch.ancestors, (Ints{0}));
  EXPECT_EQ(ints(branch.context_blocks), (Ints{0, 0, 2, 0, 2}));
}

TEST(Batch, DifferentExpertRoutesAreNotShared) {
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {5, 1, 2}, .routed_experts = {0, 1, 2}});
  builder.append({.input_ids = {5, 1, 2}, .routed_experts = {0, 3, 2}});
  builder.append({.input_ids = {5, 1, 2}, .routed_experts = {0, 1, 2}});
  const Trajectories trajectories = builder.finish();
  EXPECT_EQ(forest_of(trajectories, {}).tree_tokens(), 5);
}

// What the nodes say of every token, against the forest: the token before it, wherever that is.
void expect_nodes_of_the_forest(const Step& step, const Loss& loss) {
  std::vector<Layout> layouts;
  std::vector<Batch> batches;
  for (int64_t m = 0; m < static_cast<int64_t>(step.plan.micro_batches.size()); ++m) {
    layouts.push_back(make_micro_batch_layout(step.forest, step.plan.micro_batches[m]));
    batches.push_back(make_batch(step, m, loss));
    const Layout& layout = layouts.back();
    const NodeStructure& nodes = *batches.back().nodes;
    ASSERT_EQ(nodes.num_tokens(), layout.num_tokens());
    for (int64_t n = 0; n < nodes.num_nodes(); ++n) {
      for (int64_t t = nodes.begin[n]; t < nodes.begin[n + 1]; ++t) {
        const int64_t before = token_before(step.forest, layout.forest_token[t]);
        if (nodes.prev[t] >= 0) {
          EXPECT_EQ(layout.forest_token[nodes.prev[t]], before);
        } else if (nodes.prev[t] == -1) {
          EXPECT_EQ(before, -1);
        } else {
          const int64_t parent = step.plan.micro_batches[m].parent;
          ASSERT_EQ(batches[m].ancestors.back(), parent);
          const NodeStructure& above = *batches[parent].nodes;
          const int64_t last = above.begin[above.cuts.at(-2 - nodes.prev[t]) + 1] - 1;
          EXPECT_EQ(layouts[parent].forest_token[last], before);
        }
      }
    }
    for (int64_t level = 0; level < nodes.levels.num_rows(); ++level) {
      for (const int64_t n : nodes.levels.row(level)) {
        const int64_t parent = nodes.parent[n];
        const auto above = level == 0 ? std::span<const int64_t>{} : nodes.levels.row(level - 1);
        EXPECT_EQ(parent >= 0, std::ranges::find(above, parent) != above.end());
      }
    }
    EXPECT_EQ(static_cast<int64_t>(nodes.levels.values.size()), nodes.num_nodes());
  }
}

TEST(Batch, NodesAreThoseOfTheForestUnderEveryPlan) {
  for (uint64_t trial = 0; trial < 30; ++trial) {
    const uint64_t seed = test_seed(trial);
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(seed);
    const Trajectories trajectories = random_trajectories(rng, static_cast<Shape>(trial % kNumShapes), {});
    const Loss loss(trajectories, ObjectiveOptions{});
    for (const Strategy strategy :
         {Strategy::kPartition, Strategy::kTreePacking, Strategy::kAppendOnly, Strategy::kSequencePacking}) {
      for (const int64_t token_budget : {0, 1, 4}) {
        const PlanOptions plan{strategy, strategy == Strategy::kPartition ? token_budget : 0};
        expect_nodes_of_the_forest(make_step(trajectories, all_rows(trajectories), {.plan = plan}), loss);
      }
    }
  }
}

}  // namespace
}  // namespace espalier::testing
