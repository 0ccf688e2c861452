#include "espalier/train/forward.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "espalier/base/check.h"
#include "espalier/model/parameter_ops.h"
#include "espalier/ops/tree_attention.h"
#include "espalier/train/recompute.h"

namespace espalier {
namespace {

// What the attention of every layer needs besides q, k and v.
struct Visibility {
  at::Tensor subtree_end;
  at::Tensor context_pieces;
  std::vector<ContextFrame*> ancestors;

  at::Tensor attend(int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    double softmax_scale) const {
    AttentionContext context;
    for (ContextFrame* frame : ancestors) {
      const LayerContext& leaves = frame->leaves(layer);
      context.k.push_back(leaves[0]);
      context.v.push_back(leaves[1]);
    }
    if (!ancestors.empty()) context.pieces = context_pieces;
    return tree_attention(q, k, v, subtree_end, softmax_scale, context);
  }
};

// The layer as a function of its input; results: hidden (of `rows`: Decoder::layer), then the layer's
// context. Holds what it needs by value, because a layer that is computed again outlives the forward pass.
Recomputed layer_function(const Decoder& decoder, const Visibility& visibility, int64_t index,
                          const Decoder::RotaryTables& tables, const at::Tensor& rows) {
  return [&decoder, visibility, index, tables, rows](const at::Tensor& input) {
    const auto attention = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               double softmax_scale) {
      return visibility.attend(index, q, k, v, softmax_scale);
    };
    Decoder::LayerOutput output = decoder.layer(index, input, tables, attention, rows);
    output.context.insert(output.context.begin(), output.hidden);
    return std::move(output.context);
  };
}

// Of the last layer nothing is read but its context and the hidden states that reach the LM head.
at::Tensor rows_of_last_layer(const Batch& batch, bool head) {
  if (!head) return batch.head_rows.slice(0, 0, 0);
  return batch.num_head_rows() == batch.num_tokens() ? at::Tensor() : batch.head_rows;
}

}  // namespace

Forwarded forward(const Decoder& decoder, const Batch& batch, std::span<ContextFrame* const> ancestors,
                  const ForwardOptions& options) {
  ESPALIER_ASSERT(ancestors.size() == batch.ancestors.size());
  const Visibility visibility{batch.subtree_end, batch.context_pieces, {ancestors.begin(), ancestors.end()}};
  const Decoder::RotaryTables tables = decoder.rotary_tables(batch.position_ids);
  at::Tensor hidden = decoder.embed(batch.input_ids);
  Forwarded result;
  const int64_t num_layers = decoder.config().num_hidden_layers;
  for (int64_t i = 0; i < num_layers; ++i) {
    const at::Tensor rows = i + 1 < num_layers ? at::Tensor() : rows_of_last_layer(batch, options.head);
    const Recomputed layer = layer_function(decoder, visibility, i, tables, rows);
    std::vector<at::Tensor> outputs = options.checkpoint_layers ? recompute(hidden, layer) : layer(hidden);
    hidden = outputs.front();
    if (options.keep_context) result.context.emplace_back(outputs.begin() + 1, outputs.end());
  }
  if (options.head) {
    RECORD_USER_SCOPE("head");
    result.logprobs = summing::head_logprobs(decoder.final_norm(hidden), decoder.lm_head_weight(),
                                             batch.edge_row, batch.edge_target);
  }
  return result;
}

at::Tensor forward_edges(const Decoder& decoder, const Batch& batch) {
  return forward(decoder, batch, {}, {}).logprobs;
}

}  // namespace espalier
