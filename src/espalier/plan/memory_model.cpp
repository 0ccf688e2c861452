// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/memory_model.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr double kIndexBytesPerToken = 8 + 8 + 4;  // input_ids, position_ids, subtree_end

double real(int64_t count) {
  return static_cast<double>(count);
}

// Sizes in elements per token.
struct Widths {
  explicit Widths(const ModelShape& shape)
      : hidden(real(shape.hidden_size)),
        inner(real(shape.intermediate_size)),
        query(real(shape.num_attention_heads * shape.head_dim)),
        key(real(shape.num_key_value_heads * shape.head_dim)),
        heads(real(shape.num_attention_heads)),
        key_heads(real(shape.num_key_value_heads)) {}
  double hidden, inner, query, key, heads, key_heads;
};

// What one layer keeps for its backward pass, in bytes per token. `attention` is everything up to the
// attention: the layer's input, the first norm's output and factor, q, k, v, the attention's output and
// log-sum-exp, and with norms of q and k also q and k before the norm. `after_attention` is the rest: the MLP
// half's input, its norm's output and factor, gate, up and their product.
struct LayerBytes {
  double attention;
  double after_attention;

  explicit LayerBytes(const MemoryModel& model) {
    const Widths w(model.shape);
    const double element = real(model.element_bytes), sum = real(model.sum_bytes);
    attention = (2 * w.hidden + 2 * w.query + 2 * w.key) * element + (1 + w.heads) * sum;
    if (model.query_key_norm) attention += (w.query + w.key) * element + (w.heads + w.key_heads) * sum;
    after_attention = (2 * w.hidden + 3 * w.inner) * element + sum;
  }
  double whole() const { return attention + after_attention; }
};

double context_bytes(const MemoryModel& model) {
  return 2 * Widths(model.shape).key * real(model.element_bytes) * real(model.shape.num_hidden_layers);
}

// Outside the layers, bytes per token: indices, rotary tables.
double outer_bytes(const MemoryModel& model) {
  return kIndexBytesPerToken + real(model.shape.head_dim * model.sum_bytes);
}

// The LM head, bytes per row: the last norm's input and factor; hidden state and log-sum-exp;
// log-probability, row and target of its edges.
double logit_row_bytes(const MemoryModel& model) {
  return 2 * real(model.shape.hidden_size * model.element_bytes) + 2 * real(model.sum_bytes) + 4 * 8;
}

// What one layer keeps for its backward pass. After its attention the last layer works on logit rows only,
// for which it copies the attention's output.
double layer_bytes(const MemoryModel& model, const Load& load, bool is_last) {
  const LayerBytes bytes(model);
  if (!is_last) return real(load.tokens) * bytes.whole();
  const double copy =
      load.logit_rows < load.tokens ? Widths(model.shape).query * real(model.element_bytes) : 0;
  return real(load.tokens) * bytes.attention + real(load.logit_rows) * (bytes.after_attention + copy);
}

// What is kept of a layer by a micro-batch that waits for its backward pass with its graph.
double kept_layer_bytes(const MemoryModel& model, const Load& load, bool is_last) {
  if (model.checkpoint_activations != CheckpointActivations::kLayer) return layer_bytes(model, load, is_last);
  const double input = real(model.shape.hidden_size * model.element_bytes);
  return real(load.tokens) *
         (input + (load.has_readers ? context_bytes(model) / real(model.shape.num_hidden_layers) : 0));
}

double graph_bytes(const MemoryModel& model, const Load& load) {
  const double layers = real(model.shape.num_hidden_layers);
  return real(load.tokens) * outer_bytes(model) + (layers - 1) * kept_layer_bytes(model, load, false) +
         kept_layer_bytes(model, load, true) + real(load.logit_rows) * logit_row_bytes(model) +
         real(load.terms * (model.term.batch + model.term.graph));
}

double context_gradient_bytes(const MemoryModel& model, const Load& load) {
  if (!load.has_readers) return 0;
  return real(load.tokens) * context_bytes(model) * real(model.sum_bytes) / real(model.element_bytes);
}

// Memory for the gradients of weights. Gradients are added to their sums in place, so they take no memory of
// their own once the sums exist. In the first backward pass of a step the sums do not exist yet: memory grows
// as each layer's gradients become the sums. In addition, the operands of a weight's product are upcast or
// packed while it is multiplied, or the product is rounded to a lower precision and then converted to the
// precision of the sums.
struct WeightGradientBytes {
  double embedding, layer, parameters;  // sums that this pass allocates: of the embedding, one layer, all
  double product;                       // temporary bytes per element of a weight, while it is multiplied
  double widest;  // temporary bytes for the largest weight in a layer, with its packed operand

  WeightGradientBytes(const MemoryModel& model, const Load& load, bool has_sums) {
    const ModelShape& shape = model.shape;
    const double sum = has_sums ? 0 : real(model.sum_bytes);
    embedding = real(shape.vocab_size * shape.hidden_size) * sum;
    layer = real(linear_parameters_per_layer(shape)) * sum;
    parameters = real(model.num_parameters) * sum;
    const bool rounds = model.packed_bytes == 0 && model.element_bytes < model.sum_bytes;
    const double rounded = rounds ? real(model.element_bytes + model.sum_bytes) : 0;
    const double beside = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : rounded;
    product = beside + real(model.packed_bytes);
    // For the gradient of a weight some thousand tokens are packed at a time (ops/gemm/panel_product.cpp).
    const int64_t packed_rows = std::max(shape.hidden_size, std::min<int64_t>(load.tokens, 2048));
    widest = real(shape.intermediate_size) *
             (real(shape.hidden_size) * beside + real(packed_rows * model.packed_bytes));
  }
};

// The most temporary memory in a layer's backward pass. This is the largest of: gradients of the MLP's width,
// while the upcast input, gradient and result of the last projection exist together; gradients of q, k and v
// together with the attention's own copies; and gradients around a norm. With checkpointing by layer, the
// activations of the recomputed layer are added.
double momentary_bytes(const MemoryModel& model, const Load& load, bool is_last) {
  const Widths w(model.shape);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes);
  const double upcast = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : 0;
  const double after_attention =
      std::max((2 * w.inner + w.hidden) * element,
               upcast > 0 ? (2 * w.inner + w.hidden) * upcast + (w.inner + w.hidden) * element : 0);
  const double attention =
      std::max((2 * w.query + 4 * w.key) * sum + w.hidden * element, 4 * w.hidden * element);
  const bool again = model.checkpoint_activations == CheckpointActivations::kLayer;
  return std::max(real(is_last ? load.logit_rows : load.tokens) * after_attention,
                  real(load.tokens) * attention) +
         (again ? layer_bytes(model, load, is_last) : 0);
}

// The LM head needs its weight's gradient, the gradients of its rows before and after the last norm, and a
// few blocks of logits.
double head_bytes(const MemoryModel& model, const Load& load, const WeightGradientBytes& gradients) {
  if (load.logit_rows == 0) return 0;
  const double rows = real(load.logit_rows), vocabulary = real(model.shape.vocab_size);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes);
  const double hidden = real(model.shape.hidden_size);
  const double upcast = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : 0;
  const double logits = std::min(real(model.logit_block_bytes), rows * vocabulary * sum);
  const double product = std::min(vocabulary, logits / (rows * sum)) * hidden * gradients.product;
  return gradients.embedding + product + real(model.logit_blocks) * logits +
         rows * hidden * (sum + upcast + element);
}

}  // namespace

double resident_bytes(const MemoryModel& model) {
  return real(model.num_parameters) *
         real(model.element_bytes + model.sum_bytes + model.optimizer_bytes_per_parameter);
}

double held_bytes(const MemoryModel& model, const Load& load) {
  double kept = graph_bytes(model, load);
  if (model.checkpoint_activations == CheckpointActivations::kPiece) {
    kept = real(load.tokens) * (kIndexBytesPerToken + context_bytes(model)) +
           real(load.terms * model.term.batch);
  }
  return kept + context_gradient_bytes(model, load);
}

double running_bytes(const MemoryModel& model, const Load& load, bool has_sums) {
  const WeightGradientBytes gradients(model, load, has_sums);
  const double layers = real(model.shape.num_hidden_layers), tokens = real(load.tokens);
  const double context = context_gradient_bytes(model, load) +
                         (model.checkpoint_activations == CheckpointActivations::kPiece && load.has_readers
                              ? tokens * context_bytes(model)
                              : 0);
  const double graph = graph_bytes(model, load);
  const double terms = graph + real(load.terms * model.term.running);
  // Three moments of the backward pass: the last layer, while all activations still exist; the layer before
  // it; and the first layer, when all gradients exist.
  const double head_gradient = load.logit_rows == 0 ? 0 : gradients.embedding;
  const double last_layer =
      graph + head_gradient + gradients.layer + gradients.widest + momentary_bytes(model, load, true);
  double one_before = 0, first_layer = 0;
  if (layers > 1) {
    const double without_last = graph - kept_layer_bytes(model, load, true);
    const double of_layer = gradients.widest + momentary_bytes(model, load, false);
    one_before = without_last + head_gradient + 2 * gradients.layer + of_layer;
    first_layer =
        without_last - (layers - 2) * kept_layer_bytes(model, load, false) + gradients.parameters + of_layer;
  }
  const double rounded =
      model.element_bytes < model.sum_bytes ? real(model.element_bytes + model.sum_bytes) : 0;
  const double input = real(model.shape.hidden_size) * (real(model.element_bytes) + rounded);
  const double end = gradients.parameters + gradients.widest + tokens * (input + outer_bytes(model));
  const double head = graph + head_bytes(model, load, gradients);
  return context + std::max({terms, head, last_layer, one_before, first_layer, end});
}

double upcast_weight_bytes(const MemoryModel& model) {
  if (model.operand_bytes <= model.element_bytes) return 0;
  return real(model.shape.num_hidden_layers * linear_parameters_per_layer(model.shape) * model.operand_bytes);
}

std::vector<double> peak_bytes(const MemoryModel& model, std::span<const Load> loads) {
  const bool several = std::ranges::count_if(loads, [](const Load& load) { return load.tokens > 0; }) > 1;
  const double resident = resident_bytes(model) + (several ? upcast_weight_bytes(model) : 0);
  std::vector<double> held(loads.size());    // by the micro-batch and its ancestors
  std::vector<double> tokens(loads.size());  // of the same
  // A layer's backward pass allocates gradients for all tokens of its ancestors, even if it reads few of
  // them.
  const double context_gradient = 2 * Widths(model.shape).key * real(model.sum_bytes);
  std::vector<double> peaks(loads.size());
  bool has_sums = false;  // in the first backward pass of a step, its gradients become the sums
  for (size_t m = 0; m < loads.size(); ++m) {
    const double above = loads[m].parent < 0 ? 0 : held[loads[m].parent];
    const double tokens_above = loads[m].parent < 0 ? 0 : tokens[loads[m].parent];
    held[m] = above + held_bytes(model, loads[m]);
    tokens[m] = tokens_above + real(loads[m].tokens);
    const bool is_first = !has_sums && loads[m].tokens > 0 && !loads[m].has_readers;
    peaks[m] = resident + above + tokens_above * context_gradient + running_bytes(model, loads[m], !is_first);
    if (!is_first) continue;
    peaks[m] -= real(model.num_parameters * model.sum_bytes);
    has_sums = true;
  }
  return peaks;
}

double plan_peak_bytes(const MemoryModel& model, std::span<const Load> loads) {
  double peak = resident_bytes(model);
  for (const double bytes : peak_bytes(model, loads)) peak = std::max(peak, bytes);
  return peak;
}

}  // namespace espalier
