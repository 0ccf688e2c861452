// SPDX-License-Identifier: Apache-2.0
#include "espalier/engine/forward.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "espalier/engine/recompute.h"
#include "espalier/engine/tree_sequence.h"

namespace espalier {
namespace {

// The layer as a function of its input. Returns hidden (of `rows`, see Model::layer), then the layer's
// context.
Recomputed layer_function(const Model& model, const TreeSequence& sequence, int64_t index,
                          const PositionTables& tables, const at::Tensor& rows) {
  return [&model, sequence, index, tables, rows](const at::Tensor& input) {
    LayerOutput output = model.layer(index, input, tables, sequence, rows);
    output.context.insert(output.context.begin(), output.hidden);
    return std::move(output.context);
  };
}

bool has_router_losses(const ForwardOptions& options) {
  return options.router_statistics && options.router_statistics->options().any();
}

// The rows of the last layer to compute: those that reach the LM head, or all with router losses.
at::Tensor rows_of_last_layer(const Batch& batch, const ForwardOptions& options) {
  if (has_router_losses(options)) return {};
  if (!options.head) return batch.logit_rows.slice(0, 0, 0);
  return batch.num_logit_rows() == batch.num_tokens() ? at::Tensor() : batch.logit_rows;
}

// Entropies [E] of the distributions of edges. Queries the op with a single edge per row, since edges of a
// row share their distribution.
at::Tensor entropy_by_row(const Model& model, const at::Tensor& hidden, const Batch& batch) {
  const at::Tensor rows = at::arange(batch.num_logit_rows(), batch.edge_row.options());
  return model.distribution(hidden, {rows, at::zeros_like(rows)}).entropy.index_select(0, batch.edge_row);
}

void run_head(const Model& model, const at::Tensor& hidden, const Batch& batch, Entropies entropies,
              ForwardResult* result) {
  RECORD_USER_SCOPE("head");
  const Edges edges{batch.edge_row, batch.edge_target};
  if (entropies == Entropies::kDifferentiable && !batch.topk_edge.defined()) {
    const EdgeDistribution distribution = model.distribution(hidden, edges);
    result->logprobs = distribution.logprobs;
    result->entropy = distribution.entropy;
    return;
  }
  result->logprobs = model.logprobs(hidden, edges);
  if (entropies == Entropies::kNone) return;
  const at::AutoGradMode mode(at::GradMode::is_enabled() && entropies == Entropies::kDifferentiable);
  result->entropy = entropy_by_row(model, hidden, batch);
}

}  // namespace

ForwardResult forward(const Model& model, const Batch& batch, std::span<ContextFrame* const> ancestors,
                      const ForwardOptions& options) {
  const TreeSequence sequence(batch, ancestors, options.router_statistics, options.router_record);
  const PositionTables tables = model.position_tables(batch.position_ids);
  at::Tensor hidden = model.embed(batch.input_ids);
  ForwardResult result;
  const int64_t num_layers = model.num_layers();
  for (int64_t i = 0; i < num_layers; ++i) {
    const at::Tensor rows = i + 1 < num_layers ? at::Tensor() : rows_of_last_layer(batch, options);
    const Recomputed layer = layer_function(model, sequence, i, tables, rows);
    std::vector<at::Tensor> outputs = options.checkpoint_layers ? recompute(hidden, layer) : layer(hidden);
    hidden = outputs.front();
    if (options.keep_context) result.context.emplace_back(outputs.begin() + 1, outputs.end());
  }
  if (has_router_losses(options)) {
    result.hidden = hidden;
    if (batch.num_logit_rows() < batch.num_tokens()) hidden = hidden.index_select(0, batch.logit_rows);
  }
  if (options.head) run_head(model, hidden, batch, options.entropies, &result);
  return result;
}

}  // namespace espalier
