// SPDX-License-Identifier: Apache-2.0
#include "espalier/measure/cost.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "espalier/model/decoder.h"
#include "espalier/ops/edge_logprobs/logit_blocks.h"
#include "espalier/ops/gemm/matrix_product.h"

namespace espalier {

namespace {

struct TermCounts {
  int64_t logit_rows = 0;
  int64_t terms = 0;
};

// Of the terms whose edge starts in the micro-batch.
TermCounts count_terms(const Step& step, const MicroBatch& micro_batch) {
  const Layout layout = make_micro_batch_layout(step.forest, micro_batch);
  std::vector<bool> predicts(layout.num_tokens());
  TermCounts counts;
  for (const Placement& placement : micro_batch.trajectories) {
    const TermRange range = terms_of(step, micro_batch, placement);
    if (range.begin == range.end) continue;
    const std::vector<int64_t> path = path_tokens(layout, placement.run);
    const int64_t first = layout.position_ids[path.front()];
    for (int64_t i = range.begin; i < range.end; ++i) {
      predicts[path[step.terms.values[i].position - 1 - first]] = true;
    }
    counts.terms += range.end - range.begin;
  }
  counts.logit_rows = std::count(predicts.begin(), predicts.end(), true);
  return counts;
}

// Of a sequence on its own.
Work sequence_work(int64_t size, int64_t logit_rows, std::span<const int64_t> windows) {
  Work work{size, size * (size + 1) / 2, logit_rows};
  for (const int64_t window : windows) work.window_pairs.push_back(pairs_in_window(0, size, window));
  return work;
}

}  // namespace

Work plan_work(const Step& step, std::span<const int64_t> windows) {
  Work total{.window_pairs = std::vector<int64_t>(windows.size())};
  for (const Load& load : step_loads(step, windows)) {
    total += {load.tokens, load.pairs, load.logit_rows, load.window_pairs};
  }
  return total;
}

Work flat_work(const Step& step, std::span<const int64_t> windows) {
  Work work{.window_pairs = std::vector<int64_t>(windows.size())};
  for (int64_t k = 0; k < step.forest.num_trajectories(); ++k) {
    work += sequence_work(step.forest.trajectory_size(k), step.terms.row_size(k), windows);
  }
  return work;
}

Work append_only_work(const Step& step, std::span<const int64_t> windows) {
  const Forest& forest = step.forest;
  // In preorder a node's first child follows it, so the first leaf below a node is that of the next one.
  std::vector<int64_t> first_leaf(forest.num_nodes());
  for (int64_t node = forest.num_nodes() - 1; node >= 0; --node) {
    const bool is_leaf = forest.subtree_last[node] == node + 1;
    first_leaf[node] = is_leaf ? node : first_leaf[node + 1];
  }
  std::map<int64_t, std::set<int64_t>> targets_of_leaf;
  for (int64_t k = 0; k < forest.num_trajectories(); ++k) {
    std::set<int64_t>& targets = targets_of_leaf[first_leaf[forest.end_node[k]]];
    for (const Term& term : step.terms.row(k)) targets.insert(term.position);
  }
  Work work{.window_pairs = std::vector<int64_t>(windows.size())};
  for (const auto& [leaf, targets] : targets_of_leaf) {
    const int64_t size = forest.position[leaf] + forest.node_size(leaf);
    work += sequence_work(size, static_cast<int64_t>(targets.size()), windows);
  }
  return work;
}

double speedup_bound(const ModelCost& model, const Step& step) {
  const std::vector<int64_t> windows = model.sliding_windows();
  return step_flops(model, flat_work(step, windows)).total() /
         step_flops(model, plan_work(step, windows)).total();
}

MemoryModel memory_model(const DecoderConfig& config, at::ScalarType dtype,
                         std::optional<OptimizerKind> optimizer, const Objective& objective,
                         at::Device device) {
  MemoryModel model;
  const ModelSpec spec = model_spec(config);
  model.cost = model_cost(spec);
  for (const ParameterShape& parameter : parameter_shapes(spec)) {
    model.num_parameters +=
        std::accumulate(parameter.shape.begin(), parameter.shape.end(), int64_t{1}, std::multiplies<>());
  }
  model.element_bytes = dtype == at::kDouble ? 8 : dtype == at::kFloat ? 4 : 2;
  const at::ScalarType product_dtype = device.is_cpu() ? detail::cpu_product_dtype(dtype) : dtype;
  model.operand_bytes = static_cast<int64_t>(c10::elementSize(product_dtype));
  const bool packs = device.is_cpu() && detail::cpu_uses_panels(product_dtype);
  model.packed_bytes = packs ? model.operand_bytes : 0;
  model.sum_bytes = std::max<int64_t>(model.element_bytes, 4);
  if (optimizer) {
    const int64_t masters = dtype == at::kBFloat16 ? 4 : 0;
    model.optimizer_bytes_per_parameter =
        masters + (*optimizer == OptimizerKind::kAdamW ? 2 * model.sum_bytes : 0);
  }
  model.term = objective.term_bytes();
  model.whole_last_layer = objective.options().has_router_losses();
  model.logit_block_bytes = device.is_cuda() ? kDeviceLogitBlockBytes : kLogitBlockBytes;
  // Where kernels do it, gradients take the place of their logits (edge_logprobs_cuda.cpp).
  model.logit_blocks = device.is_cuda() && dtype == at::kBFloat16 ? 1 : 2;
  if (objective.options().entropy_coef != 0) model.logit_blocks = 4;  // edge_distribution.h
  return model;
}

TimeModel assumed_times(const DecoderConfig& config, at::Device device) {
  return assumed_time_model(model_cost(config), device.is_cuda() ? Processor::kGpu : Processor::kCpu);
}

std::vector<Load> step_loads(const Step& step, std::span<const int64_t> windows) {
  std::vector<Load> loads = loads_of(step.plan.micro_batches, windows);
  const std::vector<bool> with_loss = micro_batches_with_loss(step);
  for (size_t m = 0; m < loads.size(); ++m) {
    if (!with_loss[m]) {
      const int64_t parent = loads[m].parent;
      loads[m] = {};
      loads[m].parent = parent;
      loads[m].window_pairs.resize(windows.size());
      continue;
    }
    const TermCounts counts = count_terms(step, step.plan.micro_batches[m]);
    loads[m].logit_rows = counts.logit_rows;
    loads[m].terms = counts.terms;
  }
  count_cuts(step.plan.micro_batches, with_loss, &loads);
  return loads;
}

StepPrediction predict_step(const PlanCosts& costs, const Step& step, bool logprob_pass) {
  MemoryModel memory = costs.memory;
  memory.checkpoint_activations = step.plan.options.checkpoint_activations;
  StepPrediction prediction;
  prediction.loads = step_loads(step, costs.time.cost.sliding_windows());
  prediction.peak_bytes = peak_bytes(memory, prediction.loads);
  for (size_t m = 0; m < prediction.loads.size(); ++m) {
    const bool runs = prediction.loads[m].tokens > 0;
    prediction.seconds.push_back(
        runs ? predicted_seconds(costs.time, prediction.loads[m], memory.checkpoint_activations) : 0);
    if (!runs) prediction.peak_bytes[m] = 0;
    if (runs && logprob_pass) {
      prediction.logprob_pass_seconds += predicted_forward_seconds(costs.time, prediction.loads[m]);
    }
  }
  return prediction;
}

double StepPrediction::total_seconds() const {
  return std::accumulate(seconds.begin(), seconds.end(), logprob_pass_seconds);
}

double StepPrediction::largest_peak_bytes() const {
  return peak_bytes.empty() ? 0 : *std::max_element(peak_bytes.begin(), peak_bytes.end());
}

}  // namespace espalier
