// SPDX-License-Identifier: Apache-2.0
// Recorded routes and losses of routers: the tree run equals per-trajectory training under every plan.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "espalier/base/check.h"
#include "espalier/engine/batch.h"
#include "espalier/engine/forward.h"
#include "espalier/verify/causal_sequence.h"
#include "tests/engine/outcome.h"
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

constexpr Family kWithExperts[] = {Family::kQwen3Moe, Family::kGlm4Moe, Family::kGptOss};
constexpr int kRouterVocabSize = 19;

/// A way of planning, whose token budget depends on the data.
struct WayOfPlanning {
  Strategy strategy;
  CheckpointActivations checkpoints;
  bool small;  // micro-batches as small as can be; otherwise one
};
constexpr WayOfPlanning kWays[] = {
    {Strategy::kPartition, CheckpointActivations::kNone, true},
    {Strategy::kTreePacking, CheckpointActivations::kLayer, false},
    {Strategy::kPartition, CheckpointActivations::kPiece, true},
    {Strategy::kTreePacking, CheckpointActivations::kNone, true},
    {Strategy::kPartition, CheckpointActivations::kLayer, true},
    {Strategy::kSequencePacking, CheckpointActivations::kNone, true},
    {Strategy::kPartition, CheckpointActivations::kNone, false},
};

PlanOptions plan_of(const WayOfPlanning& way, const Trajectories& trajectories, Rng& rng) {
  PlanOptions plan{.strategy = way.strategy, .checkpoint_activations = way.checkpoints};
  if (!way.small) return plan;
  int64_t longest = 1;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    longest = std::max(longest, trajectories.row_size(row));
  }
  plan.token_budget = way.strategy == Strategy::kPartition ? rng.between(1, longest) : longest;
  return plan;
}

/// Random routes that mostly agree where tokens do, [N, of_layers ? layers : routers, top_k]; some rows have
/// none.
void add_routes(const Decoder& decoder, bool of_layers, Rng& rng, Trajectories* trajectories) {
  const RouterShape routers = decoder.routers();
  const int64_t groups = of_layers ? decoder.num_layers() : routers.count();
  std::vector<int32_t> routes;
  for (int64_t row = 0; row < trajectories->num_rows(); ++row) {
    const bool has_routes = rng.below(5) > 0;
    for (int64_t t = 0; t < trajectories->row_size(row); ++t) {
      const bool other = rng.below(20) == 0;
      Rng own(static_cast<uint64_t>(trajectories->row(row)[t]) + (other ? rng.next() : 0), 7);
      for (int64_t group = 0; group < groups; ++group) {
        std::vector<int32_t> experts(routers.experts);
        for (int64_t e = 0; e < routers.experts; ++e) experts[e] = static_cast<int32_t>(e);
        for (int64_t k = 0; k < routers.top_k; ++k) {
          std::swap(experts[k], experts[own.between(k, routers.experts - 1)]);
          routes.push_back(has_routes ? experts[k] : -1);
        }
      }
    }
  }
  trajectories->routed_experts = Column<int32_t>(std::move(routes));
  trajectories->routes_per_token = groups * routers.top_k;
}

struct Case {
  Trajectories trajectories;
  ObjectiveOptions objective;
  PlanOptions plan;
};

Case random_case(const Decoder& decoder, int i, bool with_routes, bool with_losses) {
  Rng rng(test_seed(i), 0x20075);
  Case result;
  result.trajectories = random_trajectories(rng, static_cast<Shape>(i % kNumShapes),
                                            {.vocab_size = decoder.config().vocab_size, .max_length = 24});
  if (with_routes) add_routes(decoder, i % 2 == 0, rng, &result.trajectories);
  if (with_losses) {
    result.objective.router_aux_loss_coef = i % 3 == 0 ? 0 : 0.5 + rng.uniform();
    result.objective.router_z_loss_coef = i % 3 == 1 ? 0 : 0.1 + rng.uniform();
  }
  result.plan = plan_of(kWays[i % std::size(kWays)], result.trajectories, rng);
  return result;
}

void expect_equal(const Decoder& decoder, const Case& given) {
  const Step step = make_step(given.trajectories, {.plan = given.plan, .objective = given.objective});
  const Outcome reference = reference_outcome(decoder, given.trajectories, given.objective);
  const Outcome outcome = tree_outcome(decoder, given.trajectories, step, given.objective);
  ASSERT_LE(loss_error(outcome, reference), kTolerance);
  ASSERT_LE(gradient_error(outcome, reference), kTolerance);
  ASSERT_LE(logprob_error(outcome, reference), kTolerance);
}

TEST(Routers, LossesEqualPerTrajectoryTrainingUnderEveryPlan) {
  for (const Family family : kWithExperts) {
    const Decoder decoder = tiny_decoder(tiny_config(family, kRouterVocabSize), 3);
    for (int i = 0; i < 21; ++i) {
      SCOPED_TRACE(fmt::format("{}, forest {}", to_string(family), i));
      ASSERT_NO_FATAL_FAILURE(expect_equal(decoder, random_case(decoder, i, false, true)));
    }
  }
}

TEST(Routers, RecordedRoutesEqualPerTrajectoryTrainingUnderEveryPlan) {
  for (const Family family : kWithExperts) {
    const Decoder decoder = tiny_decoder(tiny_config(family, kRouterVocabSize), 4);
    for (int i = 21; i < 42; ++i) {
      SCOPED_TRACE(fmt::format("{}, forest {}", to_string(family), i));
      ASSERT_NO_FATAL_FAILURE(expect_equal(decoder, random_case(decoder, i, true, i % 2 == 0)));
    }
  }
}

TEST(Routers, RecordedRoutesAreTaken) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3Moe, kRouterVocabSize), 5);
  const Case given = random_case(decoder, 3, true, false);
  Trajectories without = given.trajectories;
  without.routed_experts = {};
  without.routes_per_token = 0;
  const Outcome with_routes = reference_outcome(decoder, given.trajectories, given.objective);
  EXPECT_GT(gradient_error(reference_outcome(decoder, without, given.objective), with_routes), 1e-3);
}

TEST(NegativeControlRouters, ARouteSharedThatDiffersIsSeen) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3Moe, kRouterVocabSize), 5);
  // The same tokens twice, by different routes, as one path.
  Trajectories trajectories = from_rows({{1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}});
  const Step shared = make_step(trajectories, {});
  const RouterShape routers = decoder.routers();
  std::vector<int32_t> routes;
  for (int64_t token = 0; token < 10; ++token) {
    for (int64_t i = 0; i < routers.count() * routers.top_k; ++i) {
      const int64_t first = token < 5 ? 0 : routers.experts - routers.top_k;
      routes.push_back(static_cast<int32_t>(first + i % routers.top_k));
    }
  }
  trajectories.routed_experts = Column<int32_t>(std::move(routes));
  trajectories.routes_per_token = routers.count() * routers.top_k;
  const Outcome reference = reference_outcome(decoder, trajectories, {});
  EXPECT_LE(gradient_error(tree_outcome(decoder, trajectories, make_step(trajectories, {}), {}), reference),
            kTolerance);
  EXPECT_GT(gradient_error(tree_outcome(decoder, trajectories, shared, {}), reference), 1e-3);
}

/// Gradients of the losses of routers alone, of a forest in one micro-batch.
std::vector<at::Tensor> router_gradients(const Decoder& decoder, const Step& step, const Loss& loss,
                                         bool by_multiplicity) {
  const ObjectiveOptions& options = loss.objective().options();
  Batch batch = make_batch(step, 0, loss);
  set_router_inputs(step, 0, loss.trajectories(), decoder.routers(), &batch);
  if (!by_multiplicity) batch.multiplicity.fill_(1);
  const auto statistics = c10::make_intrusive<RouterStatistics>(
      decoder.routers(), RouterLossOptions{options.router_aux_loss_coef, options.router_z_loss_coef},
      static_cast<int64_t>(batch.multiplicity.sum().item<double>()), decoder.device());
  decoder.zero_gradients();
  statistics->set_counting(true);
  const at::Tensor hidden = forward(decoder, batch, {}, {.router_statistics = statistics}).last;
  torch::autograd::backward({hidden}, {at::zeros_like(hidden)});
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& gradient : decoder.gradients()) {
    if (gradient.defined()) gradients.push_back(gradient.flatten().clone());
  }
  decoder.zero_gradients();
  return gradients;
}

double distance(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return ((at::cat(a) - at::cat(b)).norm() / at::cat(b).norm()).item<double>();
}

TEST(NegativeControlRouters, BalancingWithoutMultiplicityIsSeen) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3Moe, kRouterVocabSize), 6);
  const Trajectories trajectories =
      from_rows({{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 7}, {1, 2, 3, 8, 9}, {4, 4, 4}});
  const Loss loss(trajectories, {.router_aux_loss_coef = 1});
  const Step tree = make_step(trajectories, {});
  const Step flat = make_step(trajectories, {.plan = {.strategy = Strategy::kSequencePacking}});
  const std::vector<at::Tensor> expected = router_gradients(decoder, flat, loss, true);
  EXPECT_LE(distance(router_gradients(decoder, tree, loss, true), expected), kTolerance);
  EXPECT_GT(distance(router_gradients(decoder, tree, loss, false), expected), 1e-3);
}

TEST(Routers, ReportEqualsItsDefinition) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3Moe, kRouterVocabSize), 7);
  const Trajectories trajectories = from_rows({{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 7}, {1, 2, 3, 8, 9}});
  const RouterShape routers = decoder.routers();
  RouterRecord record;
  for (int64_t row = 0; row < trajectories.num_rows(); ++row) {
    const at::Tensor ids = at::tensor(
        std::vector<int64_t>(trajectories.row(row).begin(), trajectories.row(row).end()), at::kLong);
    decoder.forward(ids, at::arange(ids.size(0)), CausalSequence(ids.size(0), {.record = &record}));
  }
  const auto rows = static_cast<double>(routers.count() * trajectories.num_tokens());
  const at::Tensor logits = at::cat(record.logits).detach();
  const at::Tensor counts = at::cat(record.experts).flatten().bincount({}, routers.experts).to(at::kDouble);
  const double aux = (counts * logits.softmax(-1).sum(0)).sum().item<double>() *
                     static_cast<double>(routers.experts) / (rows * rows);
  const double z = logits.logsumexp(-1).square().mean().item<double>();
  for (const WayOfPlanning& way : kWays) {
    Rng rng(test_seed(1), 2);
    const ObjectiveOptions objective{.router_aux_loss_coef = 0.1, .router_z_loss_coef = 0.1};
    const Step step =
        make_step(trajectories, {.plan = plan_of(way, trajectories, rng), .objective = objective});
    const StepResult result = forward_backward(decoder, step, Loss(trajectories, objective));
    ASSERT_TRUE(result.routers);
    EXPECT_NEAR(result.routers->aux_loss, aux, 1e-12 * aux);
    EXPECT_NEAR(result.routers->z_loss, z, 1e-12 * z);
    EXPECT_GE(result.routers->load_max, 1);
    EXPECT_LE(result.routers->load_min, 1);
  }
  decoder.zero_gradients();
}

TEST(Routers, LoadIsRelativeToTheMean) {
  const RouterShape shape{.layers = {0, 2}, .experts = 4, .top_k = 1};
  // Two losses, then the tokens of each expert of both routers.
  const at::Tensor values = at::tensor({0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 2.0, 4.0, 2.0}, at::kDouble);
  const RouterReport report = RouterStatistics::report(values, shape);
  EXPECT_EQ(report.aux_loss, 0.5);
  EXPECT_EQ(report.z_loss, 2);
  EXPECT_EQ(report.load_max, 2);
  EXPECT_EQ(report.load_min, 0);
}

TEST(Routers, ModelsWithoutExpertsReportNothing) {
  const Decoder decoder = tiny_decoder(tiny_config(Family::kQwen3, kRouterVocabSize), 8);
  const Trajectories trajectories = from_rows({{1, 2, 3}});
  EXPECT_FALSE(
      forward_backward(decoder, make_step(trajectories, {}), Loss(trajectories, ObjectiveOptions{})).routers);
  decoder.zero_gradients();
}

std::string routes_error(const Trajectories& trajectories, const RouterShape& routers, int64_t num_layers) {
  try {
    check_recorded_routes("rows.jsonl", trajectories, routers, num_layers);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(Routers, RecordedRoutesThatDoNotFitAreRefused) {
  const RouterShape routers{.layers = {1, 2}, .experts = 4, .top_k = 2};
  Trajectories trajectories = from_rows({{5, 6}});
  const auto error_of = [&](std::vector<int32_t> routes) {
    trajectories.routes_per_token = static_cast<int64_t>(routes.size()) / 2;
    trajectories.routed_experts = Column<int32_t>(std::move(routes));
    return routes_error(trajectories, routers, 3);
  };
  EXPECT_EQ(error_of({0, 1, 2, 3, 3, 2, 1, 0}), "");
  EXPECT_EQ(error_of({0, 0, 2, 3, 3, 2, 0, 0, 1, 0, 0, 2}), "");  // of all layers; the first is not read
  EXPECT_EQ(error_of({-1, -1, -1, -1, -1, -1, -1, -1}), "");
  EXPECT_EQ(error_of({0, 1, 2, 3, 3, 2, 1, 4}),
            "rows.jsonl: row 0: field `routed_experts`, token 1: expected experts from 0 to 3, received 4");
  EXPECT_EQ(error_of({0, 1, 2, 2, 3, 2, 1, 0}),
            "rows.jsonl: row 0: field `routed_experts`, token 0: expected different experts for each router, "
            "received 2 "
            "twice");
  EXPECT_EQ(error_of({0, 1, 2, 3}),
            "rows.jsonl: field `routed_experts`: expected 4 experts for each token (2 of each of 2 routers) "
            "or 6 (of each "
            "layer), received 2");
  EXPECT_EQ(routes_error(trajectories, {}, 3), "");  // a model without experts
}

}  // namespace
}  // namespace espalier::testing
