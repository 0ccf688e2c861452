// SPDX-License-Identifier: Apache-2.0
#include "espalier/ops/moe/moe.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "espalier/ops/elementwise/elementwise.h"
#include "tests/ops/comparison.h"
#include "tests/ops/moe/reference.h"
#include "tests/ops/threads.h"
#include "tests/torch_seed.h"

namespace espalier::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

struct RouterCase {
  std::string name;
  int64_t num_experts;
  RouterOptions options;
  bool correction_bias = false;
};

std::vector<RouterCase> router_cases() {
  return {{"softmax", 8, {.top_k = 2}},
          {"softmax, normalised", 7, {.top_k = 3, .normalise = true}},
          {"all experts", 5, {.top_k = 5, .normalise = true}},
          {"one expert", 1, {.top_k = 1}},
          {"sigmoid", 6, {.top_k = 2, .sigmoid = true, .scaling = 2.5}},
          {"corrected", 8, {.top_k = 3, .sigmoid = true, .normalise = true, .scaling = 1.5}, true},
          {"groups",
           12,
           {.top_k = 4, .sigmoid = true, .normalise = true, .num_groups = 4, .num_best_groups = 2},
           true},
          {"softmax over the chosen", 8, {.top_k = 3, .softmax_over_chosen = true}},
          {"one by softmax over the chosen", 4, {.top_k = 1, .scaling = 1.5, .softmax_over_chosen = true}},
          {"groups of softmax", 6, {.top_k = 1, .num_groups = 3, .num_best_groups = 1}}};
}

/// Logits of some tokens, of which every third is a copy of an earlier one.
at::Tensor random_logits(int64_t tokens, int64_t num_experts) {
  const at::Tensor logits = 2 * at::randn({tokens, num_experts}, at::kDouble);
  for (int64_t t = 2; t < tokens; t += 3) logits[t].copy_(logits[t / 2]);
  return logits;
}

std::optional<at::Tensor> bias_of(const RouterCase& given) {
  if (!given.correction_bias) return std::nullopt;
  return at::randn({given.num_experts}, at::kDouble);
}

TEST(MoeRoute, EqualsReference) {
  for (const RouterCase& given : router_cases()) {
    for (const int64_t tokens : {1, 3, 40}) {
      SCOPED_TRACE(given.name);
      const at::Tensor logits = random_logits(tokens, given.num_experts);
      const std::optional<at::Tensor> bias = bias_of(given);
      const Routing expected = reference::route(logits, bias, given.options);
      const Routing received = route(logits, bias, given.options);
      EXPECT_TRUE(at::equal(received.experts, expected.experts));
      const at::Tensor grad = at::randn_like(expected.weights);
      const Results plain = with_gradients(
          [&](const Tensors& in) { return reference::route(in[0], bias, given.options).weights; }, {logits},
          grad);
      const Results ours = with_gradients(
          [&](const Tensors& in) { return route(in[0], bias, given.options).weights; }, {logits}, grad);
      // A weight that is always 1 has a gradient of nothing but rounding.
      const double size = std::max(1e-3, plain[1].norm().item<double>());
      EXPECT_LE(relative_error(ours[0], plain[0]), 1e-14);
      EXPECT_LE((ours[1] - plain[1]).norm().item<double>(), 1e-12 * size);
    }
  }
}

TEST(MoeRoute, TakesTheExpertsThatItIsGiven) {
  const at::Tensor logits = random_logits(20, 6);
  const RouterOptions options{.top_k = 2, .normalise = true};
  const Routing own = route(logits, std::nullopt, options);
  const Routing again = route(logits, std::nullopt, options, own.experts);
  EXPECT_TRUE(at::equal(again.weights, own.weights));
  const at::Tensor others = at::tensor({1, 4}, at::kLong).expand({20, 2}).contiguous();
  const Routing forced = route(logits, std::nullopt, options, others);
  EXPECT_TRUE(at::equal(forced.experts, others));
  EXPECT_LE(relative_error(forced.weights, logits.index_select(1, others[0]).softmax(-1)), 1e-14);
  // Rows of -1 choose.
  const at::Tensor some = others.clone();
  some.narrow(0, 5, 10).fill_(-1);
  const at::Tensor mixed = route(logits, std::nullopt, options, some).experts;
  EXPECT_TRUE(at::equal(mixed.narrow(0, 0, 5), others.narrow(0, 0, 5)));
  EXPECT_TRUE(at::equal(mixed.narrow(0, 5, 10), own.experts.narrow(0, 5, 10)));
}

// Logits whose scores among all experts are 0 in float64.
TEST(MoeRoute, SoftmaxOverTheChosenHoldsBesideMuchLargerLogits) {
  const at::Tensor logits = at::tensor({1000.0, 1.0, 2.0, -1000.0}, at::kDouble).unsqueeze(0);
  const RouterOptions options{.top_k = 2, .softmax_over_chosen = true};
  const at::Tensor given = at::tensor({1, 2}, at::kLong).unsqueeze(0);
  const Routing forced = route(logits, std::nullopt, options, given);
  EXPECT_LE(relative_error(forced.weights, logits.narrow(1, 1, 2).softmax(-1)), 1e-15);
  EXPECT_EQ(logits.softmax(-1)[0][1].item<double>(), 0);
  EXPECT_TRUE(
      at::equal(route(logits, std::nullopt, options).experts, at::tensor({0, 2}, at::kLong).unsqueeze(0)));
}

// Ties are decided as torch.topk decides them, by a token's own scores, wherever it stands.
TEST(MoeRoute, TiesAreThoseOfTopk) {
  const at::Tensor token = at::tensor({0.5, 1.0, 1.0, 0.5, 1.0, 1.0}, at::kDouble);
  const at::Tensor logits = at::cat({random_logits(5, 6), token.expand({4, 6})});
  const at::Tensor experts = route(logits, std::nullopt, {.top_k = 3}).experts;
  const at::Tensor chosen = std::get<0>(std::get<1>(token.softmax(0).topk(3)).sort());
  for (int64_t t = 5; t < 9; ++t) EXPECT_TRUE(at::equal(experts[t], chosen));
  // A correction of the scores decides; it has no part in the weights.
  const at::Tensor bias = at::tensor({0.9, 0.0, 0.0, 0.9, 0.0, 0.0}, at::kDouble);
  const Routing corrected = route(logits, bias, {.top_k = 2});
  for (int64_t t = 5; t < 9; ++t) {
    EXPECT_TRUE(at::equal(corrected.experts[t], at::tensor({0, 3}, at::kLong)));
    EXPECT_TRUE(at::equal(corrected.weights[t], token.softmax(0).index_select(0, corrected.experts[t])));
  }
}

constexpr ClampedActivation kClamped{.alpha = 1.3, .limit = 2};

/// Tokens, their routing and experts, of gpt-oss's kind where `clamped` says so.
struct MoeProblem {
  Tensors inputs;  // x, weights, gate_up, down; clamped: gate_up_bias and down_bias as well
  at::Tensor experts, grad;

  MoeProblem(int64_t tokens, int64_t num_experts, int64_t top_k, bool clamped = false, int64_t hidden = 6,
             int64_t inner = 5) {
    const at::Tensor logits = random_logits(tokens, num_experts) + 3 * at::randn({num_experts}, at::kDouble);
    const Routing routing = route(logits, std::nullopt, {.top_k = top_k, .normalise = true});
    experts = routing.experts;
    const auto random = [](at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); };
    inputs = {random({tokens, hidden}), routing.weights, random({num_experts, 2 * inner, hidden}),
              random({num_experts, hidden, inner})};
    if (clamped) {
      for (size_t i : {2, 3}) inputs[i] = inputs[i].transpose(1, 2).contiguous();
      inputs.push_back(random({num_experts, 2 * inner}));
      inputs.push_back(random({num_experts, hidden}));
    }
    grad = random({tokens, hidden});
  }

  /// In float64 or in values of `dtype`, weights in the dtype of sums.
  Tensors inputs_in(at::ScalarType dtype) const {
    Tensors result = cast(inputs, dtype);
    if (dtype != at::kDouble) result[1] = inputs[1].to(at::kFloat);
    return result;
  }
};

ExpertWeights weights_of(const Tensors& in) {
  if (in.size() == 4) return {in[2], in[3]};
  return {in[2], in[3], in[4], in[5], kClamped};
}

/// By the operator.
at::Tensor call_moe(const Tensors& in, const at::Tensor& experts) {
  using Optional = const std::optional<at::Tensor>&;
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, Optional, Optional, std::optional<double>, double);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("espalier::moe", "").typed<Signature>();
  if (in.size() == 4) return op.call(in[0], in[1], experts, in[2], in[3], {}, {}, {}, 1.702);
  return op.call(in[0], in[1], experts, in[2], in[3], in[4], in[5], kClamped.limit, kClamped.alpha);
}

Results ours_of(const MoeProblem& given, at::ScalarType dtype = at::kDouble) {
  return with_gradients([&](const Tensors& in) { return call_moe(in, given.experts); },
                        given.inputs_in(dtype), given.grad.to(dtype));
}

Results plain_of(const MoeProblem& given, const Tensors& inputs) {
  const auto plain = [&](const Tensors& in) {
    return reference::moe(in[0], {in[1], given.experts}, weights_of(in));
  };
  return with_gradients(plain, inputs, given.grad.to(inputs[0].scalar_type()));
}

struct MoeSizes {
  int64_t tokens, num_experts, top_k;
};
constexpr MoeSizes kMoeSizes[] = {{1, 1, 1},  {1, 4, 2},  {2, 9, 3},  {17, 4, 4},
                                  {23, 6, 1}, {40, 5, 2}, {40, 16, 3}};

TEST(Moe, EqualsReference) {
  for (const auto& [tokens, num_experts, top_k] : kMoeSizes) {
    for (const bool clamped : {false, true}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, " << top_k << " of " << num_experts
                                        << (clamped ? ", clamped" : ""));
      const MoeProblem given(tokens, num_experts, top_k, clamped);
      EXPECT_LE(worst_error(ours_of(given), plain_of(given, given.inputs)), 1e-12);
    }
  }
}

TEST(Moe, ErrorInLowPrecisionIsAtMostTwiceThatOfTheReference) {
  for (const bool clamped : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      PooledErrors errors;
      for (int draw = 0; draw < 4; ++draw) {
        const MoeProblem given(48, 6, 2, clamped, 24, 16);
        const Tensors rounded = given.inputs_in(dtype);
        const Results exact = plain_of(given, cast(rounded, at::kDouble));
        errors.add(ours_of(given, dtype), plain_of(given, rounded), exact);
      }
      EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype << (clamped ? ", clamped" : "");
    }
  }
}

Results grouped_of(const MoeProblem& given, at::ScalarType dtype, const at::Tensor& experts) {
  const auto grouped = [&](const Tensors& in) {
    return grouped_moe(in[0], {in[1], experts}, weights_of(in));
  };
  return with_gradients(grouped, given.inputs_in(dtype), given.grad.to(dtype));
}

TEST(Moe, GroupedProductsAreAsExactAsTheReference) {
  for (const bool clamped : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      PooledErrors errors, control;
      for (const auto& [tokens, num_experts, top_k] : kMoeSizes) {
        const MoeProblem given(tokens, num_experts, top_k, clamped, 24, 16);
        const Tensors rounded = given.inputs_in(dtype);
        const Results exact = plain_of(given, cast(rounded, at::kDouble)), plain = plain_of(given, rounded);
        errors.add(grouped_of(given, dtype, given.experts), plain, exact);
        control.add(grouped_of(given, dtype, (given.experts + 1).remainder(num_experts)), plain, exact);
      }
      EXPECT_TRUE(errors.at_most_twice_the_plain()) << dtype << (clamped ? ", clamped" : "");
      EXPECT_FALSE(control.at_most_twice_the_plain());
    }
  }
}

// Of what sorts, gathers and sums tokens; products have other tests.
TEST(Moe, IsBitwiseTheSameForAnyNumberOfThreads) {
  const MoeProblem given(300, 7, 3, /*clamped=*/false, 48, 40);
  const at::Tensor scales = at::randn({7, 48}, at::kDouble);
  const auto results_of = [&](at::ScalarType dtype) {
    const Tensors inputs = given.inputs_in(dtype);
    const auto expert = [&](int64_t e, const at::Tensor& rows) { return rows * scales[e].to(dtype); };
    return with_gradients([&](const Tensors& in) { return moe(in[0], {in[1], given.experts}, 7, expert); },
                          {inputs[0], inputs[1]}, given.grad.to(dtype));
  };
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Threads one(1);
    const Results alone = results_of(dtype);
    const Threads many(3);
    const Results together = results_of(dtype);
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(same_bits(alone[i], together[i])) << dtype << i;
  }
}

// Controls: what the comparison with the reference would catch.
TEST(Moe, NegativeControls) {
  const MoeProblem given(23, 6, 2);
  const Results exact = plain_of(given, given.inputs);
  const auto error_with = [&](const at::Tensor& weights, const at::Tensor& experts) {
    const Tensors in{given.inputs[0], weights, given.inputs[2], given.inputs[3]};
    return relative_error(call_moe(in, experts), exact[0]);
  };
  EXPECT_LE(error_with(given.inputs[1], given.experts), 1e-12);
  EXPECT_GT(error_with(given.inputs[1].flip(1), given.experts), 1e-3);  // weights of the token's other expert
  EXPECT_GT(error_with(given.inputs[1].roll(1, 0), given.experts), 1e-3);  // of the token before
  at::Tensor dropped = given.inputs[1].clone();                            // what a limited capacity would do
  dropped[22][1] = 0;
  EXPECT_GT(error_with(dropped, given.experts), 1e-4);
  // Tokens in another order within their experts are put back in their places.
  const at::Tensor order = at::randperm(23, at::kLong);
  const Tensors shuffled{given.inputs[0].index_select(0, order), given.inputs[1].index_select(0, order),
                         given.inputs[2], given.inputs[3]};
  const at::Tensor out = call_moe(shuffled, given.experts.index_select(0, order));
  EXPECT_LE(relative_error(out, exact[0].index_select(0, order)), 1e-12);
  EXPECT_GT(relative_error(out, exact[0]), 1e-3);
}

TEST(Moe, NegativeControlsOfClampedExperts) {
  const MoeProblem given(40, 5, 2, /*clamped=*/true);
  const Results exact = plain_of(given, given.inputs);
  const auto error_with = [&](const auto& change) {
    ExpertWeights weights = weights_of(given.inputs);
    change(weights);
    return relative_error(moe(given.inputs[0], {given.inputs[1], given.experts}, weights), exact[0]);
  };
  EXPECT_LE(error_with([](ExpertWeights&) {}), 1e-12);
  EXPECT_GT(error_with([](ExpertWeights& w) { w.gate_up_bias = at::Tensor(); }), 1e-3);
  EXPECT_GT(error_with([](ExpertWeights& w) { w.down_bias = at::Tensor(); }), 1e-3);
  EXPECT_GT(error_with([](ExpertWeights& w) { w.clamped->limit = 1e9; }), 1e-3);
  EXPECT_GT(error_with([](ExpertWeights& w) { w.clamped->alpha = 1; }), 1e-3);
  EXPECT_GT(error_with([](ExpertWeights& w) {  // all gates before all ups
              w.gate_up = at::stack(w.gate_up.chunk(2, 2), 3).flatten(2);
            }),
            1e-3);
  EXPECT_GT(error_with([](ExpertWeights& w) {  // not clamped, in its own layout
              w = {w.gate_up.transpose(1, 2), w.down.transpose(1, 2), w.gate_up_bias, w.down_bias};
            }),
            1e-3);
}

// Biases without the clamp.
TEST(Moe, BiasesOfPlainExpertsEqualReference) {
  const MoeProblem clamped(23, 6, 2, /*clamped=*/true), given(23, 6, 2);
  Tensors inputs = given.inputs;
  inputs.insert(inputs.end(), clamped.inputs.begin() + 4, clamped.inputs.end());
  const auto run = [&](const auto& function) {
    const auto call = [&](const Tensors& in) {
      return function(in[0], Routing{in[1], given.experts}, ExpertWeights{in[2], in[3], in[4], in[5]});
    };
    return with_gradients(call, inputs, given.grad);
  };
  const auto ours = [](const at::Tensor& x, const Routing& routing, const ExpertWeights& weights) {
    return moe(x, routing, weights);
  };
  EXPECT_LE(worst_error(run(ours), run(reference::moe)), 1e-12);
}

TEST(Moe, CallsOnlyExpertsWithTokens) {
  const at::Tensor x = at::randn({3, 4}, at::kDouble), weights = at::ones({3, 1}, at::kDouble);
  std::vector<std::pair<int64_t, int64_t>> calls;  // expert, rows
  const at::Tensor experts = at::tensor({{4}, {1}, {4}}, at::kLong).view({3, 1});
  const at::Tensor out = moe(x, {weights, experts}, 6, [&](int64_t expert, const at::Tensor& rows) {
    calls.emplace_back(expert, rows.size(0));
    return rows * static_cast<double>(expert);
  });
  EXPECT_EQ(calls, (std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {4, 2}}));
  EXPECT_TRUE(at::equal(out, x * experts.to(at::kDouble)));
}

TEST(Moe, RefusesWrongArguments) {
  const at::Tensor logits = at::randn({3, 6}, at::kDouble);
  const auto routed = [&](const RouterOptions& options) { return route(logits, std::nullopt, options); };
  EXPECT_THROW(routed({.top_k = 0}), c10::Error);
  EXPECT_THROW(routed({.top_k = 7}), c10::Error);
  EXPECT_THROW(routed({.top_k = 1, .num_groups = 4}), c10::Error);
  EXPECT_THROW(routed({.top_k = 1, .num_groups = 6}), c10::Error);
  EXPECT_THROW(routed({.top_k = 3, .num_groups = 3, .num_best_groups = 1}), c10::Error);
  EXPECT_THROW(routed({.top_k = 1, .num_groups = 3, .num_best_groups = 4}), c10::Error);
  EXPECT_THROW(routed({.top_k = 1, .sigmoid = true, .softmax_over_chosen = true}), c10::Error);
  EXPECT_THROW(route(logits.to(at::kBFloat16), std::nullopt, {}), c10::Error);
  EXPECT_THROW(route(logits, at::zeros({5}, at::kDouble), {}), c10::Error);
  EXPECT_THROW(route(logits, std::nullopt, {.top_k = 2}, at::zeros({3, 1}, at::kLong)), c10::Error);
  const MoeProblem given(5, 3, 2);
  EXPECT_THROW(call_moe(given.inputs, given.experts + 2), c10::Error);  // there is no expert 3
  EXPECT_THROW(call_moe(given.inputs, given.experts.to(at::kInt)), c10::Error);
  EXPECT_THROW(call_moe(cast(given.inputs, at::kFloat), given.experts.slice(0, 1)), c10::Error);
  const MoeProblem clamped(5, 3, 2, /*clamped=*/true);
  for (size_t i = 2; i < clamped.inputs.size(); ++i) {
    Tensors wrong = clamped.inputs;
    wrong[i] = wrong[i].slice(-1, 1);
    EXPECT_THROW(call_moe(wrong, clamped.experts), c10::Error) << i;
  }
  Tensors mixed = given.inputs;  // of the other layout
  mixed.insert(mixed.end(), clamped.inputs.begin() + 4, clamped.inputs.end());
  EXPECT_THROW(call_moe(mixed, given.experts), c10::Error);
}

}  // namespace
}  // namespace espalier::testing
