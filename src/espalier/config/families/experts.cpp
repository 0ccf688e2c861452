// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/experts.h"

#include <fmt/format.h>

#include <set>

namespace espalier {
namespace {

/// Layers with a dense MLP regardless of decoder_sparse_step.
std::set<int64_t> mlp_only_layers(const ConfigReader& config, int64_t num_hidden_layers) {
  std::set<int64_t> layers;
  const nlohmann::json* given = config.find("mlp_only_layers");
  if (given == nullptr) return layers;
  const std::string expected = fmt::format("a list of layers from 0 to {}", num_hidden_layers - 1);
  if (!given->is_array()) config.refuse("mlp_only_layers", expected);
  for (const nlohmann::json& layer : *given) {
    if (!layer.is_number_integer() || layer < 0 || layer >= num_hidden_layers) {
      config.refuse("mlp_only_layers", expected);
    }
    layers.insert(layer.get<int64_t>());
  }
  return layers;
}

}  // namespace

MoeSpec read_experts(const ConfigReader& config, const std::string& count_key, bool norm_topk_prob) {
  const std::string common_key = "num_local_experts";
  const std::string& key = config.find(count_key) != nullptr ? count_key : common_key;
  MoeSpec moe;
  moe.num_experts = config.positive_integer(key, kMostExperts);
  if (key == count_key &&
      config.positive_integer(common_key, kMostExperts, moe.num_experts) != moe.num_experts) {
    config.refuse(common_key, fmt::format("{} as {} is", moe.num_experts, count_key));
  }
  moe.num_experts_per_tok = config.positive_integer("num_experts_per_tok", moe.num_experts);
  moe.moe_intermediate_size = config.positive_integer("moe_intermediate_size", kMostIntermediate);
  moe.norm_topk_prob = config.boolean("norm_topk_prob", norm_topk_prob);
  return moe;
}

MoeSpec read_grouped_experts(const ConfigReader& config, const GroupedExperts& defaults) {
  MoeSpec moe = read_experts(config, "n_routed_experts", /*norm_topk_prob=*/true);
  moe.scores = RouterScores::kSigmoid;
  moe.correction_bias = true;
  moe.routed_scaling_factor = config.positive_number("routed_scaling_factor", defaults.routed_scaling_factor);
  moe.n_group = config.positive_integer("n_group", moe.num_experts, defaults.n_group);
  moe.topk_group = config.positive_integer("topk_group", moe.n_group, defaults.topk_group);
  // Transformers scores a group by its two best experts.
  const int64_t size = moe.num_experts / moe.n_group;
  if (moe.num_experts % moe.n_group != 0 || size < 2) {
    config.refuse("n_group", fmt::format("a divisor of the {} experts with two experts in each group or more",
                                         moe.num_experts));
  }
  if (moe.topk_group > moe.n_group) config.refuse("topk_group", fmt::format("at most {}", moe.n_group));
  if (moe.num_experts_per_tok > moe.topk_group * size) {
    config.refuse("num_experts_per_tok",
                  fmt::format("at most the {} experts of topk_group groups", moe.topk_group * size));
  }
  return moe;
}

void set_grouped_experts(const ConfigReader& config, const GroupedExperts& defaults, DecoderConfig* result) {
  MoeSpec moe = read_grouped_experts(config, defaults);
  moe.shared_intermediate_size =
      moe.moe_intermediate_size * config.positive_integer("n_shared_experts", kMostExperts, 1);
  for (int64_t i =
           config.integer_from_0("first_k_dense_replace", kMostLayers, defaults.first_k_dense_replace);
       i < result->num_hidden_layers(); ++i) {
    result->layers[i].mlp = moe;
  }
  const std::string old_key = "num_nextn_predict_layers", key = "num_mtp_layers";
  result->num_prediction_layers =
      config.integer_from_0(config.find(old_key) != nullptr ? old_key : key, kMostLayers, 1);
}

void read_shared_expert(const ConfigReader& config, MoeSpec* moe) {
  moe->shared_intermediate_size =
      config.positive_integer("shared_expert_intermediate_size", kMostIntermediate);
  moe->shared_expert_gate = true;
  moe->shared_name = "mlp.shared_expert";
}

void set_sparse_layers(const ConfigReader& config, const MoeSpec& moe, DecoderConfig* result) {
  const int64_t step = config.positive_integer("decoder_sparse_step", kMostLayers, 1);
  const std::set<int64_t> dense = mlp_only_layers(config, result->num_hidden_layers());
  for (int64_t i = 0; i < result->num_hidden_layers(); ++i) {
    if (!dense.contains(i) && (i + 1) % step == 0) result->layers[i].mlp = moe;
  }
}

}  // namespace espalier
