// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/cost_model.h"

#include <algorithm>

namespace espalier {

Work& Work::operator+=(const Work& other) {
  tokens += other.tokens;
  pairs += other.pairs;
  logit_rows += other.logit_rows;
  window_pairs.resize(std::max(window_pairs.size(), other.window_pairs.size()));  // empty work has no windows
  for (size_t i = 0; i < other.window_pairs.size(); ++i) window_pairs[i] += other.window_pairs[i];
  return *this;
}

namespace {

double recurrence_work(const ModelCost& model, const Work& work) {
  return model.recurrence() * static_cast<double>(work.tokens);
}

// The sum over all layers of weights times tokens that pass them.
double linear_work(const ModelCost& model, const Work& work) {
  return model.weights() * static_cast<double>(work.tokens) -
         static_cast<double>(model.layers.back().weights_after_mixer) *
             static_cast<double>(work.tokens - work.logit_rows);
}

// Likewise for adapters.
double adapter_work(const ModelCost& model, const Work& work) {
  return model.layer_adapters() * static_cast<double>(work.tokens) -
         static_cast<double>(model.layers.back().adapter_weights_after_mixer) *
             static_cast<double>(work.tokens - work.logit_rows);
}

struct FlopFactors {
  double linear;      // per weight and token
  double recurrence;  // per multiply-add
  double attention;   // per element of a head and visible pair
  double head;        // per weight and row
  double gradient;    // the part of `linear` and `head` for the gradients of weights
};

FlopCount flops_of(const ModelCost& model, const Work& work, const FlopFactors& factors) {
  const double pair_elements = weighted_pairs(model, work.pairs, work.window_pairs,
                                              [](const LayerCost& layer) { return layer.pair_elements; });
  const double spared = model.frozen ? factors.gradient : 0;
  FlopCount flops;
  flops.linear = (factors.linear - spared) * linear_work(model, work) +
                 factors.linear * adapter_work(model, work) +
                 factors.recurrence * recurrence_work(model, work);
  flops.attention = factors.attention * pair_elements;
  const double head = static_cast<double>(model.hidden_size * model.vocab_size);
  const double head_adapter = model.adapter_weights() - model.layer_adapters();
  flops.head =
      ((factors.head - spared) * head + factors.head * head_adapter) * static_cast<double>(work.logit_rows);
  return flops;
}

constexpr FlopFactors kForward{.linear = 2, .recurrence = 2, .attention = 4, .head = 2, .gradient = 0};
constexpr FlopFactors kBackward{.linear = 4, .recurrence = 6, .attention = 10, .head = 6, .gradient = 2};

}  // namespace

double layer_tokens(const ModelCost& model, const Work& work) {
  const double share = model.frozen ? 1 - kBackward.gradient / (kForward.linear + kBackward.linear) : 1;
  return (share * linear_work(model, work) + adapter_work(model, work) + recurrence_work(model, work)) /
         (model.weights() + model.recurrence()) * model.num_layers();
}

FlopCount forward_flops(const ModelCost& model, const Work& work) {
  return flops_of(model, work, kForward);
}

FlopCount backward_flops(const ModelCost& model, const Work& work) {
  return flops_of(model, work, kBackward);
}

FlopCount step_flops(const ModelCost& model, const Work& work) {
  return flops_of(model, work,
                  {.linear = kForward.linear + kBackward.linear,
                   .recurrence = kForward.recurrence + kBackward.recurrence,
                   .attention = kForward.attention + kBackward.attention,
                   .head = kForward.head + kBackward.head,
                   .gradient = kForward.gradient + kBackward.gradient});
}

}  // namespace espalier
