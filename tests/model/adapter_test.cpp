// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/adapter.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "espalier/model/init.h"
#include "tests/model/tiny_models.h"

namespace espalier::testing {
namespace {

const LoraOptions kOptions{.rank = 2, .alpha = 3, .targets = {"q_proj", "down_proj"}};

Adapter adapter_of(const Decoder& decoder, at::ScalarType dtype) {
  const ModelSpec& spec = decoder.config();
  return init_adapter(adapted_maps(spec, kOptions.targets), kOptions, 5, dtype);
}

TEST(Adapter, IsDrawnByNameAndSeed) {
  const Decoder decoder = tiny_decoder(tiny_config("llama"), at::kFloat, 3);
  const ModelSpec& spec = decoder.config();
  const Adapter adapter = adapter_of(decoder, at::kFloat);
  const auto alone = [&](const char* target, uint64_t seed) {
    return init_adapter(adapted_maps(spec, {target}), kOptions, seed, at::kFloat).parameters;
  };
  EXPECT_DOUBLE_EQ(adapter.scale, 1.5);
  ASSERT_EQ(adapter.parameters.size(), 8u);
  const Parameter &a = adapter.parameters[2], &b = adapter.parameters[3];
  EXPECT_EQ(a.name, "model.layers.0.mlp.down_proj.lora_A.weight");
  EXPECT_EQ(b.name, "model.layers.0.mlp.down_proj.lora_B.weight");
  EXPECT_TRUE(a.value.requires_grad() && b.value.requires_grad());
  EXPECT_EQ(b.value.count_nonzero().item<int64_t>(), 0);
  const double bound = 1 / std::sqrt(24.0);
  EXPECT_LE(a.value.abs().max().item<double>(), bound);
  EXPECT_GT(a.value.abs().max().item<double>(), 0.8 * bound);
  EXPECT_TRUE(alone("down_proj", 5)[0].value.equal(a.value));
  EXPECT_FALSE(alone("down_proj", 6)[0].value.equal(a.value));
  EXPECT_FALSE(alone("down_proj", 5)[2].value.equal(a.value));  // of the next layer
}

TEST(Adapter, FreezesTheWeights) {
  const Decoder plain = tiny_decoder(tiny_config("llama"), at::kBFloat16, 3);
  EXPECT_EQ(&plain.parameters(), &plain.weights());
  const Decoder adapted(plain.config(), plain.weights(), {}, adapter_of(plain, at::kFloat));
  EXPECT_EQ(adapted.parameters().size(), 8u);
  for (const Parameter& weight : adapted.weights()) EXPECT_FALSE(weight.value.requires_grad()) << weight.name;
  EXPECT_EQ(adapted.gradients().size(), 8u);
  EXPECT_EQ(adapted.dtype(), at::kBFloat16);
}

TEST(Adapter, MustFitTheDecoder) {
  const Decoder decoder = tiny_decoder(tiny_config("llama"), at::kDouble, 3);
  const auto with = [&](const std::function<void(std::vector<Parameter>*)>& spoil) {
    Adapter adapter = adapter_of(decoder, at::kDouble);
    spoil(&adapter.parameters);
    return Decoder(decoder.config(), decoder.weights(), {}, std::move(adapter));
  };
  EXPECT_NO_THROW(with([](auto*) {}));
  EXPECT_THROW(with([](auto* p) { p->pop_back(); }), c10::Error);
  EXPECT_THROW(with([](auto* p) { std::swap(p->at(0), p->at(2)); }), c10::Error);
  EXPECT_THROW(with([](auto* p) { p->at(0).name = "model.layers.0.mlp.c_fc.lora_A.weight"; }), c10::Error);
  EXPECT_THROW(with([](auto* p) { p->at(0).value = at::zeros({2, 15}, at::kDouble); }), c10::Error);
  EXPECT_THROW(with([](auto* p) { p->at(1).value = p->at(1).value.to(at::kFloat); }), c10::Error);
  // Of another rank than A.
  EXPECT_THROW(with([](auto* p) { p->at(0).value = at::zeros({3, 16}, at::kDouble); }), c10::Error);
}

}  // namespace
}  // namespace espalier::testing
