// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/options.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "espalier/base/words.h"

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
constexpr auto kNormalizers = std::to_array<Word<Normalize>>({{"token", Normalize::kToken},
                                                              {"sequence", Normalize::kSequence},
                                                              {"sequence-sum", Normalize::kSequenceSum},
                                                              {"group", Normalize::kGroup}});

}  // namespace

std::vector<std::string> objective_names() {
  return all_words(kObjectives);
}

ObjectiveKind parse_objective(const std::string& name) {
  return parse_word(kObjectives, "objective", name);
}

std::string_view to_string(ObjectiveKind kind) {
  return word_of(kObjectives, kind);
}

bool is_policy_gradient(ObjectiveKind kind) {
  return clips_ratio(kind) || kind == ObjectiveKind::kReinforce;
}

bool clips_ratio(ObjectiveKind kind) {
  switch (kind) {
    case ObjectiveKind::kPpo:
    case ObjectiveKind::kGrpo:
    case ObjectiveKind::kDrGrpo:
    case ObjectiveKind::kDapo:
    case ObjectiveKind::kGspo:
    case ObjectiveKind::kCispo:
      return true;
    default:
      return false;
  }
}

bool is_preference(ObjectiveKind kind) {
  switch (kind) {
    case ObjectiveKind::kDpo:
    case ObjectiveKind::kIpo:
    case ObjectiveKind::kKto:
    case ObjectiveKind::kSimpo:
    case ObjectiveKind::kOrpo:
      return true;
    default:
      return false;
  }
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

std::vector<std::string> shared_targets_names() {
  return all_words(kSharedTargets);
}

SharedTargets parse_shared_targets(const std::string& name) {
  return parse_word(kSharedTargets, "shared-targets", name);
}

std::string_view to_string(SharedTargets shared_targets) {
  return word_of(kSharedTargets, shared_targets);
}

std::vector<std::string> baseline_names() {
  return all_words(kBaselines);
}

Baseline parse_baseline(const std::string& name) {
  return parse_word(kBaselines, "baseline", name);
}

std::string_view to_string(Baseline baseline) {
  return word_of(kBaselines, baseline);
}

std::vector<std::string> importance_weights_names() {
  return all_words(kImportanceWeights);
}

ImportanceWeights parse_importance_weights(const std::string& name) {
  return parse_word(kImportanceWeights, "importance-weights", name);
}

std::string_view to_string(ImportanceWeights weights) {
  return word_of(kImportanceWeights, weights);
}

std::vector<std::string> importance_level_names() {
  return all_words(kImportanceLevels);
}

ImportanceLevel parse_importance_level(const std::string& name) {
  return parse_word(kImportanceLevels, "importance-level", name);
}

std::string_view to_string(ImportanceLevel level) {
  return word_of(kImportanceLevels, level);
}

std::vector<std::string> kl_estimator_names() {
  return all_words(kKlEstimators);
}

KlEstimator parse_kl_estimator(const std::string& name) {
  return parse_word(kKlEstimators, "kl-estimator", name);
}

std::string_view to_string(KlEstimator estimator) {
  return word_of(kKlEstimators, estimator);
}

std::vector<std::string> kl_place_names() {
  return all_words(kKlPlaces);
}

KlPlace parse_kl_place(const std::string& name) {
  return parse_word(kKlPlaces, "kl-in", name);
}

std::string_view to_string(KlPlace place) {
  return word_of(kKlPlaces, place);
}

std::vector<std::string> ref_topk_names() {
  return all_words(kRefTopk);
}

RefTopk parse_ref_topk(const std::string& name) {
  return parse_word(kRefTopk, "ref-topk", name);
}

std::string_view to_string(RefTopk ref_topk) {
  return word_of(kRefTopk, ref_topk);
}

void parse_normalize(const std::string& text, ObjectiveOptions* options) {
  if (has_word(kNormalizers, text)) {
    options->normalize = parse_word(kNormalizers, "normalize", text);
    return;
  }
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  ESPALIER_CHECK(!text.empty() && *end == '\0' && std::isfinite(value) && value > 0,
                 "normalize: expected token, sequence, sequence-sum, group or a positive number, received "
                 "`{}`",
                 text);
  options->normalize = Normalize::kConstant;
  options->normalize_constant = value;
}

std::string normalize_text(const ObjectiveOptions& options) {
  if (options.normalize == Normalize::kConstant) return fmt::format("{}", options.normalize_constant);
  return word_of(kNormalizers, options.normalize);
}

namespace {

void check_ranges(const ObjectiveOptions& options) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // NaN is in no range.
  const auto real = [](std::string_view name, double value, double least, double most) {
    if (most == kInfinity) {
      ESPALIER_CHECK(value >= least && std::isfinite(value),
                     "{}: expected a finite number of at least {}, received {}", name, least, value);
    } else {
      ESPALIER_CHECK(value >= least && value <= most, "{}: expected a number from {} to {}, received {}",
                     name, least, most, value);
    }
  };
  real("clip-low", options.clip_low, 0, 1);
  real("clip-high", options.clip_high, 0, kInfinity);
  real("turn-discount", options.turn_discount, 0, 1);
  real("importance-floor", options.importance_floor, 0, 1);
  real("importance-cap", options.importance_cap, 1, kInfinity);
  real("kl-coef", options.kl_coef, 0, kInfinity);
  real("margin", options.margin, 0, kInfinity);
  real("chosen-weight", options.chosen_weight, 0, kInfinity);
  real("rejected-weight", options.rejected_weight, 0, kInfinity);
  real("entropy-coef", options.entropy_coef, 0, kInfinity);
  real("router-aux-loss-coef", options.router_aux_loss_coef, 0, kInfinity);
  real("router-z-loss-coef", options.router_z_loss_coef, 0, kInfinity);
  ESPALIER_CHECK(options.normalize_constant > 0 && std::isfinite(options.normalize_constant),
                 "normalize: expected a finite number above 0, received {}", options.normalize_constant);
  ESPALIER_CHECK(options.beta > 0 && std::isfinite(options.beta),
                 "beta: expected a finite number above 0, received {}", options.beta);
  ESPALIER_CHECK(options.dual_clip == 0 ||
                     (options.dual_clip > 1 + options.clip_high && std::isfinite(options.dual_clip)),
                 "dual-clip: expected 0 (off) or a finite number above 1 + clip-high, {}, received {}",
                 1 + options.clip_high, options.dual_clip);
}

}  // namespace

void check_objective_options(const ObjectiveOptions& options) {
  check_ranges(options);
  const std::string_view name = to_string(options.kind);
  const bool clips = options.kind == ObjectiveKind::kPpo || options.kind == ObjectiveKind::kGrpo ||
                     options.kind == ObjectiveKind::kDrGrpo || options.kind == ObjectiveKind::kDapo;
  ESPALIER_CHECK(options.dual_clip == 0 || clips,
                 "dual-clip: expected one of the objectives ppo, grpo, dr_grpo and dapo, received {}", name);
  ESPALIER_CHECK(options.ref_topk == RefTopk::kNone || options.kind == ObjectiveKind::kOpd,
                 "ref-topk: expected objective opd, received {}", name);
  const bool is_policy = is_policy_gradient(options.kind);
  ESPALIER_CHECK(is_policy || options.kl_coef == 0,
                 "kl-coef: expected an objective with advantages, received {}", name);
  ESPALIER_CHECK(is_policy || options.importance_weights == ImportanceWeights::kNone,
                 "importance-weights: expected an objective with advantages, received {}", name);
  const bool centred = options.baseline == Baseline::kMean || options.baseline == Baseline::kLeaveOneOut;
  ESPALIER_CHECK(!is_policy || centred || !options.scale_rewards,
                 "scale-rewards group: expected baseline mean or leave-one-out, received {}",
                 to_string(options.baseline));
  if (!is_preference(options.kind)) return;
  ESPALIER_CHECK(options.normalize == Normalize::kSequenceSum || options.normalize == Normalize::kConstant,
                 "normalize: objective {} expects sequence-sum or a number, received {}", name,
                 normalize_text(options));
  ESPALIER_CHECK(options.shared_targets == SharedTargets::kSum,
                 "shared-targets: objective {} expects sum, received {}: it compares whole trajectories",
                 name, to_string(options.shared_targets));
}

}  // namespace espalier
