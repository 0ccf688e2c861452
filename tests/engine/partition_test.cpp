// SPDX-License-Identifier: Apache-2.0
// Training in pieces: cut anywhere, gradients stay those of per-trajectory training and no token is encoded
// twice.
#include "espalier/plan/partition.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "espalier/base/check.h"
#include "espalier/engine/forward.h"
#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

void set_cuts(Step* step, std::span<const int64_t> cuts, int64_t token_budget, Merge merge,
              PlanOptions options = {}) {
  options.strategy = Strategy::kPartition;
  options.token_budget = token_budget;
  set_plan(step, {options, partition_at(step->forest, cuts, token_budget, merge)});
}

/// Cuts at the bits of `mask`: bit i stands for forest token i + 1.
std::vector<int64_t> cuts_of(uint64_t mask) {
  std::vector<int64_t> cuts;
  for (int64_t i = 0; mask >> i != 0; ++i) {
    if ((mask >> i & 1) != 0) cuts.push_back(i + 1);
  }
  return cuts;
}

struct Small {
  const char* name;
  std::vector<std::vector<int32_t>> rows;
};

const Small kSmall[] = {
    {"chain with an end inside", {{1, 2, 3, 4, 5, 6}, {1, 2, 3}}},
    {"branches at two depths", {{1, 2, 3, 4}, {1, 2, 3, 5}, {1, 2, 6}, {1, 2, 3, 5}}},
    {"two trees", {{1, 2, 3}, {1, 4, 4}, {7, 8}}},
    {"star of single tokens", {{1, 2, 3}, {1, 2, 4}, {1, 2, 5}, {1, 2}, {1, 2, 6}}},
};

TEST(Partition, CutAtEveryPossiblePlace) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, 19), 5);
  int64_t tried = 0;
  double worst = 0;
  for (const Small& small : kSmall) {
    const Trajectories trajectories = from_rows(small.rows);
    Step step = make_step(trajectories, all_rows(trajectories), {});
    const Outcome reference = reference_outcome(decoder, trajectories, {});
    const int64_t tokens = step.forest.tree_tokens();
    for (uint64_t mask = 0; mask < uint64_t{1} << (tokens - 1); ++mask) {
      SCOPED_TRACE(fmt::format("{}, cuts {:b}", small.name, mask));
      // The way of merging and of recomputing takes turns, so that all meet all cuts somewhere.
      PlanOptions options;
      options.checkpoint_activations = static_cast<CheckpointActivations>(mask % 3);
      options.offload_context =
          options.checkpoint_activations == CheckpointActivations::kPiece && mask % 2 == 0;
      set_cuts(&step, cuts_of(mask), tokens, static_cast<Merge>(mask / 3 % 3), options);
      const Outcome outcome = tree_outcome(decoder, trajectories, step, {});
      worst = std::max({worst, loss_error(outcome, reference), gradient_error(outcome, reference)});
      ASSERT_LE(loss_error(outcome, reference), kTolerance);
      ASSERT_LE(gradient_error(outcome, reference), kTolerance);
      ASSERT_LE(logprob_error(outcome, reference), kTolerance);
      ++tried;
    }
  }
  std::printf("%lld sets of cuts, worst error %.2g\n", static_cast<long long>(tried), worst);
}

TEST(Partition, EncodesEveryTokenOnce) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kLlama, 19), 3);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(test_seed(seed), 77);
    Trajectories trajectories = random_trajectories(rng, static_cast<Shape>(seed % kNumShapes), {});
    const auto tokens = static_cast<size_t>(trajectories.num_tokens());
    trajectories.loss_weights = Column<uint8_t>(std::vector<uint8_t>(tokens, 1));
    const int64_t budget = rng.between(1, 30);
    const Step step =
        make_step(trajectories, all_rows(trajectories), {.plan = {Strategy::kPartition, budget}});
    // A leaf of one token predicts nothing and need not run.
    int64_t needed = 0;
    const std::vector<bool> with_loss = micro_batches_with_loss(step);
    for (size_t m = 0; m < with_loss.size(); ++m) {
      if (with_loss[m]) needed += step.plan.micro_batches[m].num_tokens;
    }
    decoder.zero_gradients();
    const StepResult result = forward_backward(decoder, step, Loss(trajectories, ObjectiveOptions{}));
    EXPECT_EQ(step.plan.num_tokens(), step.forest.tree_tokens());
    EXPECT_EQ(result.work.tokens, needed);
    EXPECT_EQ(result.recomputed.tokens, 0);
    EXPECT_EQ(result.terms, step.flat_tokens() - trajectories.num_rows());
    if (budget >= step.forest.tree_tokens()) {
      EXPECT_EQ(result.work.tokens, step.forest.tree_tokens());
    }
    EXPECT_LE(step.forest.tree_tokens() - result.work.tokens, step.forest.num_nodes());
  }
}

TEST(Partition, RecomputedActivationsAreTheSameBitForBit) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen2, 19), 4, at::kFloat);
  Rng rng(test_seed(3), 78);
  const Trajectories trajectories = random_trajectories(rng, Shape::kDeep, {});
  const auto run = [&](CheckpointActivations checkpoint, bool offload, int64_t* recomputed) {
    const Step step = make_step(trajectories, all_rows(trajectories),
                                {.plan = {Strategy::kPartition, 9, checkpoint, offload}});
    EXPECT_GE(step.plan.micro_batches.size(), 3u);
    decoder.zero_gradients();
    *recomputed = forward_backward(decoder, step, Loss(trajectories, ObjectiveOptions{})).recomputed.tokens;
    std::vector<at::Tensor> sums;
    for (const at::Tensor& sum : decoder.gradients()) sums.push_back(sum.clone());
    return sums;
  };
  int64_t none = 0, layer = 0, piece = 0, offloaded = 0;
  const auto expected = run(CheckpointActivations::kNone, false, &none);
  const auto by_layer = run(CheckpointActivations::kLayer, false, &layer);
  const auto by_piece = run(CheckpointActivations::kPiece, false, &piece);
  const auto from_host = run(CheckpointActivations::kPiece, true, &offloaded);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(expected[i], by_layer[i])) << i;
    EXPECT_TRUE(at::equal(expected[i], by_piece[i])) << i;
    // Sums over descendants are added in another order.
    EXPECT_LE((expected[i] - from_host[i]).norm().item<double>(), 1e-6 * expected[i].norm().item<double>());
  }
  EXPECT_EQ(none, 0);
  EXPECT_GT(layer, piece);
  EXPECT_GT(piece, 0);
  EXPECT_EQ(piece, offloaded);
}

TEST(Partition, LowPrecisionContextGradientsAreSummedInFloat32) {
  // 1 and then 256 times 2^-9: a bfloat16 sum would stay at 1.
  const at::Tensor live = at::ones({1, 1}, at::kBFloat16).requires_grad_();
  for (const bool offload : {false, true}) {
    ContextFrame frame({{live}}, offload);
    for (int reader = 0; reader <= 256; ++reader) {
      const double gradient = reader == 0 ? 1 : 0x1p-9;
      torch::autograd::backward({(frame.leaves(0)[0] * gradient).sum()}, {});
      frame.collect();
    }
    std::vector<at::Tensor> tensors, gradients;
    frame.append_seeds({{live}}, &tensors, &gradients);
    ASSERT_EQ(gradients.size(), 1u);
    EXPECT_EQ(gradients[0].scalar_type(), at::kBFloat16);
    EXPECT_EQ(gradients[0].item<float>(), 1.5f);
  }
}

// The interface is not about attention: a recurrence h_t = a h_(t-1) + x_t w over a tree, whose pieces hand
// on their last states, through the same frames.
TEST(Partition, FramesCarryRecurrentStates) {
  const auto options = at::TensorOptions(at::kDouble);
  const at::Tensor x = at::randn({4, 3}, options), seeds = at::randn({4, 3}, options);
  // A trunk of tokens 0, 1 with two branches: token 2 and token 3.
  const auto scan = [](const at::Tensor& state, const at::Tensor& inputs, const at::Tensor& a,
                       const at::Tensor& w) {
    std::vector<at::Tensor> states;
    for (int64_t t = 0; t < inputs.size(0); ++t) {
      states.push_back((t == 0 ? state : states.back()) * a + inputs[t] * w);
    }
    return at::stack(states);
  };
  const auto parameters = [&] {
    return std::vector<at::Tensor>{at::full({3}, 0.7, options).requires_grad_(),
                                   at::full({3}, 1.3, options).requires_grad_()};
  };
  const at::Tensor start = at::zeros({3}, options);

  const auto whole = parameters();
  for (const int64_t branch : {2, 3}) {
    const at::Tensor index = at::tensor({int64_t{0}, int64_t{1}, branch});
    const at::Tensor states = scan(start, x.index_select(0, index), whole[0], whole[1]);
    // The trunk's own seeds count once.
    const at::Tensor weight = at::ones({3, 1}, options);
    if (branch == 3) weight.slice(0, 0, 2).zero_();
    torch::autograd::backward({(states * seeds.index_select(0, index) * weight).sum()}, {});
  }

  const auto pieces = parameters();
  const at::Tensor trunk = scan(start, x.slice(0, 0, 2), pieces[0], pieces[1]);
  const std::vector<LayerContext> live{{trunk[1]}};
  ContextFrame frame(live, false);
  for (const int64_t branch : {2, 3}) {
    const at::Tensor states = scan(frame.leaves(0)[0], x.slice(0, branch, branch + 1), pieces[0], pieces[1]);
    torch::autograd::backward({(states * seeds.slice(0, branch, branch + 1)).sum()}, {});
    frame.collect();
  }
  std::vector<at::Tensor> tensors{(trunk * seeds.slice(0, 0, 2)).sum()}, gradients{at::ones({}, options)};
  frame.append_seeds(live, &tensors, &gradients);
  torch::autograd::backward(tensors, gradients);
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_LE((whole[i].grad() - pieces[i].grad()).norm().item<double>(), 1e-14);
  }
}

class PartitionControls : public ::testing::Test {
 protected:
  void SetUp() override {
    step_ = make_step(trajectories_, all_rows(trajectories_), {});
    const std::vector<int64_t> cuts{2, 4};
    set_cuts(&step_, cuts, 20, Merge::kNone);
    ASSERT_EQ(step_.plan.micro_batches.size(), 3u);
  }
  double error() const {
    return gradient_error(tree_outcome(decoder_, trajectories_, step_, {}), reference_);
  }

  const Trajectories trajectories_ = from_rows({{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 7}});
  const Decoder decoder_ = tiny_decoder(tiny_config(Family::kLlama, 19), 6);
  const Outcome reference_ = reference_outcome(decoder_, trajectories_, {});
  Step step_;
};

TEST_F(PartitionControls, FaultsInTheContextAreCaught) {
  constexpr double kCaught = 1e-6;
  ASSERT_LE(error(), kTolerance);
  const Csr<ContextBlock> right = step_.context;
  ASSERT_EQ(right.values.size(), 3u);
  for (size_t piece = 0; piece < right.values.size(); ++piece) {
    SCOPED_TRACE(fmt::format("piece {}", piece));
    step_.context = right;
    --step_.context.values[piece].column_end;  // a key is missing
    EXPECT_GT(error(), kCaught);
    if (right.values[piece].row_end - right.values[piece].row_begin > 1) {
      step_.context = right;
      ++step_.context.values[piece].row_begin;  // one query does not see it
      EXPECT_GT(error(), kCaught);
    }
  }
}

TEST_F(PartitionControls, FaultsInTheTermsAreCaught) {
  step_.plan.micro_batches[0].trajectories.pop_back();  // an edge over a cut, and those before it, lost
  EXPECT_GT(error(), 1e-6);
}

// Pieces 1 2, 3 4 7 and 5 6: 7 is a neighbour of the first trajectory in an ancestor of where it ends.
TEST_F(PartitionControls, NeighboursInAncestorsDoNotLeak) {
  step_.terms = all_terms(trajectories_, step_.rows);
  PathBatches path;
  for (const int64_t m : {0, 1, 2}) {
    path.batches.push_back(make_batch(step_, m, Loss(trajectories_, ObjectiveOptions{})));
    path.paths.push_back({0, 1});
  }
  ASSERT_EQ(path.batches[1].num_tokens(), 3);
  const auto before = path_logprobs(decoder_, path.batches);
  EXPECT_TRUE(isolated(decoder_, path, before, 1));
  PathBatches shorter = path;
  shorter.paths[1] = {1};  // token 3 is changed as well, and the path sees it
  EXPECT_FALSE(isolated(decoder_, shorter, before, 1));
  // The neighbour becomes an ancestor.
  path.batches[2].context_blocks = path.batches[2].context_blocks.clone();
  path.batches[2].context_blocks[1][2] += 1;
  EXPECT_FALSE(isolated(decoder_, path, path_logprobs(decoder_, path.batches), 1));
}

}  // namespace
}  // namespace espalier::testing
