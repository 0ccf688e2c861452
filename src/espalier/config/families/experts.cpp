// SPDX-License-Identifier: Apache-2.0
#include "espalier/config/families/experts.h"

#include <fmt/format.h>

namespace espalier {

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

}  // namespace espalier
