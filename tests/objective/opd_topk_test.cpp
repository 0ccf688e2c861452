// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/objective.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "espalier/base/check.h"
#include "espalier/data/builder.h"
#include "espalier/objective/loss.h"
#include "tests/base/message_of.h"
#include "tests/test_seed.h"

namespace espalier::testing {
namespace {

// Places with logits of a student and a teacher over a small vocabulary.
struct Places {
  at::Tensor student, teacher;  // [M, V] logits, float64; the student's require gradients
  at::Tensor coefficient;       // [M]

  explicit Places(uint64_t seed, int64_t num_places = 7, int64_t vocabulary = 11) {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU).clone();
    generator.set_current_seed(test_seed(seed));
    const auto random = [&](at::IntArrayRef shape) { return at::randn(shape, generator, at::kDouble); };
    student = (2 * random({num_places, vocabulary})).requires_grad_();
    teacher = 2 * random({num_places, vocabulary});
    coefficient = random({num_places}).abs();
  }

  // The teacher's `width` most likely tokens, in any order.
  TermTensors terms(int64_t width) const {
    const at::Tensor of_teacher = teacher.log_softmax(-1);
    const at::Tensor ids = std::get<1>(of_teacher.topk(width, -1)).flip(-1);
    return {coefficient, {}, student.log_softmax(-1).gather(1, ids), of_teacher.gather(1, ids)};
  }

  // KL(student | teacher) over the whole vocabulary.
  at::Tensor divergence() const {
    const at::Tensor p = student.log_softmax(-1), q = teacher.log_softmax(-1);
    return (coefficient * (p.exp() * (p - q)).sum(-1)).sum();
  }
};

ObjectiveValue value_of(RefTopk ref_topk, const TermTensors& terms) {
  const auto objective = make_objective({.kind = ObjectiveKind::kOpd, .ref_topk = ref_topk});
  return objective->value(at::zeros_like(terms.coefficient), terms, {});
}

at::Tensor gradient(const at::Tensor& loss, const Places& places) {
  return torch::autograd::grad({loss}, {places.student})[0];
}

double worst(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(OpdTopk, OfTheWholeVocabularyIsTheDivergence) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const Places places(seed);
    const at::Tensor expected = places.divergence();
    const at::Tensor expected_gradient = gradient(places.divergence(), places);
    for (const RefTopk ref_topk : {RefTopk::kRest, RefTopk::kRenormalize}) {
      const at::Tensor loss = value_of(ref_topk, places.terms(11)).loss;
      EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
      // With `rest` the rest is 0, which counts as 1e-8 on both sides.
      EXPECT_LE(worst(gradient(loss, places), expected_gradient), 1e-12);
    }
  }
}

TEST(OpdTopk, EqualsTheFormulaAndItsGradient) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const Places places(seed);
    for (const int64_t width : {1, 3, 10}) {
      for (const RefTopk ref_topk : {RefTopk::kRest, RefTopk::kRenormalize}) {
        const TermTensors terms = places.terms(width);
        // Separate terms, since a graph is gone after its backward pass.
        const ObjectiveValue value = value_of(ref_topk, places.terms(width));
        at::Tensor p = terms.topk_logprobs.exp(), q = terms.topk_ref_logprobs.exp();
        const at::Tensor mass = p.sum(-1);
        EXPECT_NEAR(value.metrics[1].item<double>(), mass.sum().item<double>(), 1e-12);
        at::Tensor divergence;
        if (ref_topk == RefTopk::kRenormalize) {
          p = p / p.sum(-1, true);
          q = q / q.sum(-1, true);
          divergence = (p * (p / q).log()).sum(-1);
        } else {
          divergence = (p * (p / q).log()).sum(-1) + (1 - mass) * ((1 - mass) / (1 - q.sum(-1))).log();
        }
        const at::Tensor expected = (places.coefficient * divergence).sum();
        EXPECT_NEAR(value.loss.item<double>(), expected.item<double>(), 1e-12);
        EXPECT_NEAR(value.metrics[0].item<double>(), divergence.sum().item<double>(), 1e-12);
        const auto objective = make_objective({.kind = ObjectiveKind::kOpd, .ref_topk = ref_topk});
        const at::Tensor plain =
            objective->reference(std::vector<ReferenceTrajectory>{{at::zeros({7}), places.terms(width)}})
                .sum();
        const at::Tensor of_formula = gradient(expected, places);
        EXPECT_LE(worst(gradient(value.loss, places), of_formula), 1e-12);
        EXPECT_LE(worst(gradient(plain, places), of_formula), 1e-12);
      }
    }
  }
}

TEST(OpdTopk, TheRestMakesItABoundFromBelow) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    const Places places(seed);
    double before = 0;
    for (int64_t width = 1; width <= 11; ++width) {
      const double loss = value_of(RefTopk::kRest, places.terms(width)).loss.item<double>();
      EXPECT_GE(loss, before - 1e-12);  // finer partitions distinguish more
      before = loss;
    }
    EXPECT_NEAR(before, places.divergence().item<double>(), 1e-12);
  }
}

TEST(OpdTopk, ARestThatRoundedToNothingIsFinite) {
  // In float32 both sides may sum to 1 or a little more.
  const at::Tensor student =
      at::log(at::tensor({0.5, 0.5 + 1e-7}, at::kDouble).view({1, 2})).requires_grad_();
  const at::Tensor teacher = at::log(at::tensor({0.75 + 1e-7, 0.25}, at::kDouble).view({1, 2}));
  const at::Tensor loss = value_of(RefTopk::kRest, {at::ones({1}, at::kDouble), {}, student, teacher}).loss;
  EXPECT_NEAR(loss.item<double>(), 0.5 * std::log(0.5 / 0.75) + 0.5 * std::log(0.5 / 0.25), 1e-6);
  EXPECT_TRUE(torch::autograd::grad({loss}, {student})[0].isfinite().all().item<bool>());
}

TEST(OpdTopk, TokensWithoutTheTeachersAreNamed) {
  const ObjectiveOptions options{.kind = ObjectiveKind::kOpd, .ref_topk = RefTopk::kRest};
  const auto message = [&](const TrajectoryRow& row) {
    TrajectoriesBuilder builder;
    builder.append(row);
    const Trajectories trajectories = builder.finish();
    return message_of<InputError>([&] { Loss(trajectories, options); });
  };
  const std::string none = message({.input_ids = {1, 2}, .trajectory_id = std::string("t")});
  EXPECT_NE(none.find("trajectory t (row 0): objective opd with ref-topk rest expects"), std::string::npos)
      << none;
  const std::string one =
      message({.input_ids = {1, 2, 3}, .ref_topk_ids = {-1, 4, -1}, .ref_topk_logprobs = {0, -1, 0}});
  EXPECT_NE(one.find("received none for token 2"), std::string::npos) << one;
  // A token without loss needs none.
  TrajectoriesBuilder builder;
  builder.append({.input_ids = {1, 2, 3},
                  .loss_mask = {0, 1, 0},
                  .ref_topk_ids = {-1, 4, -1},
                  .ref_topk_logprobs = {0, -1, 0}});
  const Trajectories trajectories = builder.finish();
  EXPECT_NO_THROW(Loss(trajectories, options));
  EXPECT_EQ(message_of<InputError>(
                [&] { check_objective_options({.kind = ObjectiveKind::kSft, .ref_topk = RefTopk::kRest}); }),
            "--ref-topk: expected objective opd, received sft");
}

}  // namespace
}  // namespace espalier::testing
