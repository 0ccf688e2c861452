#include "espalier/plan/memory_model.h"

#include <algorithm>

namespace espalier {
namespace {

// Gradients of logits are kept in blocks of at most this size (ops/logit_blocks.h).
constexpr double kLogitBlockBytes = 16 << 20;
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

// Kept for backward by one layer, bytes per token: the input of the layer and of its MLP half, both norms'
// outputs and factors, q, k, v, the attention's output and log-sum-exp, and the MLP's gate, up and their
// product. With norms of q and k also these before the norm.
double layer_bytes(const MemoryModel& model) {
  const Widths w(model.shape);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes);
  double bytes = (4 * w.hidden + 2 * w.query + 2 * w.key + 3 * w.inner) * element + (2 + w.heads) * sum;
  if (model.query_key_norm) bytes += (w.query + w.key) * element + (w.heads + w.key_heads) * sum;
  return bytes;
}

double context_bytes(const MemoryModel& model) {
  return 2 * Widths(model.shape).key * real(model.element_bytes) * real(model.shape.num_hidden_layers);
}

// Outside the layers, bytes per token: indices, rotary tables, the last norm's input and factor.
double outer_bytes(const MemoryModel& model) {
  return kIndexBytesPerToken + real(model.shape.head_dim * model.sum_bytes) +
         real(model.shape.hidden_size * model.element_bytes) + real(model.sum_bytes);
}

// The LM head, bytes per row: hidden state and log-sum-exp; log-probability, row and target of its edges.
double head_row_bytes(const MemoryModel& model) {
  return real(model.shape.hidden_size * model.element_bytes) + real(model.sum_bytes) + 4 * 8;
}

// What is kept of each layer by a micro-batch that waits for its backward pass with its graph.
double kept_layer_bytes(const MemoryModel& model, bool has_readers) {
  if (model.checkpoint_activations != CheckpointActivations::kLayer) return layer_bytes(model);
  const double input = real(model.shape.hidden_size * model.element_bytes);
  return input + (has_readers ? context_bytes(model) / real(model.shape.num_hidden_layers) : 0);
}

double graph_bytes(const MemoryModel& model, const Load& load) {
  return real(load.tokens) * (outer_bytes(model) + real(model.shape.num_hidden_layers) *
                                                       kept_layer_bytes(model, load.has_readers)) +
         real(load.head_rows) * head_row_bytes(model) +
         real(load.terms * (model.term.batch + model.term.graph));
}

double context_gradient_bytes(const MemoryModel& model, const Load& load) {
  if (!load.has_readers) return 0;
  return real(load.tokens) * context_bytes(model) * real(model.sum_bytes) / real(model.element_bytes);
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
  const ModelShape& shape = model.shape;
  const Widths w(shape);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes), tokens = real(load.tokens);
  const double layers = real(shape.num_hidden_layers);
  // Gradients are added to their sums in place. Only where these are made do they grow with the pass.
  // Beside them a weight is widened, or its product in a lower precision is rounded, then added in that of
  // the sums.
  const double sum_growth = has_sums ? 0 : sum;
  const double rounded = model.element_bytes < model.sum_bytes ? element + sum : 0;
  const double widened = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : 0;
  const double product = widened > 0 ? widened : rounded;
  const double embedding = real(shape.vocab_size * shape.hidden_size) * sum_growth;
  const double parameters = real(model.num_parameters) * sum_growth + w.hidden * w.inner * product;
  const double layer_parameters =
      real(linear_parameters_per_layer(shape)) * sum_growth + w.hidden * w.inner * product;
  const double context = context_gradient_bytes(model, load) +
                         (model.checkpoint_activations == CheckpointActivations::kPiece && load.has_readers
                              ? tokens * context_bytes(model)
                              : 0);
  const double graph = graph_bytes(model, load);

  // The moment of a layer's backward pass that needs most: the gradients of the MLP's width, where the
  // widened input, gradient and result of the last projection stand beside each other; or those of q, k, v
  // beside the attention's own copies, or those around a norm; a layer that is computed again stands there
  // whole.
  double momentary =
      tokens *
      std::max({(2 * w.inner + w.hidden) * element,
                widened > 0 ? (2 * w.inner + w.hidden) * widened + (w.inner + w.hidden) * element : 0,
                (2 * w.query + 4 * w.key) * sum + w.hidden * element, 4 * w.hidden * element});
  if (model.checkpoint_activations == CheckpointActivations::kLayer) momentary += tokens * layer_bytes(model);

  // LM head: its weight's gradient, the gradient of the rows and of all hidden states, a block of logits.
  const double rows = real(load.head_rows), vocabulary = real(shape.vocab_size);
  const double logits = std::min(kLogitBlockBytes, rows * vocabulary * sum);
  const double head_product = std::min(vocabulary, logits / (rows * sum)) * w.hidden * product;
  const double terms = graph + real(load.terms * model.term.running);
  const double head = load.head_rows == 0
                          ? 0
                          : graph + embedding + head_product + 2 * logits +
                                rows * w.hidden * (sum + widened) + tokens * w.hidden * element;
  // First layer backward: everything still there. Last one: all gradients.
  const double head_gradient = load.head_rows == 0 ? 0 : embedding;
  const double first_layer = graph + head_gradient + layer_parameters + momentary;
  const double last_layer =
      graph - tokens * (layers - 1) * kept_layer_bytes(model, load.has_readers) + parameters + momentary;
  const double end = parameters + tokens * (w.hidden * (element + rounded) + outer_bytes(model));
  return context + std::max({terms, head, first_layer, last_layer, end});
}

std::vector<double> peak_bytes(const MemoryModel& model, std::span<const Load> loads) {
  const double resident = resident_bytes(model);
  std::vector<double> held(loads.size());    // by the micro-batch and its ancestors
  std::vector<double> tokens(loads.size());  // of the same
  // A layer's backward pass makes the gradients of all context that it reads, whatever part of it.
  const double context_gradient = 2 * Widths(model.shape).key * real(model.sum_bytes);
  std::vector<double> peaks(loads.size());
  bool has_sums = false;  // the first backward pass of a step has its gradients become the sums
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
