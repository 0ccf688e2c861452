// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/tiny_models.h"
#include "tests/test_seed.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>

#include "espalier/base/file.h"
#include "espalier/model/init.h"
#include "espalier/model/weights/weights.h"

namespace espalier::testing {

const char* to_string(Family family) {
  switch (family) {
    case Family::kLlama:
      return "llama";
    case Family::kQwen2:
      return "qwen2";
    case Family::kQwen3:
      return "qwen3";
    case Family::kMistral:
      return "mistral";
    case Family::kOlmo3:
      return "olmo3";
    case Family::kQwen3_5:
      return "qwen3_5_text";
    case Family::kExaone4:
      return "exaone4";
    case Family::kPhi3:
      return "phi3";
    case Family::kGemma3:
      return "gemma3_text";
    case Family::kErnie45:
      return "ernie4_5";
    case Family::kQwen3Moe:
      return "qwen3_moe";
    case Family::kGlm4Moe:
      return "glm4_moe";
    case Family::kQwen3Next:
      return "qwen3_next";
    case Family::kMamba2:
      return "mamba2";
    case Family::kGraniteMoeHybrid:
      return "granitemoehybrid";
    case Family::kGptOss:
      return "gpt_oss";
  }
  throw std::invalid_argument("unknown family");
}

bool has_delta_layers(Family family) {
  return family == Family::kQwen3_5 || family == Family::kQwen3Next;
}

bool has_recurrent_layers(Family family) {
  return has_delta_layers(family) || family == Family::kMamba2 || family == Family::kGraniteMoeHybrid;
}

bool has_experts(Family family) {
  return family == Family::kQwen3Moe || family == Family::kGlm4Moe || family == Family::kQwen3Next ||
         family == Family::kGraniteMoeHybrid || family == Family::kGptOss;
}

namespace {

// Of sizes as in tiny_config_json; eps as with Gated DeltaNet layers.
nlohmann::json tiny_mamba2_json(int64_t vocab_size, bool wide) {
  return {{"model_type", "mamba2"},  {"vocab_size", vocab_size},      {"hidden_size", wide ? 64 : 16},
          {"num_hidden_layers", 2},  {"num_heads", wide ? 32 : 6},    {"head_dim", wide ? 4 : 8},
          {"expand", wide ? 2 : 3},  {"state_size", wide ? 8 : 5},    {"n_groups", 2},
          {"conv_kernel", 4},        {"time_step_limit", {0.1, 1.5}}, {"layer_norm_epsilon", 1e-2},
          {"initializer_range", 0.3}};
}

nlohmann::json tiny_granite_json(int64_t vocab_size, bool wide) {
  return {{"model_type", "granitemoehybrid"},
          {"vocab_size", vocab_size},
          {"hidden_size", wide ? 64 : 16},
          {"head_dim", wide ? 64 : 4},
          {"intermediate_size", wide ? 48 : 12},
          {"shared_intermediate_size", wide ? 40 : 10},
          {"num_hidden_layers", 3},
          {"layer_types", {"mamba", "attention", "mamba"}},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"position_embedding_type", "rope"},
          {"rope_theta", 100.0},
          {"mamba_n_heads", wide ? 32 : 4},
          {"mamba_d_state", wide ? 8 : 5},
          {"mamba_n_groups", 2},
          {"num_local_experts", 4},
          {"num_experts_per_tok", 2},
          {"embedding_multiplier", 2.0},
          {"attention_multiplier", 0.3},
          {"residual_multiplier", 0.6},
          {"logits_scaling", 1.5},
          {"rms_norm_eps", 1e-2},
          {"initializer_range", 0.3}};
}

}  // namespace

nlohmann::json tiny_config_json(Family family, int64_t vocab_size, bool wide) {
  if (family == Family::kMamba2) return tiny_mamba2_json(vocab_size, wide);
  if (family == Family::kGraniteMoeHybrid) return tiny_granite_json(vocab_size, wide);
  nlohmann::json config = {
      {"model_type", to_string(family)},
      {"vocab_size", vocab_size},
      {"hidden_size", 16},
      {"intermediate_size", 24},
      {"num_hidden_layers", 2},
      {"num_attention_heads", 4},
      {"num_key_value_heads", 2},
      {"rms_norm_eps", 1e-5},
      {"rope_theta", 100.0},
      {"max_position_embeddings", 64},
      {"initializer_range", 0.3},
      {"tie_word_embeddings", family == Family::kLlama},
  };
  if (family == Family::kLlama) {
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", 4.0},
                              {"low_freq_factor", 1.0},
                              {"high_freq_factor", 4.0},
                              {"original_max_position_embeddings", 32}};
  }
  if (family == Family::kQwen3 || family == Family::kGlm4Moe) config["head_dim"] = 8;
  if (family == Family::kQwen3Moe) {
    config.update({{"num_experts", 5}, {"norm_topk_prob", true}, {"head_dim", 8}});
  }
  if (family == Family::kGlm4Moe) {
    config.update({{"n_routed_experts", 6},
                   {"n_shared_experts", 1},
                   {"n_group", 3},
                   {"topk_group", 2},
                   {"routed_scaling_factor", 1.25},
                   {"use_qk_norm", true},
                   {"attention_bias", true}});
  }
  if (family == Family::kQwen3Next) {
    config.update({{"num_experts", 4}, {"shared_expert_intermediate_size", wide ? 40 : 10}});
  }
  if (family == Family::kGptOss) {
    config.erase("rope_theta");
    config.update({{"num_local_experts", 5},
                   {"num_experts_per_tok", 2},
                   {"intermediate_size", 12},
                   {"head_dim", 8},
                   {"sliding_window", 4},
                   {"swiglu_limit", 0.9},
                   {"rope_parameters",
                    {{"rope_type", "yarn"},
                     {"rope_theta", 100.0},
                     {"factor", 4.0},
                     {"truncate", false},
                     {"original_max_position_embeddings", 16}}}});
  }
  if (has_experts(family) && family != Family::kGptOss) {
    config.update({{"num_experts_per_tok", 2}, {"moe_intermediate_size", wide ? 48 : 12}});
  }
  if (family == Family::kQwen2) {
    config.update({{"use_sliding_window", true}, {"sliding_window", 5}, {"max_window_layers", 1}});
  }
  if (family == Family::kMistral) {
    config.update({{"sliding_window", 4}, {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}}});
  }
  if (family == Family::kOlmo3) {
    config.erase("rope_theta");
    config.update({{"sliding_window", 6},
                   {"layer_types", {"sliding_attention", "full_attention"}},
                   {"rope_parameters",
                    {{"sliding_attention", {{"rope_theta", 100.0}}},
                     {"full_attention",
                      {{"rope_type", "yarn"},
                       {"rope_theta", 200.0},
                       {"factor", 4.0},
                       {"original_max_position_embeddings", 16}}}}}});
  }
  if (family == Family::kExaone4) config.update({{"sliding_window", 4}, {"sliding_window_pattern", 2}});
  if (family == Family::kPhi3) config.update({{"head_dim", 8}, {"partial_rotary_factor", 0.5}});
  if (family == Family::kGemma3) {
    config.update({{"head_dim", 8},
                   {"sliding_window", 4},
                   {"sliding_window_pattern", 2},
                   {"query_pre_attn_scalar", 6},
                   {"rope_local_base_freq", 30.0}});
  }
  if (family == Family::kErnie45) config.update({{"head_dim", 8}, {"use_bias", true}});
  if (has_delta_layers(family)) {
    // The norm after the mixer makes much of outputs that are almost 0, and of their rounding: with a small
    // eps the errors of the whole would be those of single tokens.
    config["rms_norm_eps"] = 1e-2;
    config.update({{"head_dim", 8},
                   {"partial_rotary_factor", 0.5},
                   {"num_hidden_layers", 3},
                   {"layer_types", {"linear_attention", "full_attention", "linear_attention"}},
                   {"linear_num_key_heads", 1},
                   {"linear_num_value_heads", 2},
                   {"linear_key_head_dim", 5},
                   {"linear_value_head_dim", 6},
                   {"linear_conv_kernel_dim", 4}});
  }
  if (wide) config.update({{"hidden_size", 64}, {"intermediate_size", 96}, {"head_dim", 64}});
  // Biases of routers and sinks are parameters of as many values as there are experts and heads.
  if (wide && family == Family::kGptOss) {
    config.update(
        {{"num_attention_heads", 32}, {"head_dim", 8}, {"num_local_experts", 16}, {"intermediate_size", 48}});
  }
  if (wide && has_delta_layers(family)) {
    config.update(
        {{"linear_num_key_heads", 16}, {"linear_num_value_heads", 32}, {"linear_value_head_dim", 32}});
  }
  return config;
}

DecoderConfig tiny_config(Family family, int64_t vocab_size) {
  return parse_config(tiny_config_json(family, vocab_size), "tiny config");
}

namespace {

// Weights get smaller with the hidden size, as those of real models: else the errors of low precision grow
// from layer to layer, and a single token decides about them.
at::Tensor random_values(const ParameterShape& parameter, int64_t hidden_size, Rng& rng) {
  const bool is_norm = parameter.shape.size() == 1 && !parameter.name.ends_with(".bias") &&
                       !parameter.name.ends_with(".sinks");
  const double weights = 1.4 / std::sqrt(static_cast<double>(hidden_size));
  const double deviation = is_norm ? 0.1 : parameter.shape.size() == 1 ? 0.5 : weights;
  // Decays that forget over a few tokens.
  const double mean = parameter.name.ends_with("A_log") ? -1.5 : is_norm ? 1 : 0;
  at::Tensor values = at::empty(parameter.shape, at::kDouble);
  double* value = values.mutable_data_ptr<double>();
  for (int64_t i = 0; i < values.numel(); ++i) value[i] = mean + deviation * rng.normal();
  return values;
}

}  // namespace

Decoder tiny_decoder(const DecoderConfig& config, uint64_t seed, at::ScalarType dtype) {
  Rng rng(test_seed(seed), 0x71);
  std::vector<Parameter> parameters;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    parameters.push_back(
        {parameter.name, random_values(parameter, config.hidden_size, rng).to(dtype).requires_grad_()});
  }
  std::vector<Parameter> buffers;
  for (const ParameterShape& buffer : buffer_shapes(config)) {
    buffers.push_back(
        {buffer.name,
         random_values(buffer, config.hidden_size, rng).to(dtype == at::kDouble ? dtype : at::kFloat)});
  }
  return Decoder(config, std::move(parameters), std::move(buffers));
}

Adapter random_adapter(const std::vector<LinearMap>& maps, const LoraOptions& options, uint64_t seed,
                       at::ScalarType dtype) {
  Rng rng(test_seed(seed), 0x10ba);
  Adapter adapter = init_adapter(maps, options, test_seed(seed), dtype);
  for (const Parameter& parameter : adapter.parameters) {
    const double deviation = 1 / std::sqrt(static_cast<double>(parameter.value.size(1)));
    at::Tensor values = at::empty(parameter.value.sizes(), at::kDouble);
    double* value = values.mutable_data_ptr<double>();
    for (int64_t i = 0; i < values.numel(); ++i) value[i] = deviation * rng.normal();
    parameter.value.detach().copy_(values);
  }
  return adapter;
}

Decoder cast_decoder(const Decoder& decoder, at::ScalarType dtype) {
  std::vector<Parameter> parameters;
  for (const Parameter& parameter : decoder.weights()) {
    parameters.push_back(
        {parameter.name, parameter.value.detach().to(dtype, false, /*copy=*/true).requires_grad_()});
  }
  std::vector<Parameter> buffers;
  for (const Parameter& buffer : decoder.buffers()) {
    buffers.push_back({buffer.name, buffer.value.to(dtype == at::kDouble ? dtype : at::kFloat)});
  }
  return Decoder(decoder.config(), std::move(parameters), std::move(buffers));
}

void write_tiny_model(const std::filesystem::path& folder, Family family, int64_t vocab_size, uint64_t seed,
                      at::ScalarType dtype, bool wide) {
  // Names and files come from a model that init makes; its norms of 1 and biases of 0 would hide mistakes.
  const std::filesystem::path plain = folder.string() + ".plain", config = folder.string() + ".json";
  write_text(config, tiny_config_json(family, vocab_size, wide).dump());
  init_model({.config = config, .out = plain, .seed = test_seed(seed), .dtype = dtype});
  SourceModel(plain).save(tiny_decoder(read_config(plain), seed, dtype), folder, dtype);
}

namespace {

using Tokens = std::vector<int32_t>;

struct Growth {
  int64_t base;       // row to branch from
  int64_t keep;       // tokens of it
  int64_t extension;  // new tokens
};

// Where the next row leaves the tree.
Growth draw_growth(Rng& rng, Shape shape, const std::vector<Tokens>& rows, const RandomRows& options) {
  const auto last = static_cast<int64_t>(rows.size()) - 1;
  const auto length = [&](int64_t row) { return static_cast<int64_t>(rows[row].size()); };
  switch (shape) {
    case Shape::kStar:
      return {0, std::max<int64_t>(1, length(0) / 2), rng.between(1, 8)};
    case Shape::kSingleTokens:
      return {last, rng.between(0, length(last)), 1};
    case Shape::kDeep:
      return {last, std::max<int64_t>(1, length(last) - rng.between(0, 2)), rng.between(1, 5)};
    case Shape::kWide:
      return {rng.between(0, last), rng.between(0, 3), rng.between(1, 6)};
    default: {
      const int64_t base = rng.between(0, last);
      return {base, rng.between(0, length(base)), rng.between(0, options.max_length / 2)};
    }
  }
}

std::vector<Tokens> random_rows(Rng& rng, Shape shape, const RandomRows& options) {
  const auto token = [&] { return static_cast<int32_t>(rng.below(options.vocab_size)); };
  Tokens first(rng.between(5, shape == Shape::kSingleTokens ? 7 : options.max_length / 2));
  std::generate(first.begin(), first.end(), token);
  if (first[1] == first[0]) first[1] = static_cast<int32_t>((first[0] + 1) % options.vocab_size);
  std::vector<Tokens> rows{first};
  const int64_t num_rows = shape == Shape::kChain ? rng.between(1, 2) : rng.between(2, options.max_rows);
  while (static_cast<int64_t>(rows.size()) < num_rows) {
    const int64_t kind = rng.below(10);
    if (kind == 0 || shape == Shape::kChain) {  // the same again
      rows.push_back(Tokens(rows[rng.below(static_cast<int64_t>(rows.size()))]));
      continue;
    }
    Growth growth = draw_growth(rng, shape, rows, options);
    if (kind == 1) growth.extension = 0;  // ends inside the tree
    const Tokens& base = rows[growth.base];
    Tokens row(base.begin(),
               base.begin() + std::min<int64_t>(growth.keep, static_cast<int64_t>(base.size())));
    for (int64_t i = 0; i < growth.extension; ++i) row.push_back(token());
    if (row.empty()) row.push_back(token());
    row.resize(std::min<size_t>(row.size(), options.max_length));
    rows.push_back(row);
  }
  return rows;
}

void draw_loss(Rng& rng, TrajectoryRow* row) {
  const int64_t kind = rng.below(6);
  if (kind == 0) row->loss_mask.assign(row->input_ids.size(), 0);
  if (kind == 1 || kind == 2) {
    for (size_t t = 0; t < row->input_ids.size(); ++t) row->loss_mask.push_back(rng.uniform() < 0.6);
  }
  if (kind == 3 || kind == 4) {
    for (size_t t = 0; t < row->input_ids.size(); ++t) {
      row->loss_weights.push_back(rng.uniform() < 0.3 ? 0 : 2 * rng.uniform());
    }
  }
}

void draw_policy(Rng& rng, TrajectoryRow* row) {
  const size_t size = row->input_ids.size();
  if (rng.uniform() < 0.6) {
    row->logprobs.push_back(0);
    for (size_t t = 1; t < size; ++t) row->logprobs.push_back(-0.5 - 2 * std::abs(rng.normal()));
  }
  const int64_t kind = rng.below(3);
  if (kind == 0) row->advantage = rng.normal();
  if (kind == 1) {
    for (size_t t = 0; t < size; ++t) row->advantages.push_back(rng.normal());
  }
  if (kind == 2 || rng.uniform() < 0.3) {
    row->reward = rng.normal();
    row->group_id = std::to_string(rng.below(3));
  }
}

// Of a reference model: any numbers do, and others are drawn as before.
std::vector<double> reference_logprobs(size_t size) {
  std::vector<double> logprobs{0};
  for (size_t t = 1; t < size; ++t) logprobs.push_back(-0.7 - 0.9 * static_cast<double>(t * t % 5));
  return logprobs;
}

}  // namespace

Trajectories random_trajectories(Rng& rng, Shape shape, const RandomRows& options) {
  TrajectoriesBuilder builder;
  bool first = true;
  std::vector<Tokens> rows;
  for (int64_t draw = 0; draw < options.draws; ++draw) {
    for (Tokens& row : random_rows(rng, shape, options)) rows.push_back(std::move(row));
  }
  for (const Tokens& tokens : rows) {
    TrajectoryRow row;
    row.input_ids = tokens;
    if (first) {
      row.loss_weights.assign(tokens.size(), 0.75);
      if (options.for_grpo) row.advantage = 1;
      if (options.for_grpo) row.ref_logprobs = reference_logprobs(tokens.size());
      first = false;
    } else {
      draw_loss(rng, &row);
      if (options.for_grpo) draw_policy(rng, &row);
      if (options.for_grpo) row.ref_logprobs = reference_logprobs(tokens.size());
    }
    builder.append(row, options.vocab_size);
  }
  return builder.finish();
}

Trajectories from_rows(const std::vector<std::vector<int32_t>>& rows) {
  TrajectoriesBuilder builder;
  for (const Tokens& tokens : rows) {
    TrajectoryRow row;
    row.input_ids = tokens;
    builder.append(row);
  }
  return builder.finish();
}

}  // namespace espalier::testing
