#include "espalier/train/cost.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "espalier/model/decoder.h"

namespace espalier {

ModelShape model_shape(const DecoderConfig& config) {
  return {config.num_hidden_layers,   config.hidden_size,         config.intermediate_size,
          config.num_attention_heads, config.num_key_value_heads, config.head_dim,
          config.vocab_size};
}

std::vector<Work> micro_batch_work(const Step& step) {
  const std::vector<bool> with_loss = micro_batches_with_loss(step);
  std::vector<Work> work(with_loss.size());
  for (size_t m = 0; m < work.size(); ++m) {
    if (!with_loss[m]) continue;
    const MicroBatch& micro_batch = step.plan.micro_batches[m];
    const Layout layout = make_micro_batch_layout(step.forest, micro_batch);
    std::vector<bool> predicts(layout.num_tokens());
    for (const Placement& placement : micro_batch.trajectories) {
      if (step.terms.row(placement.trajectory).empty()) continue;
      const std::vector<int64_t> path = path_tokens(layout, placement.run);
      const int64_t first = layout.position_ids[path.front()], size = static_cast<int64_t>(path.size());
      for (const Term& term : step.terms.row(placement.trajectory)) {
        const int64_t source = term.position - 1 - first;
        if (0 <= source && source < size) predicts[path[source]] = true;
      }
    }
    work[m] = {layout.num_tokens(), micro_batch.num_pairs,
               std::count(predicts.begin(), predicts.end(), true)};
  }
  return work;
}

Work plan_work(const Step& step) {
  Work total;
  for (const Work& work : micro_batch_work(step)) total += work;
  return total;
}

Work flat_work(const Step& step) {
  Work work;
  for (int64_t k = 0; k < step.forest.num_trajectories(); ++k) {
    const int64_t size = step.forest.trajectory_size(k);
    work += {size, size * (size + 1) / 2, step.terms.row_size(k)};
  }
  return work;
}

Work append_only_work(const Step& step) {
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
  Work work;
  for (const auto& [leaf, targets] : targets_of_leaf) {
    const int64_t size = forest.position[leaf] + forest.node_size(leaf);
    work += {size, size * (size + 1) / 2, static_cast<int64_t>(targets.size())};
  }
  return work;
}

double speedup_bound(const ModelShape& shape, const Step& step) {
  return step_flops(shape, flat_work(step)).total() / step_flops(shape, plan_work(step)).total();
}

MemoryEstimate estimate_memory(const DecoderConfig& config, at::ScalarType dtype, OptimizerKind optimizer,
                               int64_t max_tokens) {
  double parameters = 0;
  for (const ParameterShape& parameter : parameter_shapes(config)) {
    parameters += static_cast<double>(
        std::accumulate(parameter.shape.begin(), parameter.shape.end(), int64_t{1}, std::multiplies<>()));
  }
  const double bytes = dtype == at::kDouble ? 8 : dtype == at::kFloat ? 4 : 2;
  const double sum_bytes = std::max(bytes, 4.0);
  const double masters = dtype == at::kBFloat16 ? parameters * 4 : 0;
  MemoryEstimate memory;
  memory.weights = parameters * bytes;
  memory.gradients = parameters * (sum_bytes + bytes);
  memory.optimizer = masters + (optimizer == OptimizerKind::kAdamW ? 2 * parameters * sum_bytes : 0);
  // Kept per token and layer: the residual stream before and the output of both norms; rotated q and k, v,
  // and the attention output; the MLP's gate before and after its activation, up, and their product.
  const double per_layer =
      4.0 * config.hidden_size +
      (2.0 * config.num_attention_heads + 2.0 * config.num_key_value_heads) * config.head_dim +
      4.0 * config.intermediate_size;
  constexpr double kLogitsChunkBytes = 2.0 * (32 << 20);
  memory.activations =
      static_cast<double>(max_tokens) * per_layer * config.num_hidden_layers * bytes + kLogitsChunkBytes;
  return memory;
}

}  // namespace espalier
