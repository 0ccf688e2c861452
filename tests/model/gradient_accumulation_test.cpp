// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/gradient_accumulation.h"
#include "espalier/ops/edge_logprobs/edge_logprobs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "espalier/ops/attention/tree_attention.h"
#include "tests/model/parameter_sums.h"
#include "tests/ops/attention/reference.h"
#include "tests/ops/comparison.h"
#include "tests/ops/edge_logprobs/reference.h"
#include "tests/ops/gemm/forced_products.h"
#include "tests/torch_seed.h"

namespace espalier::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

// An operator of one activation and some parameters, and its plain form.
struct Case {
  std::string name;
  std::vector<std::vector<int64_t>> parameters;  // shapes
  std::vector<int64_t> activation;               // shape; empty: none
  std::function<at::Tensor(const at::Tensor&, const Tensors&)> ours, plain;
};

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor wide = x.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  return (wide * at::rsqrt(wide.square().mean(-1, true) + 1e-5)).to(x.scalar_type()) * weight;
}

constexpr double kScale = 0.25;

accumulating::LowRank adapter(const Tensors& p, size_t i) {
  return {p[i], p[i + 1], kScale};
}

at::Tensor plain_adapter(const at::Tensor& x, const Tensors& p, size_t i) {
  return kScale * at::linear(at::linear(x, p[i]), p[i + 1]);
}

std::vector<Case> cases() {
  const at::Tensor ids = at::tensor({3, 0, 3, 6, 1}, at::kLong);
  const at::Tensor ends = at::full({5}, 5, at::kInt);
  const at::Tensor rows = at::tensor({0, 0, 1, 4}, at::kLong), targets = at::tensor({2, 5, 5, 0}, at::kLong);
  const at::Tensor frozen = at::randn({7, 3}, at::kDouble);  // with an adapter, the head is
  return {
      {"linear",
       {{4, 3}},
       {5, 3},
       [](const auto& x, const auto& p) { return accumulating::linear(x, {p[0]}); },
       [](const auto& x, const auto& p) { return at::linear(x, p[0]); }},
      {"linear with bias",
       {{4, 3}, {4}},
       {5, 3},
       [](const auto& x, const auto& p) { return accumulating::linear(x, {p[0], p[1]}); },
       [](const auto& x, const auto& p) { return at::linear(x, p[0], p[1]); }},
      {"two linears of one input",
       {{4, 3}, {4}, {4, 3}},
       {5, 3},
       [](const auto& x, const auto& p) {
         const auto out = accumulating::linears(x, {{p[0], p[1]}, {p[2]}});
         return out[0] * 2 + out[1];
       },
       [](const auto& x, const auto& p) { return at::linear(x, p[0], p[1]) * 2 + at::linear(x, p[2]); }},
      {"linear with an adapter",
       {{4, 3}, {2, 3}, {4, 2}},
       {5, 3},
       [](const auto& x, const auto& p) { return accumulating::linear(x, {p[0], {}, adapter(p, 1)}); },
       [](const auto& x, const auto& p) { return at::linear(x, p[0]) + plain_adapter(x, p, 1); }},
      {"three linears of one input, two with adapters",
       {{4, 3}, {4}, {2, 3}, {4, 2}, {4, 3}, {4, 3}, {1, 3}, {4, 1}},
       {5, 3},
       [](const auto& x, const auto& p) {
         const accumulating::Projection first{p[0], p[1], adapter(p, 2)}, third{p[5], {}, adapter(p, 6)};
         const auto out = accumulating::linears(x, {first, {p[4]}, third});
         return out[0] / 2 + out[1] + out[2] / 4;
       },
       [](const auto& x, const auto& p) {
         return (at::linear(x, p[0], p[1]) + plain_adapter(x, p, 2)) / 2 + at::linear(x, p[4]) +
                (at::linear(x, p[5]) + plain_adapter(x, p, 6)) / 4;
       }},
      {"unrounded linear",
       {{4, 3}},
       {5, 3},
       [](const auto& x, const auto& p) { return accumulating::unrounded_linear(x, {p[0]}); },
       [](const auto& x, const auto& p) { return at::linear(x, p[0]); }},
      {"unrounded linear with bias",
       {{4, 3}, {4}},
       {5, 3},
       [](const auto& x, const auto& p) { return accumulating::unrounded_linear(x, {p[0], p[1]}); },
       [](const auto& x, const auto& p) { return at::linear(x, p[0], p[1]); }},
      {"stacked linears",
       {{3, 3, 4}, {3, 4}},
       {5, 3},
       [](const auto& x, const auto& p) {
         const accumulating::StackedProjections stacked{p[0], p[1]};
         return accumulating::stacked_linear(x, stacked, 2) * 2 + accumulating::stacked_linear(x, stacked, 0);
       },
       [](const auto& x, const auto& p) {
         return (x.matmul(p[0][2]) + p[1][2]) * 2 + x.matmul(p[0][0]) + p[1][0];
       }},
      {"embedding",
       {{7, 3}},
       {},
       [ids](const auto&, const auto& p) { return accumulating::embedding(p[0], ids); },
       [ids](const auto&, const auto& p) { return p[0].index_select(0, ids); }},
      {"embedding with a frozen row",
       {{7, 3}},
       {},
       [ids](const auto&, const auto& p) { return accumulating::embedding(p[0], ids, 3); },
       [ids](const auto&, const auto& p) { return at::embedding(p[0], ids, /*padding_idx=*/3); }},
      {"norm",
       {{3}},
       {5, 2, 3},
       [](const auto& x, const auto& p) { return accumulating::rms_norm(x, p[0], 1e-5); },
       [](const auto& x, const auto& p) { return plain_norm(x, p[0]); }},
      {"sinks of attention",
       {{4}},
       {5, 4, 3},
       [ends](const auto& x, const auto& p) {
         return tree_attention(x, x, x, {ends}, {.sinks = accumulating::unrounded(p[0])});
       },
       [ends](const auto& x, const auto& p) {
         return reference::tree_attention(x, x, x, {ends}, {.sinks = p[0]});
       }},
      {"head",
       {{7, 3}},
       {5, 3},
       [=](const auto& x, const auto& p) { return accumulating::head_logprobs(x, {p[0]}, rows, targets); },
       [=](const auto& x, const auto& p) { return reference::edge_logprobs(x, p[0], rows, targets); }},
      {"head with a softcap",
       {{7, 3}},
       {5, 3},
       [=](const auto& x, const auto& p) {
         const auto [logprobs, entropy] =
             accumulating::head_distribution(x, {p[0]}, rows, targets, {.softcap = 0.7});
         return logprobs - 0.5 * entropy;
       },
       [=](const auto& x, const auto& p) {
         const auto [logprobs, entropy] =
             reference::edge_distribution(x, p[0], rows, targets, {.softcap = 0.7});
         return logprobs - 0.5 * entropy;
       }},
      {"head with temperatures",
       {{7, 3}},
       {5, 3},
       [=](const auto& x, const auto& p) {
         const at::Tensor temperature = at::linspace(0.5, 2, rows.size(0), at::kDouble);
         const auto [logprobs, entropy] = accumulating::head_distribution(
             x, {p[0]}, rows, targets, {.edge_temperature = temperature, .softcap = 0.7});
         return logprobs - 0.5 * entropy;
       },
       [=](const auto& x, const auto& p) {
         const at::Tensor temperature = at::linspace(0.5, 2, rows.size(0), at::kDouble).unsqueeze(1);
         const at::Tensor logits = ((at::linear(x, p[0]) / 0.7).tanh() * 0.7).index_select(0, rows);
         const at::Tensor all = (logits / temperature.to(x.scalar_type())).log_softmax(-1);
         return all.gather(1, targets.unsqueeze(1)).squeeze(1) + 0.5 * (all.exp() * all).sum(-1);
       }},
      {"head with an adapter",
       {{2, 3}, {7, 2}},
       {5, 3},
       [=](const auto& x, const auto& p) {
         return accumulating::head_logprobs(x, {frozen.to(x.scalar_type()), {}, adapter(p, 0)}, rows,
                                            targets);
       },
       [=](const auto& x, const auto& p) {
         const at::Tensor logits = at::linear(x, frozen.to(x.scalar_type())) + plain_adapter(x, p, 0);
         return logits.log_softmax(-1).index({rows, targets});
       }},
      {"head with an adapter and a softcap",
       {{2, 3}, {7, 2}},
       {5, 3},
       [=](const auto& x, const auto& p) {
         const accumulating::Projection head{frozen.to(x.scalar_type()), {}, adapter(p, 0)};
         const auto [logprobs, entropy] =
             accumulating::head_distribution(x, head, rows, targets, {.softcap = 0.7});
         return logprobs - 0.5 * entropy;
       },
       [=](const auto& x, const auto& p) {
         const at::Tensor logits = at::linear(x, frozen.to(x.scalar_type())) + plain_adapter(x, p, 0);
         const at::Tensor all = ((logits / 0.7).tanh() * 0.7).log_softmax(-1);
         return (all.index({rows, targets}) + 0.5 * (all.exp() * all).sum(-1).index_select(0, rows));
       }}};
}

at::Tensor leaf(const at::Tensor& values, at::ScalarType dtype) {
  return values.detach().to(dtype, false, /*copy=*/true).requires_grad_();
}

double error(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// Two backward passes over other activations, so that the second one finds sums.
TEST(ParameterOps, SumTheGradientsOfThePlainForm) {
  seed_torch(5);
  for (const Case& given : cases()) {
    SCOPED_TRACE(given.name);
    Tensors ours, plain;
    for (const auto& shape : given.parameters) {
      ours.push_back(leaf(at::randn(shape, at::kDouble), at::kDouble));
      plain.push_back(leaf(ours.back(), at::kDouble));
    }
    for (int pass = 0; pass < 2; ++pass) {
      const at::Tensor x = at::randn(given.activation, at::kDouble);
      const at::Tensor our_x = leaf(x, at::kDouble), plain_x = leaf(x, at::kDouble);
      const at::Tensor our_out = given.ours(our_x, ours), plain_out = given.plain(plain_x, plain);
      EXPECT_LE(error(our_out, plain_out), 1e-14);
      const at::Tensor seed = at::randn_like(plain_out);
      torch::autograd::backward({our_out}, {seed});
      torch::autograd::backward({plain_out}, {seed});
      if (!given.activation.empty()) {
        EXPECT_LE(error(our_x.grad(), plain_x.grad()), 1e-14);
      }
      for (size_t i = 0; i < ours.size(); ++i) {
        ASSERT_TRUE(ours[i].grad().defined());
        EXPECT_LE(error(ours[i].grad(), plain[i].grad()), 1e-14) << "parameter " << i << ", pass " << pass;
      }
    }
  }
}

// Passes that each add less than bfloat16 can hold beside the first one's gradient.
TEST(ParameterOps, SumBfloat16GradientsInFloat32) {
  for (const Case& given : cases()) {
    SCOPED_TRACE(given.name);
    seed_torch(6);
    Tensors ours, one_pass;
    for (const auto& shape : given.parameters) {
      ours.push_back(leaf(at::randn(shape), at::kBFloat16));
      one_pass.push_back(leaf(ours.back(), at::kBFloat16));
    }
    const at::Tensor x = leaf(at::randn(given.activation), at::kBFloat16);
    const at::Tensor seed = at::ones_like(given.ours(x, ours)) / 8;
    torch::autograd::backward({given.ours(x, one_pass)}, {seed});
    for (const double scale : {1.0, 0x1p-10, 0x1p-10})
      torch::autograd::backward({given.ours(x, ours)}, {seed * scale});
    for (size_t i = 0; i < ours.size(); ++i) {
      ASSERT_EQ(ours[i].grad().scalar_type(), at::kFloat) << "parameter " << i;
      const at::Tensor expected = one_pass[i].grad() * (1 + 0x1p-9);
      EXPECT_LE(error(ours[i].grad(), expected), 0x1p-17 * expected.abs().max().item<double>());
    }
  }
}

// 257 rows: a sum that bfloat16 does not hold.
TEST(ParameterOps, RoundNoSumOfBfloat16Gradients) {
  expect_unrounded_sums(at::kCPU);
}

// Sums that grow with every pass, in which a sum in bfloat16 rounds away what the later ones add.
TEST(ParameterOps, ErrorOfSinkGradientsOverManyPassesIsAtMostTwiceThatOfThePlainForm) {
  constexpr int64_t kPasses = 64, kHeads = 256, kRows = 6, kDim = 4;
  seed_torch(9);
  const at::Tensor ends = at::full({kRows}, kRows, at::kInt);
  const at::Tensor ours = leaf(at::randn({kHeads}), at::kBFloat16), in_bfloat16 = leaf(ours, at::kBFloat16);
  const at::Tensor exact = leaf(ours, at::kDouble);
  at::Tensor plain = at::zeros({kHeads}, at::kDouble);
  const auto backward = [&](const auto& attention, const at::Tensor& x, const at::Tensor& sinks) {
    const at::Tensor out = attention(x, x, x, {ends}, {.sinks = sinks}, {});
    torch::autograd::backward({out}, {out.detach()});
  };
  for (int64_t pass = 0; pass < kPasses; ++pass) {
    const at::Tensor x = at::randn({kRows, kHeads, kDim}).to(at::kBFloat16);
    backward(tree_attention, x, accumulating::unrounded(ours));
    backward(tree_attention, x, in_bfloat16);  // autograd sums in the parameter's dtype
    backward(reference::tree_attention, x.to(at::kDouble), exact);
    const at::Tensor of_pass = leaf(ours, at::kBFloat16);
    backward(reference::tree_attention, x, of_pass);
    plain += of_pass.grad();
  }
  ASSERT_EQ(ours.grad().scalar_type(), at::kFloat);
  const PooledErrors errors({ours.grad()}, {plain}, {exact.grad()});
  EXPECT_TRUE(errors.at_most_twice_the_plain());
  const PooledErrors control({in_bfloat16.grad()}, {plain}, {exact.grad()});
  EXPECT_FALSE(control.at_most_twice_the_plain()) << control.worst_ratio();
}

// Bitwise identical with and without, and those of the new values where a weight has changed.
TEST(ParameterOps, WeightsThatStayUpcastAreThoseOfTheMoment) {
  seed_torch(8);
  const at::Tensor a = leaf(at::randn({9, 6}), at::kBFloat16), b = leaf(at::randn({4, 6}), at::kBFloat16);
  const at::Tensor input = at::randn({7, 6});
  const auto passes = [&] {
    Tensors results;
    for (int pass = 0; pass < 2; ++pass) {
      const at::Tensor x = leaf(input, at::kBFloat16);
      const auto out = accumulating::linears(x, {{a}, {b}});
      torch::autograd::backward({out[0].sum() + (out[1] * out[1]).sum()}, {});
      results.insert(results.end(), {out[0].detach(), out[1].detach(), x.grad()});
    }
    return results;
  };
  const auto expect_same = [&](const Tensors& expected) {
    const Tensors received = passes();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(received[i].equal(expected[i])) << i;
  };
  const Tensors before = passes();
  {
    const at::NoGradGuard no_grad;
    a.mul_(2);
  }
  const Tensors after = passes();
  EXPECT_FALSE(after[0].equal(before[0]));
  {
    const at::NoGradGuard no_grad;
    a.mul_(0.5);
  }
  const accumulating::UpcastWeights upcast;
  expect_same(before);
  {
    const at::NoGradGuard no_grad;
    a.mul_(2);
  }
  expect_same(after);
  const accumulating::UpcastWeights inner;
  expect_same(after);
}

// Two models in two threads at once, each with the bits that it has alone.
TEST(ParameterOps, WeightsStayUpcastForOneThreadEach) {
  const KernelScope upcast_products(with_products({.bfloat16 = Bfloat16Products::kUpcast}));
  seed_torch(24);
  const at::Tensor input = at::randn({7, 6}).to(at::kBFloat16);
  const std::vector<at::Tensor> weights{at::randn({9, 6}).to(at::kBFloat16),
                                        at::randn({9, 6}).to(at::kBFloat16)};
  const auto pass = [&](const at::Tensor& weight) {
    const at::Tensor x = leaf(input, at::kBFloat16);
    const at::Tensor out = accumulating::linear(x, {weight});
    torch::autograd::backward({out.sum()}, {});
    return Tensors{out.detach(), x.grad()};
  };
  std::vector<Tensors> alone;
  for (const at::Tensor& weight : weights) alone.push_back(pass(weight));
  std::barrier together(2);
  std::atomic<int> same = 0;
  constexpr int kPasses = 20;
  const auto run = [&](int which) {
    const accumulating::UpcastWeights upcast;
    together.arrive_and_wait();
    for (int i = 0; i < kPasses; ++i) {
      const Tensors received = pass(weights[which]);
      same += received[0].equal(alone[which][0]) && received[1].equal(alone[which][1]);
    }
    together.arrive_and_wait();
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  EXPECT_EQ(same, 2 * kPasses);
}

TEST(ParameterOps, PreparedWeightsGiveTheSameAndFollowChanges) {
  seed_torch(21);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor weight = at::randn({30, 20}).to(dtype), stacked = at::randn({3, 20, 30}).to(dtype);
    const at::Tensor bias = at::randn({3, 30}).to(dtype), x = at::randn({5, 20}).to(dtype);
    const auto results = [&] {
      return Tensors{
          accumulating::linear(x, {weight, bias[0]}), accumulating::stacked_linear(x, {stacked, bias}, 0),
          accumulating::stacked_linear(x, {stacked, bias}, 2), accumulating::head_logits(x, {weight})};
    };
    const auto expect_equal = [](const Tensors& ours, const Tensors& expected) {
      for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(ours[i].equal(expected[i])) << i;
    };
    const Tensors before = results();
    weight.mul_(2);
    stacked.mul_(0.5);
    const Tensors after = results();
    weight.mul_(0.5);
    stacked.mul_(2);
    const accumulating::PreparedWeights prepared;
    expect_equal(results(), before);
    expect_equal(results(), before);
    weight.mul_(2);
    stacked.mul_(0.5);
    expect_equal(results(), after);
    const accumulating::PreparedWeights inner;
    expect_equal(results(), after);
  }
}

TEST(ParameterOps, AddToAGradientThatIsThereInALowerPrecision) {
  const at::Tensor weight = leaf(at::ones({2, 2}), at::kBFloat16);
  at::Tensor(weight).mutable_grad() = at::ones({2, 2}, at::kBFloat16);
  torch::autograd::backward({accumulating::linear(at::full({1, 2}, 0x1p-10, at::kBFloat16), {weight})},
                            {at::ones({1, 2}, at::kBFloat16)});
  EXPECT_TRUE(weight.grad().equal(at::full({2, 2}, 1 + 0x1p-10, at::kFloat)));
}

TEST(ParameterOps, FrozenParametersGetNone) {
  for (const Case& given : cases()) {
    if (given.activation.empty()) continue;
    SCOPED_TRACE(given.name);
    Tensors frozen;
    for (const auto& shape : given.parameters) frozen.push_back(at::randn(shape, at::kDouble));
    const at::Tensor x = leaf(at::randn(given.activation, at::kDouble), at::kDouble);
    torch::autograd::backward({given.ours(x, frozen).sum()}, {});
    EXPECT_TRUE(x.grad().defined());
    for (const at::Tensor& parameter : frozen) EXPECT_FALSE(parameter.grad().defined());
  }
}

}  // namespace
}  // namespace espalier::testing
