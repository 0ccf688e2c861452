// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/planner.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace espalier {
namespace {

/// The maps of a layer that have adapters, by their names in it.
class Adapted {
 public:
  void add(std::string name) { names_.push_back(std::move(name)); }
  bool any(std::initializer_list<std::string_view> names) const {
    return std::ranges::any_of(
        names, [&](std::string_view name) { return std::ranges::find(names_, name) != names_.end(); });
  }

 private:
  std::vector<std::string> names_;
};

/// Elements per token that a layer keeps only as inputs of linear maps: in its mixer, and after it.
struct Inputs {
  int64_t by_mixer = 0;
  int64_t after_mixer = 0;
};

// Attention keeps its own output, but not that times the gate.
void spare(const AttentionSpec& attention, int64_t hidden, const Adapted& adapted, Inputs* spared) {
  const std::string& module = attention.name;
  if (!adapted.any({module + ".q_proj", module + ".k_proj", module + ".v_proj", module + ".qkv_proj"}))
    spared->by_mixer += hidden;
  if (attention.output_gate && !adapted.any({module + ".o_proj"}))
    spared->by_mixer += attention.num_attention_heads * attention.head_dim;
}

void spare(const LatentAttentionSpec& attention, int64_t hidden, const Adapted& adapted, Inputs* spared) {
  if (!adapted.any({"self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"}))
    spared->by_mixer += hidden;
  if (!adapted.any({"self_attn.q_b_proj"})) spared->by_mixer += attention.q_lora_rank;
  if (!adapted.any({"self_attn.kv_b_proj"})) spared->by_mixer += attention.kv_lora_rank;
  if (!adapted.any({"self_attn.o_proj"})) spared->by_mixer += attention.value_size();
}

void spare(const GatedDeltaSpec& delta, int64_t hidden, const Adapted& adapted, Inputs* spared) {
  if (!adapted.any({"linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b",
                    "linear_attn.in_proj_a", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"}))
    spared->by_mixer += hidden;
  if (!adapted.any({"linear_attn.out_proj"})) spared->by_mixer += delta.value_size();
}

void spare(const SsmSpec& ssm, int64_t hidden, const Adapted& adapted, Inputs* spared) {
  if (!adapted.any({ssm.name + ".in_proj"})) spared->by_mixer += hidden;
  if (!adapted.any({ssm.name + ".out_proj"})) spared->by_mixer += ssm.inner_size();
}

void spare(const NoMixer&, int64_t, const Adapted&, Inputs*) {}

void spare(const NoMlp&, int64_t, const Adapted&, Inputs*) {}

void spare(const DenseMlpSpec& mlp, int64_t hidden, const Adapted& adapted, Inputs* spared) {
  const std::string gate = mlp.name + "." + mlp.names.gate, up = mlp.name + "." + mlp.names.up;
  if (!adapted.any({gate, up})) spared->after_mixer += hidden;
  if (!adapted.any({mlp.name + "." + mlp.names.down})) spared->after_mixer += mlp.intermediate_size;
}

// Routers keep the MLP's input, and experts stored as one tensor keep their inputs.
void spare(const MoeSpec& moe, int64_t hidden, const Adapted& adapted, Inputs* spared) {
  if (!moe.clamped_swiglu)
    spared->after_mixer += moe.num_experts_per_tok * (hidden + moe.moe_intermediate_size);
  if (!adapted.any({moe.shared_name + "." + moe.names.down}))
    spared->after_mixer += moe.shared_intermediate_size;
}

/// Whether a map is before the mixer's own operation.
bool opens_mixer(std::string_view name) {
  return std::ranges::any_of(
             std::to_array<std::string_view>({".q_proj", ".k_proj", ".v_proj", ".qkv_proj", ".q_a_proj",
                                              ".q_b_proj", ".kv_a_proj_with_mqa", ".kv_b_proj"}),
             [&](std::string_view end) { return name.ends_with(end); }) ||
         name.find(".in_proj") != std::string_view::npos;
}

}  // namespace

ModelCost with_adapters(ModelCost cost, const ModelSpec& spec, const LoraOptions& lora) {
  cost.frozen = true;
  const std::vector<LinearMap> maps = adapted_maps(spec, lora.targets);
  if (!maps.empty() && maps.back().name == kHeadModule) cost.head_rank = lora.rank;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    LayerCost& layer = cost.layers.at(i);
    const std::string prefix = layer_prefix(spec, static_cast<int64_t>(i));
    Adapted adapted;
    for (const LinearMap& map : maps) {
      if (!map.name.starts_with(prefix)) continue;
      const std::string name = map.name.substr(prefix.size());
      const int64_t weights = lora.rank * (map.in + map.out);
      layer.adapter_weights += weights;
      layer.max_adapted_features = std::max(layer.max_adapted_features, map.in + map.out);
      if (opens_mixer(name)) {
        layer.kept_by_mixer.statistics += lora.rank;  // x A^T
      } else {
        layer.kept_after_mixer.statistics += lora.rank;
        layer.adapter_weights_after_mixer += weights;
      }
      adapted.add(name);
    }
    Inputs spared;
    const auto spare_part = [&](const auto& part) { spare(part, spec.hidden_size, adapted, &spared); };
    std::visit(spare_part, spec.layers[i].mixer);
    std::visit(spare_part, spec.layers[i].mlp);
    layer.kept_by_mixer.elements -= spared.by_mixer;
    layer.kept_after_mixer.elements -= spared.after_mixer;
  }
  return cost;
}

PlanCosts with_adapters(PlanCosts costs, const ModelSpec& spec, const LoraOptions& lora) {
  costs.time.cost = with_adapters(std::move(costs.time.cost), spec, lora);
  MemoryModel& memory = costs.memory;
  memory.cost = with_adapters(std::move(memory.cost), spec, lora);
  return costs;
}

}  // namespace espalier
