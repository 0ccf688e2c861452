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
