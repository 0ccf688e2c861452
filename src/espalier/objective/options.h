// SPDX-License-Identifier: Apache-2.0
// What the user chooses about the loss.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace espalier {

class OptionList;

enum class ObjectiveKind {
  kSft,
  kPpo,
  kGrpo,
  kDrGrpo,
  kDapo,
  kGspo,
  kCispo,
  kReinforce,
  kOpd,
  kDpo,
  kIpo,
  kKto,
  kSimpo,
  kOrpo
};

/// The words for it, as flags and files have them: "sft", "ppo", "grpo", "dr_grpo", ...
std::vector<std::string> objective_names();
ObjectiveKind parse_objective(const std::string& name);  // throws InputError
std::string_view to_string(ObjectiveKind kind);

/// Whether it weighs log-probabilities by advantages.
bool is_policy_gradient(ObjectiveKind kind);
/// Whether it clips the policy ratio.
bool clips_ratio(ObjectiveKind kind);
/// Whether it compares chosen and rejected trajectories.
bool is_preference(ObjectiveKind kind);

enum class SharedTargets { kSum, kOnce };
enum class Normalize { kToken, kSequence, kSequenceSum, kGroup, kConstant };

/// What is subtracted from a reward to make an advantage (Advantages).
enum class Baseline { kMean, kLeaveOneOut, kRunning, kNone };

/// What becomes of the ratio of the policy to the behaviour policy as a weight of terms (PolicyGradient).
enum class ImportanceWeights { kNone, kTruncate, kMask };
enum class ImportanceLevel { kToken, kSequence };

/// Estimators of the KL divergence from a reference model (Schulman, "Approximating KL divergence", 2020).
enum class KlEstimator { kK1, kK2, kK3 };
enum class KlPlace { kLoss, kReward };

/// What distillation compares with the reference model's most likely tokens (OpdTopk): nothing, the sampled
/// token is compared alone; their probabilities, and the sum of all others' as one; or their probabilities
/// divided by their sum.
enum class RefTopk { kNone, kRest, kRenormalize };

struct ObjectiveOptions {
  ObjectiveKind kind = ObjectiveKind::kSft;
  SharedTargets shared_targets = SharedTargets::kSum;  // once: of equal edges, the first trajectory's term
                                                       // counts, with the mean advantage of all
  Normalize normalize = Normalize::kToken;
  double normalize_constant = 1;  // with Normalize::kConstant
  // Policy gradients: the ratio is clipped to [1 - clip_low, 1 + clip_high].
  double clip_low = 0.2;
  double clip_high = 0.2;
  double dual_clip = 0;  // where the advantage is negative, the ratio counts as this at most; 0: as it is
  Baseline baseline = Baseline::kMean;
  bool scale_rewards = true;  // advantages from rewards: divide by the group's standard deviation
  double turn_discount = 1;   // the same: a reward counts this to the power of the turns until it is given
  ImportanceWeights importance_weights = ImportanceWeights::kNone;
  ImportanceLevel importance_level = ImportanceLevel::kToken;
  double importance_cap = 2;      // truncate: weights are this at most; mask: terms above it get weight 0
  double importance_floor = 0.5;  // mask: terms below it get weight 0
  double kl_coef = 0;             // of the divergence from the reference model; 0: none
  KlEstimator kl_estimator = KlEstimator::kK3;
  KlPlace kl_in = KlPlace::kLoss;
  RefTopk ref_topk = RefTopk::kNone;  // opd
  // Preferences: how far the policy is held to the reference (dpo, ipo, kto), the scale of rewards (simpo),
  // the weight of the odds ratio (orpo).
  double beta = 0.1;
  double margin = 1;           // simpo: by which the chosen reward should be above the rejected one
  double chosen_weight = 1;    // kto
  double rejected_weight = 1;  // kto
  double entropy_coef = 0;     // of the entropy of the tokens' distributions, which is added to J; 0: none
  bool log_entropy = false;    // a metric of the entropy without that as well; it changes no gradient
  // Of a model with experts, coefficients of losses of its routers, which are added to the objective
  // (docs/math.md, "Mixture of experts").
  double router_aux_loss_coef = 0;
  double router_z_loss_coef = 0;

  bool has_router_losses() const { return router_aux_loss_coef != 0 || router_z_loss_coef != 0; }
  bool has_kl_in(KlPlace place) const { return kl_coef != 0 && kl_in == place; }
};

/// The options that an objective was published with, where users choose nothing else; docs/math.md lists
/// them.
ObjectiveOptions default_options(ObjectiveKind kind);

std::string_view to_string(ImportanceWeights weights);
std::string_view to_string(RefTopk ref_topk);

/// Describes them: the name of the objective first, which chooses the defaults of the others.
void add_objective_options(ObjectiveOptions* options, OptionList* list);

std::vector<std::string> objective_option_names();

/// Values by the options' names, of all that decide what is learned: what a run keeps.
nlohmann::ordered_json objective_settings(const ObjectiveOptions& options);

/// "token" | "sequence" | "sequence-sum" | "group" | a positive number; throws InputError otherwise.
void parse_normalize(const std::string& text, ObjectiveOptions* options);
/// What parse_normalize reads back.
std::string normalize_text(const ObjectiveOptions& options);

/// Throws InputError naming an option that is not finite, out of its range, or without effect on the
/// objective that was chosen.
void check_objective_options(const ObjectiveOptions& options);

}  // namespace espalier
