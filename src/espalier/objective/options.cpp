// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <initializer_list>

#include "espalier/base/option_names.h"
#include "espalier/base/options.h"

namespace espalier {
namespace {

constexpr auto kObjectives = std::to_array<Word<ObjectiveKind>>({{"sft", ObjectiveKind::kSft},
                                                                 {"ppo", ObjectiveKind::kPpo},
                                                                 {"grpo", ObjectiveKind::kGrpo},
                                                                 {"dr_grpo", ObjectiveKind::kDrGrpo},
                                                                 {"dapo", ObjectiveKind::kDapo},
                                                                 {"gspo", ObjectiveKind::kGspo},
                                                                 {"cispo", ObjectiveKind::kCispo},
                                                                 {"reinforce", ObjectiveKind::kReinforce},
                                                                 {"opd", ObjectiveKind::kOpd},
                                                                 {"dpo", ObjectiveKind::kDpo},
                                                                 {"ipo", ObjectiveKind::kIpo},
                                                                 {"kto", ObjectiveKind::kKto},
                                                                 {"simpo", ObjectiveKind::kSimpo},
                                                                 {"orpo", ObjectiveKind::kOrpo}});
constexpr auto kSharedTargets =
    std::to_array<Word<SharedTargets>>({{"sum", SharedTargets::kSum}, {"once", SharedTargets::kOnce}});
constexpr auto kBaselines = std::to_array<Word<Baseline>>({{"mean", Baseline::kMean},
                                                           {"leave-one-out", Baseline::kLeaveOneOut},
                                                           {"running", Baseline::kRunning},
                                                           {"none", Baseline::kNone}});
constexpr auto kImportanceWeights =
    std::to_array<Word<ImportanceWeights>>({{"none", ImportanceWeights::kNone},
                                            {"truncate", ImportanceWeights::kTruncate},
                                            {"mask", ImportanceWeights::kMask}});
constexpr auto kImportanceLevels = std::to_array<Word<ImportanceLevel>>(
    {{"token", ImportanceLevel::kToken}, {"sequence", ImportanceLevel::kSequence}});
constexpr auto kKlEstimators = std::to_array<Word<KlEstimator>>(
    {{"k1", KlEstimator::kK1}, {"k2", KlEstimator::kK2}, {"k3", KlEstimator::kK3}});
constexpr auto kKlPlaces =
    std::to_array<Word<KlPlace>>({{"loss", KlPlace::kLoss}, {"reward", KlPlace::kReward}});
constexpr auto kRefTopk = std::to_array<Word<RefTopk>>(
    {{"none", RefTopk::kNone}, {"rest", RefTopk::kRest}, {"renormalize", RefTopk::kRenormalize}});
constexpr auto kScaleRewards = std::to_array<Word<bool>>({{"group", true}, {"none", false}});
constexpr auto kNormalizers = std::to_array<Word<Normalize>>({{"token", Normalize::kToken},
                                                              {"sequence", Normalize::kSequence},
                                                              {"sequence-sum", Normalize::kSequenceSum},
                                                              {"group", Normalize::kGroup}});

bool is_one_of(ObjectiveKind kind, std::initializer_list<ObjectiveKind> kinds) {
  return std::ranges::find(kinds, kind) != kinds.end();
}

constexpr const char* kByObjective = "by objective";

// Whether the baseline is computed within the group, so that dividing by its deviation makes sense.
bool is_group_baseline(Baseline baseline) {
  return baseline == Baseline::kMean || baseline == Baseline::kLeaveOneOut;
}

void add_clipping(ObjectiveOptions* options, OptionList* list) {
  list->add("clip-low", &options->clip_low,
            "Policy gradients: clip the ratio at 1 minus this (0.2; gspo 0.0003; cispo 1: no lower bound)",
            {.least = 0, .most = 1, .derived = kByObjective});
  list->add("clip-high", &options->clip_high,
            "Policy gradients: clip the ratio at 1 plus this (0.2; dapo 0.28; gspo 0.0004; cispo 4)",
            {.least = 0, .derived = kByObjective});
  list->add("dual-clip", &options->dual_clip,
            "ppo, grpo, dr_grpo, dapo: upper bound of the ratio where the advantage is negative, such as 3 "
            "(0: off)",
            {.least = 0});
}

void add_advantages(ObjectiveOptions* options, OptionList* list) {
  list->add("baseline", &options->baseline, kBaselines,
            "Advantages from rewards: subtract the mean of the group (mean), of its other rows "
            "(leave-one-out: the default of reinforce), of the groups before it in the file (running), or "
            "nothing (none)",
            {.derived = kByObjective,
             .then = [options] { options->scale_rewards &= is_group_baseline(options->baseline); }});
  list->add("scale-rewards", &options->scale_rewards, kScaleRewards,
            "Advantages from rewards: divide by the standard deviation of the group (group), or do not "
            "(none: the default of dr_grpo, reinforce and baselines that do not use the group)",
            {.derived = kByObjective});
  list->add(
      "turn-discount", &options->turn_discount,
      "Advantages from rewards: discount factor per turn before the turn of a reward, which is the last "
      "one or, with `turn_rewards`, its own. A turn is a contiguous range of tokens with loss",
      {.least = 0, .most = 1});
}

void add_importance_weights(ObjectiveOptions* options, OptionList* list) {
  list->add("importance-weights", &options->importance_weights, kImportanceWeights,
            "Policy gradients: use the ratio to the policy of `logprobs` as a weight without gradient, "
            "at most --importance-cap (truncate), or 0 outside of --importance-floor to "
            "--importance-cap (mask). The clipped ratio then starts at 1 in every step");
  list->add("importance-level", &options->importance_level, kImportanceLevels,
            "Weights are ratios of tokens, or products over the tokens of a trajectory (sequence)");
  list->add("importance-cap", &options->importance_cap, "Largest importance weight", {.least = 1});
  list->add("importance-floor", &options->importance_floor, "Smallest importance weight (mask)",
            {.least = 0, .most = 1});
}

void add_references(ObjectiveOptions* options, OptionList* list) {
  list->add("kl-coef", &options->kl_coef,
            "Policy gradients: add this times the estimated KL divergence from the model of "
            "`ref_logprobs`",
            {.least = 0});
  list->add("kl-estimator", &options->kl_estimator, kKlEstimators,
            "With d = log p - log p_ref: d (k1), d^2 / 2 (k2), or exp(-d) - 1 + d (k3)");
  list->add("kl-in", &options->kl_in, kKlPlaces,
            "Add the divergence to the loss of every token, or subtract its sum over a trajectory, computed "
            "from `logprobs`, from the reward");
  list->add(
      "ref-topk", &options->ref_topk, kRefTopk,
      "opd: compare the sampled token alone, by `ref_logprobs` (none), or the teacher's most likely "
      "tokens, by `ref_topk_ids` and `ref_topk_logprobs`: with all other tokens as one (rest), or among "
      "themselves (renormalize)");
}

void add_preferences(ObjectiveOptions* options, OptionList* list) {
  list->add("beta", &options->beta,
            "dpo, ipo, kto: strength of the constraint to the model of `ref_logprobs` (0.1); simpo: "
            "scale of rewards (2); orpo: weight of the odds ratio (0.1)",
            {.above = 0, .derived = kByObjective});
  list->add("margin", &options->margin, "simpo: target margin of the chosen reward over the rejected one",
            {.least = 0});
  list->add("chosen-weight", &options->chosen_weight, "kto: weight of chosen trajectories", {.least = 0});
  list->add("rejected-weight", &options->rejected_weight, "kto: weight of rejected trajectories",
            {.least = 0});
}

void add_metrics_and_routers(ObjectiveOptions* options, OptionList* list) {
  list->add("entropy-coef", &options->entropy_coef,
            "Subtract this times the entropy of every token's distribution from the loss, such as "
            "0.001",
            {.least = 0});
  list->add("log-entropy", &options->log_entropy,
            "Report the metric entropy even without --entropy-coef, by a second pass of the LM head",
            {.may_change = true});
  list->add("router-aux-loss-coef", &options->router_aux_loss_coef,
            "Mixture of experts: add this times the load-balancing loss of the routers, such as 0.001. "
            "Every token is weighted by the number of trajectories through it",
            {.least = 0});
  list->add("router-z-loss-coef", &options->router_z_loss_coef,
            "Mixture of experts: add this times the z-loss, which keeps the routers' logits small, such "
            "as 0.001",
            {.least = 0});
}

void check_ranges(const ObjectiveOptions& options) {
  ObjectiveOptions copy = options;
  OptionList list;
  add_objective_options(&copy, &list);
  list.check();
  ESPALIER_CHECK(options.normalize_constant > 0 && std::isfinite(options.normalize_constant),
                 "{}: expected a finite number above 0, received {}", named("normalize"),
                 options.normalize_constant);
  ESPALIER_CHECK(options.dual_clip == 0 ||
                     (options.dual_clip > 1 + options.clip_high && std::isfinite(options.dual_clip)),
                 "{}: expected 0 (off) or a finite number above 1 + {}, {}, received {}", named("dual-clip"),
                 named("clip-high"), 1 + options.clip_high, options.dual_clip);
}

}  // namespace

std::string_view to_string(ObjectiveKind kind) {
  return word_of(kObjectives, kind);
}

bool is_policy_gradient(ObjectiveKind kind) {
  return clips_ratio(kind) || kind == ObjectiveKind::kReinforce;
}

bool clips_ratio(ObjectiveKind kind) {
  using enum ObjectiveKind;
  return is_one_of(kind, {kPpo, kGrpo, kDrGrpo, kDapo, kGspo, kCispo});
}

bool is_preference(ObjectiveKind kind) {
  using enum ObjectiveKind;
  return is_one_of(kind, {kDpo, kIpo, kKto, kSimpo, kOrpo});
}

ObjectiveOptions default_options(ObjectiveKind kind) {
  ObjectiveOptions options{.kind = kind};
  switch (kind) {
    case ObjectiveKind::kSft:
    case ObjectiveKind::kPpo:
    case ObjectiveKind::kGrpo:
    case ObjectiveKind::kOpd:
      return options;
    case ObjectiveKind::kDrGrpo:
      options.normalize = Normalize::kSequenceSum;
      options.scale_rewards = false;
      return options;
    case ObjectiveKind::kDapo:
      options.clip_high = 0.28;
      return options;
    case ObjectiveKind::kGspo:
      options.normalize = Normalize::kSequence;
      options.clip_low = 3e-4;
      options.clip_high = 4e-4;
      return options;
    case ObjectiveKind::kCispo:
      options.clip_low = 1;  // no lower bound
      options.clip_high = 4;
      return options;
    case ObjectiveKind::kReinforce:
      options.normalize = Normalize::kSequenceSum;
      options.baseline = Baseline::kLeaveOneOut;
      options.scale_rewards = false;
      return options;
    case ObjectiveKind::kSimpo:
      options.beta = 2;
      [[fallthrough]];
    case ObjectiveKind::kDpo:
    case ObjectiveKind::kIpo:
    case ObjectiveKind::kKto:
    case ObjectiveKind::kOrpo:
      options.normalize = Normalize::kSequenceSum;
      return options;
  }
  throw InternalError("unknown objective");
}

std::string_view to_string(ImportanceWeights weights) {
  return word_of(kImportanceWeights, weights);
}

std::string_view to_string(RefTopk ref_topk) {
  return word_of(kRefTopk, ref_topk);
}

void add_objective_options(ObjectiveOptions* options, OptionList* list) {
  list->group("Objective");
  list->add("objective", &options->kind, kObjectives,
            "sft: cross-entropy; ppo, grpo, dr_grpo, dapo: clipped policy gradients; gspo: the same "
            "with one ratio for a trajectory; cispo: with the clipped ratio as a weight; reinforce: "
            "without a ratio; opd: distillation from a teacher on own samples; dpo, ipo, simpo, orpo: "
            "preferences between the two trajectories of a pair; kto: labelled single trajectories "
            "(docs/objectives.md)",
            {.then = [options] { *options = default_options(options->kind); }});
  list->add("shared-targets", &options->shared_targets, kSharedTargets,
            "For a target token that several trajectories share and train on: sum keeps every "
            "trajectory's term, once keeps one, with the mean of their advantages");
  const auto set_normalizer = [options](const std::vector<std::string>& texts, const OptionTraits&) {
    parse_normalize(texts.back(), options);
  };
  const auto normalizer = [options] { return normalize_text(*options); };
  list->add({"normalize",
             OptionKind::kText,
             {set_normalizer, normalizer},
             "Over the whole optimiser step: average the loss over tokens (token), over sequences the "
             "mean (sequence; default of gspo) or sum (sequence-sum; dr_grpo, reinforce, preferences) "
             "of their tokens, over groups the mean of their tokens (group), or divide it by a NUMBER",
             {.shown = "token|sequence|sequence-sum|group|NUMBER", .derived = kByObjective}});
  add_clipping(options, list);
  add_advantages(options, list);
  add_importance_weights(options, list);
  add_references(options, list);
  add_preferences(options, list);
  add_metrics_and_routers(options, list);
}

std::vector<std::string> objective_option_names() {
  ObjectiveOptions options;
  OptionList list;
  add_objective_options(&options, &list);
  return list.names();
}

nlohmann::ordered_json objective_settings(const ObjectiveOptions& options) {
  ObjectiveOptions copy = options;
  OptionList list;
  add_objective_options(&copy, &list);
  nlohmann::ordered_json settings = list.settings();
  settings["scale-rewards"] = options.scale_rewards;  // as checkpoints have it
  return settings;
}

void parse_normalize(const std::string& text, ObjectiveOptions* options) {
  if (has_word(kNormalizers, text)) {
    options->normalize = parse_word(kNormalizers, "normalize", text);
    return;
  }
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  ESPALIER_CHECK(!text.empty() && *end == '\0' && std::isfinite(value) && value > 0,
                 "{}: expected token, sequence, sequence-sum, group or a positive number, received `{}`",
                 named("normalize"), text);
  options->normalize = Normalize::kConstant;
  options->normalize_constant = value;
}

std::string normalize_text(const ObjectiveOptions& options) {
  if (options.normalize == Normalize::kConstant) return fmt::format("{}", options.normalize_constant);
  return word_of(kNormalizers, options.normalize);
}

void check_objective_options(const ObjectiveOptions& options) {
  check_ranges(options);
  const std::string_view name = to_string(options.kind);
  using enum ObjectiveKind;
  const bool clips = is_one_of(options.kind, {kPpo, kGrpo, kDrGrpo, kDapo});
  ESPALIER_CHECK(options.dual_clip == 0 || clips,
                 "{}: expected one of the objectives ppo, grpo, dr_grpo and dapo, received {}",
                 named("dual-clip"), name);
  ESPALIER_CHECK(options.ref_topk == RefTopk::kNone || options.kind == ObjectiveKind::kOpd,
                 "{}: expected objective opd, received {}", named("ref-topk"), name);
  const bool is_policy = is_policy_gradient(options.kind);
  ESPALIER_CHECK(is_policy || options.kl_coef == 0, "{}: expected an objective with advantages, received {}",
                 named("kl-coef"), name);
  ESPALIER_CHECK(is_policy || options.importance_weights == ImportanceWeights::kNone,
                 "{}: expected an objective with advantages, received {}", named("importance-weights"), name);
  ESPALIER_CHECK(!is_policy || is_group_baseline(options.baseline) || !options.scale_rewards,
                 "{}: expected {} or leave-one-out, received {}", named("scale-rewards", "group"),
                 named("baseline", "mean"), word_of(kBaselines, options.baseline));
  if (!is_preference(options.kind)) return;
  ESPALIER_CHECK(options.normalize == Normalize::kSequenceSum || options.normalize == Normalize::kConstant,
                 "{}: objective {} expects sequence-sum or a number, received {}", named("normalize"), name,
                 normalize_text(options));
  ESPALIER_CHECK(options.shared_targets == SharedTargets::kSum,
                 "{}: objective {} expects sum, received {}: it compares whole trajectories",
                 named("shared-targets"), name, word_of(kSharedTargets, options.shared_targets));
}

}  // namespace espalier
