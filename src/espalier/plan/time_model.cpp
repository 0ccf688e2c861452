// SPDX-License-Identifier: Apache-2.0
#include "espalier/plan/time_model.h"

namespace espalier {

TimeFeatures time_features(const ModelShape& shape, const Load& load) {
  const auto layers = static_cast<double>(shape.num_hidden_layers);
  return {1,
          layers,
          layer_tokens(shape, {load.tokens, load.pairs, load.logit_rows}),
          layers * static_cast<double>(load.pairs),
          layers * static_cast<double>(load.mask_blocks),
          static_cast<double>(load.logit_rows)};
}

namespace {

struct Rates {
  double flops_per_second;
  double bytes_per_second;
  double seconds_per_mask_block;  // of attention
  double seconds_per_layer;       // to launch its operators
};
constexpr Rates kCpuRates = {1e11, 1e10, 80e-6, 0};
// Half of what products of bfloat16 reach on a Hopper, its memory, and about 40 launches of 5 us a layer.
constexpr Rates kGpuRates = {3e14, 3e12, 1e-6, 200e-6};

}  // namespace

TimeModel assumed_time_model(const ModelShape& shape, Processor processor) {
  const Rates& rates = processor == Processor::kCpu ? kCpuRates : kGpuRates;
  const auto layers = static_cast<double>(shape.num_hidden_layers);
  const auto seconds_of = [&](double flops) { return flops / rates.flops_per_second; };
  // Weights are read in both passes, and their gradient sums read and written, once per micro-batch.
  const double embedding = 4.0 * static_cast<double>(shape.vocab_size * shape.hidden_size);
  const auto layer = static_cast<double>(linear_parameters_per_layer(shape));
  return {shape,
          {4 * embedding / rates.bytes_per_second,
           3 * 4 * layer / rates.bytes_per_second + rates.seconds_per_layer, seconds_of(6 * layer),
           seconds_of(step_flops(shape, {0, 1, 0}).attention) / layers, rates.seconds_per_mask_block,
           seconds_of(step_flops(shape, {0, 0, 1}).head)}};
}

double predicted_seconds(const TimeModel& model, const Load& load,
                         CheckpointActivations checkpoint_activations) {
  // The share of the forward pass in forward and backward. Recomputation adds one more forward pass.
  constexpr double kLinearForward = 2.0 / 6, kAttentionForward = 4.0 / 14, kMaskBlockForward = 3.0 / 8;
  const bool again = checkpoint_activations == CheckpointActivations::kLayer ||
                     (checkpoint_activations == CheckpointActivations::kPiece && load.has_readers);
  const TimeFeatures forward_again = {0, 0, kLinearForward, kAttentionForward, kMaskBlockForward, 0};
  const TimeFeatures features = time_features(model.shape, load);
  double seconds = 0;
  for (int i = 0; i < kNumTimeFeatures; ++i) {
    seconds += model.seconds[i] * features[i] * (again ? 1 + forward_again[i] : 1);
  }
  return seconds;
}

}  // namespace espalier
