// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/memory_model.h"

#include <algorithm>

namespace espalier {
namespace {

constexpr double kIndexBytesPerToken = 8 + 8 + 4;  // input_ids, position_ids, subtree_end

double real(int64_t count) {
  return static_cast<double>(count);
}

// What a rank has of a micro-batch.
Load part_of(const MemoryModel& model, Load load) {
  for (int64_t* count : {&load.tokens, &load.logit_rows, &load.terms}) {
    *count = (*count + model.context_parallel - 1) / model.context_parallel;
  }
  return load;
}

// Bytes that a rank receives, at most: the keys and values of the other ranks, where each has so many tokens.
// Those of a layer are kept for its backward pass unless the layer is recomputed. While a layer exchanges,
// rows that are sent, received, and added up are there beside them, and their gradients.
double received_bytes(const MemoryModel& model, int64_t tokens) {
  constexpr int64_t kCopies = 4;
  const int64_t largest =
      std::ranges::max(model.cost.layers, {}, &LayerCost::context_per_token).context_per_token;
  const bool is_kept = model.checkpoint_activations != CheckpointActivations::kLayer;
  const int64_t width = kCopies * largest + (is_kept ? model.cost.context_per_token() : largest);
  return real((model.context_parallel - 1) * tokens) * real(width * model.element_bytes);
}

double bytes_of(const MemoryModel& model, const KeptPerToken& kept) {
  return real(kept.elements * model.element_bytes + kept.statistics * model.sum_bytes);
}

// Bytes of the context that a micro-batch keeps for its descendants, for one layer or all.
double context_bytes(const MemoryModel& model, const Load& load, const LayerCost& cost) {
  return real(load.tokens) * real(cost.context_per_token * model.element_bytes) +
         real(load.cuts) * real(cost.context_per_cut * model.sum_bytes);
}

double context_bytes(const MemoryModel& model, const Load& load) {
  return context_bytes(model, load,
                       LayerCost{.context_per_token = model.cost.context_per_token(),
                                 .context_per_cut = model.cost.context_per_cut()});
}

// Gradients of context are in the precision of sums: those of all layers plus those of the largest layer.
double context_gradient_bytes(const MemoryModel& model, const Load& load) {
  if (!load.has_readers()) return 0;
  return (real(load.tokens) * real(model.cost.context_per_token()) +
          real(load.cuts) * real(model.cost.context_per_cut())) *
         real(model.sum_bytes);
}

double largest_context_gradient_bytes(const MemoryModel& model, const Load& whole) {
  const Load load = part_of(model, whole);
  double most = 0;
  for (const LayerCost& layer : model.cost.layers) {
    most = std::max(most, real(load.tokens) * real(layer.context_per_token) +
                              real(load.cuts) * real(layer.context_per_cut));
  }
  return most * real(model.sum_bytes);
}

// Outside the layers, bytes per token: indices, rotary tables.
double outer_bytes(const MemoryModel& model) {
  return kIndexBytesPerToken + real(model.cost.position_tables() * model.sum_bytes);
}

// The LM head, bytes per row: the last norm's input and factor; hidden state and log-sum-exp;
// log-probability, row and target of its edges.
double logit_row_bytes(const MemoryModel& model) {
  return 2 * real(model.cost.hidden_size * model.element_bytes) + 2 * real(model.sum_bytes) + 4 * 8;
}

// Bytes of the gradient sums of all trained parameters.
double gradient_sum_bytes(const MemoryModel& model) {
  return trained_parameters(model) * real(model.sum_bytes);
}

bool is_last(const MemoryModel& model, size_t layer) {
  return layer + 1 == model.cost.layers.size();
}

// The tokens that a layer works on after its mixer.
int64_t tokens_after_mixer(const MemoryModel& model, const Load& load, size_t layer) {
  return is_last(model, layer) && !model.whole_last_layer ? load.logit_rows : load.tokens;
}

// Bytes that one layer saves for its backward pass. After its mixer the last layer works on logit rows only,
// for which it copies the mixer's output.
double layer_bytes(const MemoryModel& model, const Load& load, size_t layer) {
  const LayerCost& cost = model.cost.layers[layer];
  const double mixer = bytes_of(model, cost.kept_by_mixer), after = bytes_of(model, cost.kept_after_mixer);
  const int64_t rows = tokens_after_mixer(model, load, layer);
  const double copy = rows < load.tokens ? real(cost.mixer_output * model.element_bytes) : 0;
  return real(load.tokens) * mixer + real(rows) * (after + copy);
}

// Bytes that a layer keeps while a micro-batch with its autograd graph waits for its backward pass.
double kept_layer_bytes(const MemoryModel& model, const Load& load, size_t layer) {
  if (model.checkpoint_activations != CheckpointActivations::kLayer) return layer_bytes(model, load, layer);
  return real(load.tokens) * real(model.cost.hidden_size * model.element_bytes) +
         (load.has_readers() ? context_bytes(model, load, model.cost.layers[layer]) : 0);
}

double graph_bytes(const MemoryModel& model, const Load& load) {
  double layers = 0;
  for (size_t i = 0; i < model.cost.layers.size(); ++i) layers += kept_layer_bytes(model, load, i);
  return real(load.tokens) * outer_bytes(model) + layers + real(load.logit_rows) * logit_row_bytes(model) +
         real(load.terms * (model.term_batch_bytes + model.term_graph_bytes)) +
         received_bytes(model, load.tokens);
}

// Memory for the gradients of weights. Gradients are accumulated into their sums in place, so they take no
// extra memory once the sums exist. In the first backward pass of a step memory grows as each layer's
// gradients become the sums. In addition, the operands of a weight's product are upcast or packed while it is
// multiplied, or the product is rounded to a lower precision and then converted to the precision of the sums.
struct WeightGradientBytes {
  double sum;                    // bytes per weight of sums that this pass allocates,
  double adapter_sum;            // and per weight of adapters
  double embedding, parameters;  // such sums of the embedding, of all parameters
  double temporary;              // bytes per element of a weight, while it is multiplied,
  double packed;                 // and per element of the product's packed operand
  double packed_rows;            // rows of the packed operand

  WeightGradientBytes(const MemoryModel& model, const Load& load, bool has_sums) {
    adapter_sum = has_sums ? 0 : real(model.sum_bytes);
    sum = model.cost.frozen ? 0 : adapter_sum;
    embedding = real(model.cost.vocab_size * model.cost.hidden_size) * sum;
    parameters = has_sums ? 0 : gradient_sum_bytes(model);
    const bool rounds = model.packed_bytes == 0 && model.element_bytes < model.sum_bytes;
    const double rounded = rounds ? real(model.element_bytes + model.sum_bytes) : 0;
    temporary = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : rounded;
    packed = real(model.packed_bytes);
    // The product for a weight's gradient packs up to 2048 tokens at a time (ops/gemm/panel_product.cpp).
    packed_rows = real(std::max(model.cost.hidden_size, std::min<int64_t>(load.tokens, 2048)));
  }

  // Temporary bytes for the largest weight of a layer, with its packed operand.
  double largest_weight(const MemoryModel& model, const LayerCost& layer) const {
    return real(layer.max_weight_rows) * (real(model.cost.hidden_size) * temporary + packed_rows * packed);
  }
};

// Peak temporary bytes in a layer's backward pass, the largest of: gradients of the MLP's width while the
// upcast input, gradient and result of the last projection exist; gradients of the mixer's inputs together
// with its copies; and gradients around a norm. With checkpointing by layer, the activations of the
// recomputed layer are added.
double temporary_bytes(const MemoryModel& model, const Load& load, size_t layer) {
  const LayerCost& cost = model.cost.layers[layer];
  const double hidden = real(model.cost.hidden_size), inner = real(cost.intermediate);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes);
  const double upcast = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : 0;
  const double after_mixer =
      std::max((2 * inner + hidden) * element,
               upcast > 0 ? (2 * inner + hidden) * upcast + (inner + hidden) * element : 0);
  const double mixer = std::max(real(cost.mixer_gradients) * sum + hidden * element, 4 * hidden * element);
  // Adapters are multiplied in the precision of sums.
  const double adapted = element < sum ? real(cost.max_adapted_features) * sum : 0;
  const bool again = model.checkpoint_activations == CheckpointActivations::kLayer;
  return std::max(real(tokens_after_mixer(model, load, layer)) * after_mixer, real(load.tokens) * mixer) +
         real(load.tokens) * adapted + (again ? layer_bytes(model, load, layer) : 0);
}

// Peak bytes in the backward pass of any layer. Activations are freed from the last layer to the first, while
// gradients are allocated.
double largest_layer_bytes(const MemoryModel& model, const Load& load, const WeightGradientBytes& gradients) {
  double kept = graph_bytes(model, load);
  double sums = load.logit_rows == 0 ? 0 : gradients.embedding;
  double most = 0;
  for (size_t i = model.cost.layers.size(); i-- > 0;) {
    const LayerCost& layer = model.cost.layers[i];
    sums += real(layer.weights + layer.idle_weights + layer.biases) * gradients.sum +
            real(layer.adapter_weights) * gradients.adapter_sum;
    if (i == 0 && !is_last(model, i)) sums = gradients.parameters;  // norms too
    most = std::max(most,
                    kept + sums + gradients.largest_weight(model, layer) + temporary_bytes(model, load, i));
    kept -= kept_layer_bytes(model, load, i);
  }
  return most;
}

// The LM head needs its weight's gradient, the gradients of its rows before and after the last norm, and a
// few blocks of logits.
double head_bytes(const MemoryModel& model, const Load& load, const WeightGradientBytes& gradients) {
  if (load.logit_rows == 0) return 0;
  const double rows = real(load.logit_rows), vocabulary = real(model.cost.vocab_size);
  const double element = real(model.element_bytes), sum = real(model.sum_bytes);
  const double hidden = real(model.cost.hidden_size);
  const double upcast = model.operand_bytes > model.element_bytes ? real(model.operand_bytes) : 0;
  const double logits = std::min(real(model.logit_block_bytes), rows * vocabulary * sum);
  const double product =
      std::min(vocabulary, logits / (rows * sum)) * hidden * (gradients.temporary + gradients.packed);
  const double rank = real(model.cost.head_rank);
  const double head_gradient = model.cost.frozen && rank == 0 ? 0 : real(model.head_gradient_bytes);
  const double composed = vocabulary * (hidden + rank) * (head_gradient + real(model.head_upcast_bytes));
  // With an adapter both factors of the logits are joined ones.
  const double joined = std::max(element, real(model.head_upcast_bytes));
  const double factors = rank > 0 ? (vocabulary + 2 * rows) * (hidden + rank) * joined : 0;
  const double adapter = factors + rank * (vocabulary + hidden) * gradients.adapter_sum;
  return gradients.embedding + product + composed + real(model.logit_blocks) * logits +
         rows * hidden * (sum + upcast + element) + adapter;
}

}  // namespace

double trained_parameters(const MemoryModel& model) {
  return model.cost.frozen ? model.cost.adapter_weights() : real(model.num_parameters);
}

double resident_bytes(const MemoryModel& model) {
  const double trained =
      gradient_sum_bytes(model) / real(model.sum_bytes) * model.optimizer_bytes_per_parameter;
  return real(model.num_parameters * model.element_bytes) +
         model.cost.adapter_weights() * real(model.sum_bytes) + gradient_sum_bytes(model) + trained;
}

double held_bytes(const MemoryModel& model, const Load& whole) {
  const Load load = part_of(model, whole);
  double kept = graph_bytes(model, load);
  if (model.checkpoint_activations == CheckpointActivations::kPiece) {
    kept = real(load.tokens) * kIndexBytesPerToken + context_bytes(model, load) +
           real(load.terms * model.term_batch_bytes);
  }
  return kept + context_gradient_bytes(model, load);
}

double running_bytes(const MemoryModel& model, const Load& whole, bool has_sums) {
  const Load load = part_of(model, whole);
  const WeightGradientBytes gradients(model, load, has_sums);
  const bool keeps_context =
      model.checkpoint_activations == CheckpointActivations::kPiece && load.has_readers();
  const double context =
      context_gradient_bytes(model, load) + (keeps_context ? context_bytes(model, load) : 0);
  const double graph = graph_bytes(model, load);
  const double terms = graph + real(load.terms * model.term_running_bytes);
  const double rounded =
      model.element_bytes < model.sum_bytes ? real(model.element_bytes + model.sum_bytes) : 0;
  const double input = real(model.cost.hidden_size) * (real(model.element_bytes) + rounded);
  double largest = 0;
  for (const LayerCost& layer : model.cost.layers)
    largest = std::max(largest, gradients.largest_weight(model, layer));
  const double end = gradients.parameters + largest + real(load.tokens) * (input + outer_bytes(model));
  const double head = graph + head_bytes(model, load, gradients);
  return context + std::max({terms, head, largest_layer_bytes(model, load, gradients), end});
}

double upcast_weight_bytes(const MemoryModel& model) {
  if (model.operand_bytes <= model.element_bytes) return 0;
  return model.cost.stored_weights() * real(model.operand_bytes);
}

std::vector<double> peak_bytes(const MemoryModel& model, std::span<const Load> loads) {
  const bool several = std::ranges::count_if(loads, [](const Load& load) { return load.tokens > 0; }) > 1;
  const double resident = resident_bytes(model) + (several ? upcast_weight_bytes(model) : 0);
  std::vector<double> held(loads.size());  // by the micro-batch and its ancestors
  // The largest layer's context gradients of each micro-batch and its ancestors. A layer's backward pass
  // allocates them for the whole context, even if it reads only a part.
  std::vector<double> gradients(loads.size());
  std::vector<double> received(loads.size());  // of what other ranks have of the context
  std::vector<double> peaks(loads.size());
  bool has_sums = false;  // in the first backward pass of a step, its gradients become the sums
  for (size_t m = 0; m < loads.size(); ++m) {
    const double above = loads[m].parent < 0 ? 0 : held[loads[m].parent];
    const double gradients_above = loads[m].parent < 0 ? 0 : gradients[loads[m].parent];
    held[m] = above + held_bytes(model, loads[m]);
    gradients[m] = gradients_above + largest_context_gradient_bytes(model, loads[m]);
    const bool is_first = !has_sums && loads[m].tokens > 0 && !loads[m].has_readers();
    const double received_above = loads[m].parent < 0 ? 0 : received[loads[m].parent];
    received[m] = received_above + received_bytes(model, part_of(model, loads[m]).tokens);
    peaks[m] =
        resident + above + gradients_above + received_above + running_bytes(model, loads[m], !is_first);
    if (!is_first) continue;
    peaks[m] -= gradient_sum_bytes(model);
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
