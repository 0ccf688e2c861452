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

// Kept for backward by one layer, bytes per token. Up to its attention: the layer's input, the first norm's
// output and factor, q, k, v, the attention's output and log-sum-exp; with norms of q and k also these before
// the norm. Behind it: the MLP half's input, its norm's output and factor, gate, up and their product.
struct LayerBytes {
  double attention;
  double behind;

  explicit LayerBytes(const MemoryModel& model) {
    const Widths w(model.shape);
    const double element = real(model.element_bytes), sum = real(model.sum_bytes);
    attention = (2 * w.hidden + 2 * w.query + 2 * w.key) * element + (1 + w.heads) * sum;
    if (model.query_key_norm) attention += (w.query + w.key) * element + (w.heads + w.key_heads) * sum;
    behind = (2 * w.hidden + 3 * w.inner) * element + sum;
  }
  double whole() const { return attention + behind; }
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
double head_row_bytes(const MemoryModel& model) {
  return 2 * real(model.shape.hidden_size * model.element_bytes) + 2 * real(model.sum_bytes) + 4 * 8;
}

// What one layer makes for its backward pass; the last one goes on behind its attention for head rows alone,
// with a copy of what the attention has for them.
double layer_bytes(const MemoryModel& model, const Load& load, bool is_last) {
  const LayerBytes bytes(model);
  if (!is_last) return real(load.tokens) * bytes.whole();
  const double copy =
      load.head_rows < load.tokens ? Widths(model.shape).query * real(model.element_bytes) : 0;
  return real(load.tokens) * bytes.attention + real(load.head_rows) * (bytes.behind + copy);
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
         kept_layer_bytes(model, load, true) + real(load.head_rows) * head_row_bytes(model) +
         real(load.terms * (model.term.batch + model.term.graph));
}

double context_gradient_bytes(const MemoryModel& model, const Load& load) {
  if (!load.has_readers) return 0;
  return real(load.tokens) * context_bytes(model) * real(model.sum_bytes) / real(model.element_bytes);
}

// Gradients are added to their sums in place. Only where these are made do they grow with the pass. Beside
// them a weight is widened, or its product in a lower precision is rounded, then added in that of the sums.
struct Made {
  double embedding, layer, parameters;  // gradients of
  double product;                       // per element of a weight, while its gradient is added
  double widest;                        // that of the largest weight in a layer

  Made(const MemoryModel& model, bool has_sums) {
    const ModelShape& shape = model.shape;
    const double sum = has_sums ? 0 : real(model.sum_bytes);
    embedding = real(shape.vocab_size * shape.hidden_size) * sum;
    layer = real(linear_parameters_per_layer(shape)) * sum;
    parameters = real(model.num_parameters) * sum;
    const double rounded =
        model.element_bytes < model.sum_bytes ? real(model.element_bytes + model.sum_bytes) : 0;
    product = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : rounded;
    widest = real(shape.hidden_size * shape.intermediate_size) * product;
  }
};

// The moment of a layer's backward pass that needs most: the gradients of the MLP's width, where the widened
// input, gradient and result of the last projection stand beside each other; or those of q, k, v beside the
// attention's own copies, or those around a norm; a layer that is computed again stands there whole.
double momentary_bytes(const MemoryModel& model, const Load& load, bool is_last) {
  const Widths w(model.shape);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes);
  const double widened = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : 0;
  const double behind_attention =
      std::max((2 * w.inner + w.hidden) * element,
               widened > 0 ? (2 * w.inner + w.hidden) * widened + (w.inner + w.hidden) * element : 0);
  const double attention =
      std::max((2 * w.query + 4 * w.key) * sum + w.hidden * element, 4 * w.hidden * element);
  const bool again = model.checkpoint_activations == CheckpointActivations::kLayer;
  return std::max(real(is_last ? load.head_rows : load.tokens) * behind_attention,
                  real(load.tokens) * attention) +
         (again ? layer_bytes(model, load, is_last) : 0);
}

// LM head: its weight's gradient, the gradients of its rows before and after the last norm, a block of
// logits.
double head_bytes(const MemoryModel& model, const Load& load, const Made& made) {
  if (load.head_rows == 0) return 0;
  const double rows = real(load.head_rows), vocabulary = real(model.shape.vocab_size);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes);
  const double hidden = real(model.shape.hidden_size);
  const double widened = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : 0;
  const double logits = std::min(real(model.logit_block_bytes), rows * vocabulary * sum);
  const double product = std::min(vocabulary, logits / (rows * sum)) * hidden * made.product;
  return made.embedding + product + real(model.logit_blocks) * logits +
         rows * hidden * (sum + widened + element);
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
  const Made made(model, has_sums);
  const double layers = real(model.shape.num_hidden_layers), tokens = real(load.tokens);
  const double context = context_gradient_bytes(model, load) +
                         (model.checkpoint_activations == CheckpointActivations::kPiece && load.has_readers
                              ? tokens * context_bytes(model)
                              : 0);
  const double graph = graph_bytes(model, load);
  const double terms = graph + real(load.terms * model.term.running);
  // Backward through the last layer, where everything is still there; through the one before it; and through
  // the first, where all gradients are.
  const double head_gradient = load.head_rows == 0 ? 0 : made.embedding;
  const double last_layer =
      graph + head_gradient + made.layer + made.widest + momentary_bytes(model, load, true);
  double one_before = 0, first_layer = 0;
  if (layers > 1) {
    const double without_last = graph - kept_layer_bytes(model, load, true);
    const double of_layer = made.widest + momentary_bytes(model, load, false);
    one_before = without_last + head_gradient + 2 * made.layer + of_layer;
    first_layer =
        without_last - (layers - 2) * kept_layer_bytes(model, load, false) + made.parameters + of_layer;
  }
  const double rounded =
      model.element_bytes < model.sum_bytes ? real(model.element_bytes + model.sum_bytes) : 0;
  const double input = real(model.shape.hidden_size) * (real(model.element_bytes) + rounded);
  const double end = made.parameters + made.widest + tokens * (input + outer_bytes(model));
  const double head = graph + head_bytes(model, load, made);
  return context + std::max({terms, head, last_layer, one_before, first_layer, end});
}

double widened_weight_bytes(const MemoryModel& model) {
  if (model.operand_bytes <= model.element_bytes) return 0;
  return real(model.shape.num_hidden_layers * linear_parameters_per_layer(model.shape) * model.operand_bytes);
}

std::vector<double> peak_bytes(const MemoryModel& model, std::span<const Load> loads) {
  const bool several = std::ranges::count_if(loads, [](const Load& load) { return load.tokens > 0; }) > 1;
  const double resident = resident_bytes(model) + (several ? widened_weight_bytes(model) : 0);
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
