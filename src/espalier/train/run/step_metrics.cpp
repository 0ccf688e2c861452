// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run/step_metrics.h"

#include <sys/resource.h>

#include "espalier/engine/cost.h"

namespace espalier {
namespace {

int64_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{1024} * usage.ru_maxrss;
}

}  // namespace

nlohmann::ordered_json step_metrics(const ModelCost& model, const ObjectiveOptions& objective,
                                    const StepResult& result, double seconds) {
  nlohmann::ordered_json metrics;
  metrics["loss"] = result.loss;
  metrics["flat_tokens"] = result.flat_tokens;
  metrics["tree_tokens"] = result.tree_tokens;
  metrics["encoded_tokens"] = result.work.tokens;
  metrics["loss_terms"] = result.terms;
  metrics["seconds"] = seconds;
  metrics["tree_tokens_per_second"] = static_cast<double>(result.work.tokens) / seconds;
  metrics["flat_tokens_per_second"] = static_cast<double>(result.flat_tokens) / seconds;
  metrics["tflops_per_second"] = step_flops(model, result.work).total() / seconds / 1e12;
  metrics["peak_memory_bytes"] = peak_memory_bytes();
  metrics["peak_tensor_bytes"] = result.measured_peak_bytes();
  metrics["micro_batches"] = result.measured.size();
  metrics["micro_batch_seconds"] = result.measured_seconds();
  if (result.recomputed.tokens > 0) metrics["recomputed_tokens"] = result.recomputed.tokens;
  for (const StepMetric& metric : result.metrics) metrics[metric.name] = metric.value;
  if (result.routers) {
    if (objective.router_aux_loss_coef != 0) metrics["router_aux_loss"] = result.routers->aux_loss;
    if (objective.router_z_loss_coef != 0) metrics["router_z_loss"] = result.routers->z_loss;
    metrics["expert_load_max"] = result.routers->load_max;
    metrics["expert_load_min"] = result.routers->load_min;
  }
  return metrics;
}

}  // namespace espalier
