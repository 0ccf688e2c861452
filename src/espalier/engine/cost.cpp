// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/cost.h"

#include <algorithm>
#include <numeric>

#include "espalier/ops/edge_logprobs/logit_blocks.h"
#include "espalier/ops/gemm/matrix_product.h"
#include "espalier/plan/planner.h"

namespace espalier {

HeadDemand head_demand(const Trajectories& trajectories) {
  return {trajectories.ref_topk, Loss::at_row_temperatures(trajectories).divides_logits()};
}

MemoryModel memory_model(const DecoderConfig& config, at::ScalarType dtype, const Objective& objective,
                         at::Device device, const HeadDemand& demand) {
  MemoryModel model;
  model.cost = model_cost(config);
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    model.num_parameters +=
        std::accumulate(parameter.shape.begin(), parameter.shape.end(), int64_t{1}, std::multiplies<>());
  }
  model.element_bytes = dtype == at::kDouble ? 8 : dtype == at::kFloat ? 4 : 2;
  const at::ScalarType product_dtype = device.is_cpu() ? detail::cpu_product_dtype(dtype) : dtype;
  model.operand_bytes = static_cast<int64_t>(c10::elementSize(product_dtype));
  const bool packs = device.is_cpu() && detail::cpu_uses_panels(product_dtype);
  model.packed_bytes = packs ? model.operand_bytes : 0;
  model.sum_bytes = std::max<int64_t>(model.element_bytes, 4);
  const TermBytes term = term_bytes(objective, demand.ref_topk);
  model.term_batch_bytes = term.batch;
  model.term_graph_bytes = term.graph;
  model.term_running_bytes = term.running;
  model.whole_last_layer = objective.options().has_router_losses();
  model.logit_block_bytes = device.is_cuda() ? kDeviceLogitBlockBytes : kLogitBlockBytes;
  // bfloat16 kernels on CUDA overwrite logits with their gradients.
  model.logit_blocks = device.is_cuda() && dtype == at::kBFloat16 ? 1 : 2;
  // With edge_distribution.h instead of edge_logprobs.h.
  const bool is_differentiated = objective.options().entropy_coef != 0 ||
                                 config.final_logit_softcapping > 0 ||
                                 (demand.divides_logits && objective.is_at_row_temperature());
  if (is_differentiated) model.head_gradient_bytes = model.sum_bytes;
  if (is_differentiated || objective.options().log_entropy) {
    model.logit_blocks = 4;
    model.head_upcast_bytes = model.sum_bytes > model.element_bytes ? model.sum_bytes : 0;
  }
  return model;
}

MemoryModel memory_model(const DecoderConfig& config, at::ScalarType dtype, const Loss& loss,
                         at::Device device) {
  const HeadDemand demand = head_demand(loss.trajectories());
  std::vector<MemoryModel> models;
  for (int64_t part = 0; part < loss.num_parts(); ++part) {
    const Objective& objective = loss.part(part).objective();
    models.push_back(memory_model(config, dtype, objective, device, demand));
  }
  return largest(models);
}

MemoryModel largest(std::span<const MemoryModel> models) {
  MemoryModel most = models.front();
  for (const MemoryModel& model : models) {
    for (const auto field :
         {&MemoryModel::term_batch_bytes, &MemoryModel::term_graph_bytes, &MemoryModel::term_running_bytes,
          &MemoryModel::logit_blocks, &MemoryModel::head_gradient_bytes, &MemoryModel::head_upcast_bytes}) {
      most.*field = std::max(most.*field, model.*field);
    }
  }
  if (models.size() > 1) most.term_batch_bytes += kTermIndexBytes;  // Batch::part_terms
  return most;
}

ModelCost cost_of(const Decoder& decoder) {
  const ModelSpec& spec = decoder.config();
  if (!decoder.has_adapter()) return model_cost(spec);
  LoraOptions lora{.rank = decoder.adapter().parameters.front().value.size(0)};
  for (const LinearMap& map : adaptable_maps(spec)) {
    const bool adapted = std::ranges::any_of(decoder.adapter().parameters, [&](const Parameter& parameter) {
      return parameter.name == map.name + kLoraA;
    });
    if (adapted) lora.targets.push_back(map.name);
  }
  return with_adapters(model_cost(spec), spec, lora);
}

TimeModel assumed_times(const DecoderConfig& config, at::Device device) {
  return assumed_time_model(model_cost(config), device.is_cuda() ? Processor::kGpu : Processor::kCpu);
}

}  // namespace espalier
