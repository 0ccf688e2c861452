// SPDX-License-Identifier: Apache-2.0
#include "espalier/train/run_settings.h"

#include <fmt/ranges.h>

#include <utility>
#include <vector>

#include "espalier/model/weights.h"
#include "espalier/train/epochs.h"

namespace espalier {

namespace {

nlohmann::ordered_json objective_settings(const ObjectiveOptions& objective) {
  return {{"objective", to_string(objective.kind)},
          {"shared-targets", to_string(objective.shared_targets)},
          {"normalize", normalize_text(objective)},
          {"clip-low", objective.clip_low},
          {"clip-high", objective.clip_high},
          {"dual-clip", objective.dual_clip},
          {"baseline", to_string(objective.baseline)},
          {"scale-rewards", objective.scale_rewards},
          {"turn-discount", objective.turn_discount},
          {"importance-weights", to_string(objective.importance_weights)},
          {"importance-level", to_string(objective.importance_level)},
          {"importance-cap", objective.importance_cap},
          {"importance-floor", objective.importance_floor},
          {"kl-coef", objective.kl_coef},
          {"kl-estimator", to_string(objective.kl_estimator)},
          {"kl-in", to_string(objective.kl_in)},
          {"ref-topk", to_string(objective.ref_topk)},
          {"beta", objective.beta},
          {"margin", objective.margin},
          {"chosen-weight", objective.chosen_weight},
          {"rejected-weight", objective.rejected_weight},
          {"entropy-coef", objective.entropy_coef},
          {"router-aux-loss-coef", objective.router_aux_loss_coef},
          {"router-z-loss-coef", objective.router_z_loss_coef}};
}

// Sources in their order, each with how many rows it had.
nlohmann::ordered_json mix_settings(const std::vector<MixSource>& mix) {
  auto sources = nlohmann::ordered_json::array();
  for (const MixSource& source : mix) {
    nlohmann::ordered_json settings = {
        {"name", source.name}, {"weight", source.weight}, {"rows", source.num_rows}};
    settings.update(objective_settings(source.objective));
    sources.push_back(std::move(settings));
  }
  return sources;
}

}  // namespace

RunSettings run_settings(const TrainOptions& options) {
  const OptimizerOptions& optimizer = options.optimizer;
  const PlanOptions& plan = options.plan;
  const LoraOptions lora = options.lora.value_or(LoraOptions{});
  const nlohmann::ordered_json others = {{"strategy", to_string(plan.strategy)},
                                         {"token-budget", plan.token_budget},
                                         {"memory-budget", plan.memory_budget},
                                         {"checkpoint-activations", to_string(plan.checkpoint_activations)},
                                         {"offload-context", plan.offload_context},
                                         {"lora-rank", lora.rank},
                                         {"lora-alpha", lora.alpha},
                                         {"lora-rslora", lora.rslora},
                                         {"lora-targets", fmt::format("{}", fmt::join(lora.targets, ","))},
                                         {"freeze-pad-embedding", options.freeze_pad_embedding},
                                         {"dtype", dtype_name(options.dtype)},
                                         {"save-dtype", dtype_name(options.save_dtype)},
                                         {"optimizer", to_string(optimizer.kind)},
                                         {"weight-decay", optimizer.weight_decay},
                                         {"max-grad-norm", optimizer.max_grad_norm},
                                         {"beta1", optimizer.beta1},
                                         {"beta2", optimizer.beta2},
                                         {"eps", optimizer.eps},
                                         {"scheduler", to_string(options.scheduler)},
                                         {"warmup-steps", options.warmup_steps},
                                         {"batch-size", options.batch_size},
                                         {"shuffle", to_string(options.shuffle)},
                                         {"seed", options.seed}};
  nlohmann::ordered_json fixed = objective_settings(options.objective);
  if (!options.mix.empty()) fixed["mix"] = mix_settings(options.mix);
  fixed.update(others);
  return {.fixed = std::move(fixed), .adjustable = {{"learning-rate", options.learning_rate}}};
}

}  // namespace espalier
