// SPDX-License-Identifier: Apache-2.0
#include "espalier/model/decoder.h"
#include "espalier/ops/attention/tree_attention.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/model/tiny_models.h"
#include "tests/ops/attention/reference.h"

namespace espalier {
namespace {

using testing::causal_attention;
using testing::tiny_config;
using testing::tiny_decoder;
using Json = nlohmann::ordered_json;

const Json kLlama3 = {{"rope_theta", 500.0},     {"rope_type", "llama3"},
                      {"factor", 8.0},           {"low_freq_factor", 1.0},
                      {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 64}};

const Json kGemma3 = {{"hidden_act", nullptr},
                      {"rope_parameters", nullptr},
                      {"sliding_window", 3},
                      {"sliding_window_pattern", 2}};

const Json kGemma2 = {{"hidden_act", nullptr},
                      {"sliding_window", 3},
                      {"attn_logit_softcapping", 0.5},
                      {"final_logit_softcapping", 2.0}};

std::vector<Json> all_kinds() {
  return {tiny_config("llama"),
          tiny_config("llama", {{"tie_word_embeddings", true}, {"rope_parameters", kLlama3}}),
          tiny_config("llama", {{"attention_bias", true}, {"mlp_bias", true}}),
          tiny_config("qwen2"),
          tiny_config("qwen3", {{"attention_bias", true}, {"tie_word_embeddings", true}}),
          tiny_config("olmo3", {{"rope_parameters", nullptr}}),
          tiny_config("exaone4", {{"sliding_window", 3}, {"sliding_window_pattern", 2}}),
          tiny_config("phi3", {{"partial_rotary_factor", 0.7}}),
          tiny_config("ernie4_5", {{"use_bias", true}}),
          tiny_config("gemma3_text", kGemma3),
          tiny_config("gemma2", kGemma2),
          tiny_config("qwen3_moe"),
          tiny_config("qwen3_moe", {{"decoder_sparse_step", 1}, {"norm_topk_prob", false}}),
          tiny_config("glm4_moe"),
          tiny_config("glm4_moe", {{"first_k_dense_replace", 0},
                                   {"attention_bias", true},
                                   {"use_qk_norm", false},
                                   {"n_group", 1},
                                   {"topk_group", 1}}),
          tiny_config("gpt_oss"),
          tiny_config("gpt_oss", {{"attention_bias", false},
                                  {"tie_word_embeddings", true},
                                  {"swiglu_limit", 7.0},
                                  {"layer_types", {"full_attention", "sliding_attention"}}})};
}

at::Tensor random_ids(int64_t length) {
  return at::randint(37, {length}, at::kLong);
}
at::Tensor positions(int64_t length) {
  return at::arange(length, at::kLong);
}

/// A loss that reads every output with its own weight.
at::Tensor weighted_logits(const Decoder& decoder, const at::Tensor& ids, const at::Tensor& weights) {
  const at::Tensor hidden = decoder.forward(ids, positions(ids.size(0)), causal_attention);
  return (at::linear(hidden, decoder.lm_head().weight).tanh() * weights).sum();
}

TEST(Decoder, ParametersAreThoseOfTheCheckpoint) {
  std::vector<std::string> names;
  for (const ParameterShape& shape :
       parameter_shapes(parse_config(tiny_config("qwen2", {{"num_hidden_layers", 1}}), "config.json"))) {
    names.push_back(shape.name);
  }
  const std::string layer = "model.layers.0.";
  EXPECT_EQ(names, (std::vector<std::string>{
                       "model.embed_tokens.weight", layer + "self_attn.q_proj.weight",
                       layer + "self_attn.q_proj.bias", layer + "self_attn.k_proj.weight",
                       layer + "self_attn.k_proj.bias", layer + "self_attn.v_proj.weight",
                       layer + "self_attn.v_proj.bias", layer + "self_attn.o_proj.weight",
                       layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight",
                       layer + "mlp.down_proj.weight", layer + "input_layernorm.weight",
                       layer + "post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight"}));
}

TEST(Decoder, ForwardKeepsShapeAndDtype) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const Json& json : all_kinds()) {
      const Decoder decoder = tiny_decoder(json, dtype, 1);
      const at::Tensor hidden = decoder.forward(random_ids(9), positions(9), causal_attention);
      EXPECT_EQ(hidden.sizes(), at::IntArrayRef({9, 16}));
      EXPECT_EQ(hidden.scalar_type(), dtype);
      EXPECT_TRUE(hidden.isfinite().all().item<bool>());
    }
  }
}

TEST(Decoder, LowerPrecisionFollowsFloat64) {
  for (const Json& json : all_kinds()) {
    const Decoder exact = tiny_decoder(json, at::kDouble, 2);
    const Decoder rounded = tiny_decoder(json, at::kFloat, 2);
    const at::Tensor ids = random_ids(40);
    const at::Tensor a = exact.forward(ids, positions(40), causal_attention);
    const at::Tensor b = rounded.forward(ids, positions(40), causal_attention);
    EXPECT_LT(((a - b).norm() / a.norm()).item<double>(), 1e-5) << json.dump();
  }
}

// Central differences in float64 along a random direction of each parameter: error about step^2.
TEST(Decoder, GradientsAreThoseOfFiniteDifferences) {
  constexpr double kStep = 1e-6;
  for (const Json& json : all_kinds()) {
    SCOPED_TRACE(json.dump());
    const Decoder decoder = tiny_decoder(json, at::kDouble, 3);
    const at::Tensor ids = random_ids(11), weights = at::randn({11, 37}, at::kDouble);
    torch::autograd::backward({weighted_logits(decoder, ids, weights)}, {});
    at::NoGradGuard no_grad;
    for (const Parameter& parameter : decoder.parameters()) {
      // An expert that no token chose has no gradient, which stands for zeros.
      const bool has_grad = parameter.value.grad().defined();
      ASSERT_TRUE(has_grad || parameter.name.find(".experts.") != std::string::npos) << parameter.name;
      const at::Tensor grad = has_grad ? parameter.value.grad() : at::zeros_like(parameter.value);
      const at::Tensor direction = at::randn_like(parameter.value);
      at::Tensor value = parameter.value;
      const auto loss_at = [&](double step) {
        value.add_(direction, step);
        const double loss = weighted_logits(decoder, ids, weights).item<double>();
        value.sub_(direction, step);
        return loss;
      };
      const double expected = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      const double received = (grad * direction).sum().item<double>();
      EXPECT_NEAR(received, expected, 1e-6 * (1 + std::abs(expected))) << parameter.name;
    }
  }
}

// A layer for some tokens: their hidden states, all context and all gradients are those of the whole layer.
TEST(Decoder, LayerForSomeTokensIsThatOfAll) {
  for (const Json& json : all_kinds()) {
    SCOPED_TRACE(json.dump());
    const Decoder decoder = tiny_decoder(json, at::kDouble, 4);
    const auto tables = decoder.position_tables(positions(11));
    const at::Tensor input = at::randn({11, 16}, at::kDouble);
    for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{0, 3, 4, 10}, {7}, {}}) {
      const at::Tensor rows = at::tensor(tokens, at::kLong);
      const auto gradients = [&](const std::function<at::Tensor(const at::Tensor&)>& loss) {
        decoder.zero_gradients();
        const at::Tensor x = input.clone().requires_grad_();
        torch::autograd::backward({loss(x)});
        std::vector<at::Tensor> all = decoder.gradients();
        all.push_back(x.grad());
        return all;
      };
      const auto loss = [&](const at::Tensor& wanted, const LayerContext& context) {
        return wanted.tanh().cumsum(0).sum() + context[0].sin().sum() + context[1].cos().sum();
      };
      const auto expected = gradients([&](const at::Tensor& x) {
        const auto output = decoder.layer(1, x, tables, causal_attention);
        return loss(output.hidden.index_select(0, rows), output.context);
      });
      const auto received = gradients([&](const at::Tensor& x) {
        const auto output = decoder.layer(1, x, tables, causal_attention, rows);
        EXPECT_EQ(output.hidden.sizes(), at::IntArrayRef({rows.size(0), 16}));
        return loss(output.hidden, output.context);
      });
      for (size_t i = 0; i < expected.size(); ++i) {
        if (!expected[i].defined()) continue;
        const double size = std::max(0.1, expected[i].norm().item<double>());  // losses have addends near 1
        const at::Tensor actual = received[i].defined() ? received[i] : at::zeros_like(expected[i]);
        EXPECT_LE((actual - expected[i]).norm().item<double>(), 1e-13 * size) << i;
      }
    }
  }
}

TEST(Decoder, OnlyRelativePositionsCount) {
  for (const Json& json : all_kinds()) {
    const Decoder decoder = tiny_decoder(json, at::kDouble, 4);
    const at::Tensor ids = random_ids(12);
    const at::Tensor here = decoder.forward(ids, positions(12), causal_attention);
    const at::Tensor shifted = decoder.forward(ids, positions(12) + 7, causal_attention);
    const at::Tensor stretched = decoder.forward(ids, positions(12) * 2, causal_attention);
    EXPECT_LT((here - shifted).abs().max().item<double>(), 1e-5);  // angles are float32
    EXPECT_GT((here - stretched).abs().max().item<double>(), 1e-3);
  }
}

TEST(Decoder, Llama3RopeSlowsOnlyLongWavelengths) {
  // With factor f and every wavelength long, llama3 is plain rope at positions / f.
  Json slowed = kLlama3;
  slowed["original_max_position_embeddings"] = 1;
  slowed["high_freq_factor"] = 2.0;
  const Decoder llama3 = tiny_decoder(tiny_config("llama", {{"rope_parameters", slowed}}), at::kDouble, 5);
  const Decoder plain = tiny_decoder(tiny_config("llama"), at::kDouble, 5);
  const at::Tensor ids = random_ids(6);
  const at::Tensor a = llama3.forward(ids, positions(6) * 8, causal_attention);
  const at::Tensor b = plain.forward(ids, positions(6), causal_attention);
  EXPECT_LT((a - b).abs().max().item<double>(), 1e-6);

  // With every wavelength short it is plain rope.
  slowed["original_max_position_embeddings"] = 1 << 20;
  slowed["high_freq_factor"] = 4.0;
  const Decoder fast = tiny_decoder(tiny_config("llama", {{"rope_parameters", slowed}}), at::kDouble, 5);
  EXPECT_TRUE(at::equal(fast.forward(ids, positions(6), causal_attention), b));
}

TEST(Decoder, LayersWithSinksTakeThemFromTheCheckpoint) {
  const AttentionSpec spec{
      .num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 4, .sliding_window = 3, .sinks = true};
  testing::seed_torch(8);
  std::vector<Parameter> parameters;
  for (const ParameterShape& shape : layer_parameters({spec, DenseMlpSpec{.intermediate_size = 6}}, 8)) {
    parameters.push_back({shape.name, at::randn(shape.shape, at::kDouble).set_requires_grad(true)});
  }
  const NamedParameters named(parameters, "");
  const at::Tensor hidden = at::randn({7, 8}, at::kDouble);
  const PositionTables tables{at::ones({7, 2}, at::kDouble), at::zeros({7, 2}, at::kDouble)};
  const ForestTokens tokens{at::full({7}, 7, at::kInt), at::arange(7, at::kInt)};
  const testing::FunctionSequence sequence(
      [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& options) {
        return reference::tree_attention(q, k, v, tokens, options);
      });
  const auto output = [&](const AttentionSpec& of) {
    return AttentionLayer(of, named, {.rms_norm_eps = 1e-6}).forward(0, hidden, tables, sequence, {}).hidden;
  };
  AttentionSpec without = spec;
  without.sinks = false;
  const at::Tensor given = output(spec);
  EXPECT_GT((given - output(without)).abs().max().item<double>(), 1e-3);
  torch::autograd::backward({given.sum()}, {});
  const at::Tensor sinks = named.at("self_attn.sinks");
  ASSERT_TRUE(sinks.grad().defined());
  EXPECT_GT(sinks.grad().abs().min().item<double>(), 0);
  const at::NoGradGuard no_grad;
  at::Tensor(sinks).fill_(-1e3);
  EXPECT_LE((output(spec) - output(without)).abs().max().item<double>(), 1e-12);
}

TEST(Decoder, TiedHeadIsTheEmbedding) {
  const Decoder tied = tiny_decoder(tiny_config("llama", {{"tie_word_embeddings", true}}), at::kFloat, 6);
  EXPECT_TRUE(tied.lm_head().weight.is_same(tied.parameters().front().value));
  const Decoder untied = tiny_decoder(tiny_config("llama"), at::kFloat, 6);
  EXPECT_TRUE(untied.lm_head().weight.is_same(untied.parameters().back().value));
}

// As Transformers' Gemma3TextScaledWordEmbedding: the square root of 3072 is 55.5 in bfloat16.
TEST(Decoder, GemmasFactorOfTheEmbeddingIsRoundedToTheDtype) {
  const Json json = tiny_config("gemma3_text", kGemma3);
  const at::Tensor ids = random_ids(5);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Decoder plain = tiny_decoder(json, dtype, 6);
    DecoderConfig config = plain.config();
    config.embedding_multiplier = std::sqrt(3072.0);
    const at::Tensor embedded = Decoder(config, plain.weights()).embed(ids);
    const at::Tensor rows = plain.weights().front().value.index_select(0, ids);
    EXPECT_TRUE(embedded.equal(rows * at::scalar_tensor(config.embedding_multiplier, dtype))) << dtype;
    config.round_embedding_multiplier = false;
    const at::Tensor unrounded = Decoder(config, plain.weights()).embed(ids);
    EXPECT_EQ(embedded.equal(unrounded), dtype != at::kBFloat16) << dtype;
  }
}

TEST(Decoder, CompletedGradientsAreZerosWhereThereWereNone) {
  const Decoder decoder = tiny_decoder(tiny_config("llama"), at::kBFloat16, 6);
  torch::autograd::backward({decoder.embed(random_ids(3)).sum()});
  const at::Tensor of_embedding = decoder.gradients().front().clone();
  EXPECT_FALSE(decoder.gradients().back().defined());
  for (const Parameter& parameter : decoder.parameters()) complete_gradient(parameter.value);
  EXPECT_TRUE(at::equal(decoder.gradients().front(), of_embedding));
  for (size_t i = 1; i < decoder.parameters().size(); ++i) {
    const at::Tensor gradient = decoder.gradients()[i];
    ASSERT_TRUE(gradient.defined()) << decoder.parameters()[i].name;
    EXPECT_EQ(gradient.sizes(), decoder.parameters()[i].value.sizes());
    EXPECT_EQ(gradient.scalar_type(), at::kFloat);
    EXPECT_EQ(gradient.count_nonzero().item<int64_t>(), 0);
  }
}

TEST(Decoder, RefusesWrongArguments) {
  const Decoder decoder = tiny_decoder(tiny_config("llama"), at::kFloat, 7);
  EXPECT_THROW(decoder.forward(random_ids(4), positions(5), causal_attention), c10::Error);
  EXPECT_THROW(decoder.forward(random_ids(4).to(at::kInt), positions(4), causal_attention), c10::Error);
  EXPECT_THROW(decoder.forward(random_ids(4).unsqueeze(0), positions(4).unsqueeze(0), causal_attention),
               c10::Error);
  const testing::FunctionSequence drops_a_head([](const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                                                  const AttentionOptions&) { return q.narrow(1, 0, 1); });
  EXPECT_THROW(decoder.forward(random_ids(4), positions(4), drops_a_head), c10::Error);

  std::vector<Parameter> parameters = decoder.parameters();
  std::swap(parameters[1], parameters[4]);
  EXPECT_THROW(Decoder(decoder.config(), parameters), c10::Error);
  parameters = decoder.parameters();
  parameters[2].value = parameters[2].value.detach().to(at::kDouble);
  EXPECT_THROW(Decoder(decoder.config(), parameters), c10::Error);
  parameters.pop_back();
  EXPECT_THROW(Decoder(decoder.config(), parameters), c10::Error);
}

}  // namespace
}  // namespace espalier
