// SPDX-License-Identifier: Apache-2.0
#include "espalier/cli/flags/arguments.h"
#include "espalier/cli/flags/model_flags.h"
#include "espalier/cli/print/help.h"

namespace espalier::cli {
namespace {

constexpr const char* kByObjective = "by objective";

void add_clipping(CLI::App* command, ObjectiveFlags* flags) {
  command
      ->add_option("--clip-low", flags->clip_low,
                   "Policy gradients: clip the ratio at 1 minus this (0.2; gspo 0.0003; cispo 1: not at all)")
      ->check(real_from(0, 1))
      ->default_str(kByObjective);
  command
      ->add_option("--clip-high", flags->clip_high,
                   "Policy gradients: clip the ratio at 1 plus this (0.2; dapo 0.28; gspo 0.0004; cispo 4)")
      ->check(real_from(0))
      ->default_str(kByObjective);
  command
      ->add_option(
          "--dual-clip", flags->dual_clip,
          "ppo, grpo, dr_grpo, dapo: where the advantage is negative, let the ratio count as this at "
          "most, such as 3 (0: off)")
      ->check(real_from(0))
      ->capture_default_str();
}

void add_advantages(CLI::App* command, ObjectiveFlags* flags) {
  command
      ->add_option(
          "--baseline", flags->baseline,
          "Advantages from rewards: subtract the mean of the group (mean), of its other rows "
          "(leave-one-out: the default of reinforce), of the groups before it in the file (running), or "
          "nothing (none)")
      ->check(CLI::IsMember(baseline_names()))
      ->default_str(kByObjective);
  command
      ->add_option("--scale-rewards", flags->scale_rewards,
                   "Advantages from rewards: divide by the standard deviation of the group (group), or not "
                   "(none: the default of dr_grpo and reinforce, and with other baselines than those of a "
                   "group)")
      ->check(CLI::IsMember({"group", "none"}))
      ->default_str(kByObjective);
  command
      ->add_option(
          "--turn-discount", flags->turn_discount,
          "Advantages from rewards: a reward counts this much less for each turn before the one that it "
          "is given for, the last one or, in `turn_rewards`, its own. A turn is a stretch of tokens with "
          "loss")
      ->check(real_from(0, 1))
      ->capture_default_str();
}

void add_importance_weights(CLI::App* command, ObjectiveFlags* flags) {
  command
      ->add_option(
          "--importance-weights", flags->importance_weights,
          "Policy gradients: use the ratio to the policy of `logprobs` as a weight without gradient, "
          "at most --importance-cap (truncate), or 0 outside of --importance-floor to "
          "--importance-cap (mask). The ratio that is clipped then begins at 1 in every step")
      ->check(CLI::IsMember(importance_weights_names()))
      ->capture_default_str();
  command
      ->add_option("--importance-level", flags->importance_level,
                   "Weights are ratios of tokens, or products over the tokens of a trajectory (sequence)")
      ->check(CLI::IsMember(importance_level_names()))
      ->capture_default_str();
  command->add_option("--importance-cap", flags->importance_cap, "Largest importance weight")
      ->check(real_from(1))
      ->capture_default_str();
  command->add_option("--importance-floor", flags->importance_floor, "Smallest importance weight (mask)")
      ->check(real_from(0, 1))
      ->capture_default_str();
}

void add_divergence(CLI::App* command, ObjectiveFlags* flags) {
  command
      ->add_option("--kl-coef", flags->kl_coef,
                   "Policy gradients: add this times the estimated KL divergence from the model of "
                   "`ref_logprobs`")
      ->check(real_from(0))
      ->capture_default_str();
  command
      ->add_option("--kl-estimator", flags->kl_estimator,
                   "With d = log p - log p_ref: d (k1), d^2 / 2 (k2), or exp(-d) - 1 + d (k3)")
      ->check(CLI::IsMember(kl_estimator_names()))
      ->capture_default_str();
  command
      ->add_option("--kl-in", flags->kl_in,
                   "Add it to the loss of every token, or subtract its sum over a trajectory, taken from "
                   "`logprobs`, from the reward")
      ->check(CLI::IsMember(kl_place_names()))
      ->capture_default_str();
}

void add_distillation(CLI::App* command, ObjectiveFlags* flags) {
  command
      ->add_option(
          "--ref-topk", flags->ref_topk,
          "opd: compare the sampled token alone, by `ref_logprobs` (none), or the teacher's most likely "
          "tokens, by `ref_topk_ids` and `ref_topk_logprobs`: with all other tokens as one (rest), or among "
          "themselves (renormalize)")
      ->check(CLI::IsMember(ref_topk_names()))
      ->capture_default_str();
}

void add_preferences(CLI::App* command, ObjectiveFlags* flags) {
  command
      ->add_option(
          "--beta", flags->beta,
          "dpo, ipo, kto: how closely the policy is held to the model of `ref_logprobs` (0.1); simpo: "
          "scale of rewards (2); orpo: weight of the odds ratio (0.1)")
      ->check(real_from(0))
      ->default_str(kByObjective);
  command
      ->add_option("--margin", flags->margin,
                   "simpo: by how much the chosen reward should be above the rejected one")
      ->check(real_from(0))
      ->capture_default_str();
  command->add_option("--chosen-weight", flags->chosen_weight, "kto: weight of chosen trajectories")
      ->check(real_from(0))
      ->capture_default_str();
  command->add_option("--rejected-weight", flags->rejected_weight, "kto: weight of rejected trajectories")
      ->check(real_from(0))
      ->capture_default_str();
}

void add_routers(CLI::App* command, ObjectiveFlags* flags) {
  command
      ->add_option(
          "--router-aux-loss-coef", flags->router_aux_loss_coef,
          "Mixture of experts: add this times the load-balancing loss of the routers, such as 0.001. "
          "It counts every token as often as trajectories pass it")
      ->check(real_from(0))
      ->capture_default_str();
  command
      ->add_option(
          "--router-z-loss-coef", flags->router_z_loss_coef,
          "Mixture of experts: add this times the z-loss, which keeps the routers' logits small, such "
          "as 0.001")
      ->check(real_from(0))
      ->capture_default_str();
}

}  // namespace

void ObjectiveFlags::add(CLI::App* command) {
  const HelpGroup group(command, kObjectiveGroup);
  command
      ->add_option("--objective", objective,
                   "sft: cross-entropy; ppo, grpo, dr_grpo, dapo: clipped policy gradients; gspo: the same "
                   "with one ratio for a trajectory; cispo: with the clipped ratio as a weight; reinforce: "
                   "without a ratio; opd: distillation from a teacher on own samples; dpo, ipo, simpo, orpo: "
                   "preferences between the two trajectories of a pair; kto: single ones "
                   "(docs/objectives.md)")
      ->check(CLI::IsMember(objective_names()))
      ->capture_default_str();
  command
      ->add_option("--shared-targets", shared_targets,
                   "For a target token that several trajectories share and train on: sum keeps every "
                   "trajectory's term, once keeps one, with the mean of their advantages")
      ->check(CLI::IsMember(shared_targets_names()))
      ->capture_default_str();
  command
      ->add_option("--normalize", normalize,
                   "Over the whole optimiser step: average the loss over tokens (token), over sequences the "
                   "mean (sequence; default of gspo) or sum (sequence-sum; dr_grpo, reinforce, preferences) "
                   "of their tokens, over groups the mean of their tokens (group), or divide it by a NUMBER")
      ->check(fault_of([](const std::string& text) {
                ObjectiveOptions unused;
                parse_normalize(text, &unused);
              }),
              "token|sequence|sequence-sum|group|NUMBER")
      ->default_str(kByObjective);
  add_clipping(command, this);
  add_advantages(command, this);
  add_importance_weights(command, this);
  add_divergence(command, this);
  add_distillation(command, this);
  add_preferences(command, this);
  command
      ->add_option("--entropy-coef", entropy_coef,
                   "Subtract this times the entropy of every token's distribution from the loss, such as "
                   "0.001")
      ->check(real_from(0))
      ->capture_default_str();
  command->add_flag("--log-entropy", log_entropy,
                    "Report the metric entropy without --entropy-coef too: a second pass of the LM head");
  add_routers(command, this);
}

ObjectiveOptions ObjectiveFlags::options() const {
  ObjectiveOptions options = default_options(parse_objective(objective));
  options.shared_targets = parse_shared_targets(shared_targets);
  if (normalize) parse_normalize(*normalize, &options);
  options.clip_low = clip_low.value_or(options.clip_low);
  options.clip_high = clip_high.value_or(options.clip_high);
  options.dual_clip = dual_clip;
  if (baseline) options.baseline = parse_baseline(*baseline);
  const bool is_of_group = options.baseline == Baseline::kMean || options.baseline == Baseline::kLeaveOneOut;
  options.scale_rewards = scale_rewards ? *scale_rewards == "group" : options.scale_rewards && is_of_group;
  options.turn_discount = turn_discount;
  options.importance_weights = parse_importance_weights(importance_weights);
  options.importance_level = parse_importance_level(importance_level);
  options.importance_cap = importance_cap;
  options.importance_floor = importance_floor;
  options.kl_coef = kl_coef;
  options.kl_estimator = parse_kl_estimator(kl_estimator);
  options.kl_in = parse_kl_place(kl_in);
  options.ref_topk = parse_ref_topk(ref_topk);
  options.beta = beta.value_or(options.beta);
  options.margin = margin;
  options.chosen_weight = chosen_weight;
  options.rejected_weight = rejected_weight;
  options.entropy_coef = entropy_coef;
  options.log_entropy = log_entropy;
  options.router_aux_loss_coef = router_aux_loss_coef;
  options.router_z_loss_coef = router_z_loss_coef;
  check_objective_options(options);
  return options;
}

std::vector<std::string> ObjectiveFlags::names() {
  CLI::App parser;
  ObjectiveFlags flags;
  flags.add(&parser);
  std::vector<std::string> names;
  for (const CLI::Option* option : parser.get_options()) {
    const std::string& name = option->get_lnames().front();
    if (name != "help") names.push_back(name);
  }
  return names;
}

nlohmann::ordered_json ObjectiveFlags::resolved() const {
  const ObjectiveOptions resolved = options();
  return {{"normalize", normalize_text(resolved)},
          {"clip-low", resolved.clip_low},
          {"clip-high", resolved.clip_high},
          {"baseline", to_string(resolved.baseline)},
          {"scale-rewards", resolved.scale_rewards ? "group" : "none"},
          {"beta", resolved.beta}};
}

}  // namespace espalier::cli
