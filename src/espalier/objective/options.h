// SPDX-License-Identifier: Apache-2.0
// Options of the loss.
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

/// The name used in flags and files: "sft", "ppo", "grpo", "dr_grpo", ...
std::string_view to_string(ObjectiveKind kind);

/// Whether log-probabilities are weighted by advantages.
bool is_policy_gradient(ObjectiveKind kind);
/// Whether the policy ratio is clipped.
bool clips_ratio(ObjectiveKind kind);
/// Whether chosen and rejected trajectories are compared.
bool is_preference(ObjectiveKind kind);

enum class SharedTargets { kSum, kOnce };
enum class Normalize { kToken, kSequence, kSequenceSum, kGroup, kConstant };

/// What is subtracted from a reward to compute an advantage (Advantages).
enum class Baseline { kMean, kLeaveOneOut, kRunning, kNone };

/// How the ratio of policy to behaviour policy is used as a weight of terms (PolicyGradient).
enum class ImportanceWeights { kNone, kTruncate, kMask };
enum class ImportanceLevel { kToken, kSequence };

/// Estimators of the KL divergence from a reference model (Schulman, "Approximating KL divergence", 2020).
enum class KlEstimator { kK1, kK2, kK3 };
enum class KlPlace { kLoss, kReward };

/// How distillation uses the reference model's most likely tokens (opd.cpp): kNone compares the sampled token
/// alone; kRest merges all other tokens into one; kRenormalize divides their probabilities by their sum.
enum class RefTopk { kNone, kRest, kRenormalize };

struct ObjectiveOptions {
  ObjectiveKind kind = ObjectiveKind::kSft;
  SharedTargets shared_targets = SharedTargets::kSum;  // kOnce: only the first trajectory's term of an
                                                       // edge counts, with the mean advantage of all
  Normalize normalize = Normalize::kToken;
  double normalize_constant = 1;  // with Normalize::kConstant
  // Policy gradients: the ratio is clipped to [1 - clip_low, 1 + clip_high].
  double clip_low = 0.2;
  double clip_high = 0.2;
  double dual_clip = 0;  // upper bound of the ratio where the advantage is negative; 0: none
  Baseline baseline = Baseline::kMean;
  bool scale_rewards = true;  // advantages from rewards: divide by the group's standard deviation
  double turn_discount = 1;   // likewise: factor per turn between a token and its reward
  ImportanceWeights importance_weights = ImportanceWeights::kNone;
  ImportanceLevel importance_level = ImportanceLevel::kToken;
  double importance_cap = 2;      // truncate: upper bound of weights; mask: terms above it get weight 0
  double importance_floor = 0.5;  // mask: terms below it get weight 0
  double kl_coef = 0;             // of the divergence from the reference model; 0: none
  KlEstimator kl_estimator = KlEstimator::kK3;
  KlPlace kl_in = KlPlace::kLoss;
  RefTopk ref_topk = RefTopk::kNone;  // opd
  // Preferences: strength of the constraint to the reference (dpo, ipo, kto), scale of rewards (simpo),
  // weight of the odds ratio (orpo).
  double beta = 0.1;
  double margin = 1;           // simpo: target difference of chosen and rejected reward
  double chosen_weight = 1;    // kto
  double rejected_weight = 1;  // kto
  double entropy_coef = 0;     // entropy bonus: coefficient of the distributions' entropy in J; 0: none
  bool log_entropy = false;    // report the entropy even without entropy_coef; does not change gradients
  // Mixture of experts: coefficients of the router losses added to the objective (docs/math.md, "Mixture of
  // experts").
  double router_aux_loss_coef = 0;
  double router_z_loss_coef = 0;

  bool has_router_losses() const { return router_aux_loss_coef != 0 || router_z_loss_coef != 0; }
  bool has_kl_in(KlPlace place) const { return kl_coef != 0 && kl_in == place; }
};

/// The defaults of an objective, as it was published; listed in docs/math.md.
ObjectiveOptions default_options(ObjectiveKind kind);

std::string_view to_string(ImportanceWeights weights);
std::string_view to_string(RefTopk ref_topk);

/// Adds the options to `list`. The objective comes first, because it sets the defaults of the others.
void add_objective_options(ObjectiveOptions* options, OptionList* list);

std::vector<std::string> objective_option_names();

/// Values by option name of everything that affects what is learned, as saved in checkpoints.
nlohmann::ordered_json objective_settings(const ObjectiveOptions& options);

/// "token" | "sequence" | "sequence-sum" | "group" | a positive number; throws InputError otherwise.
void parse_normalize(const std::string& text, ObjectiveOptions* options);
/// The text that parse_normalize parses.
std::string normalize_text(const ObjectiveOptions& options);

/// Throws InputError naming an option that is not finite, out of its range, or without effect on the chosen
/// objective.
void check_objective_options(const ObjectiveOptions& options);

}  // namespace espalier
