// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/options.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "espalier/base/words.h"

namespace espalier {
namespace {

constexpr auto kObjectives =
    std::to_array<Word<ObjectiveKind>>({{"sft", ObjectiveKind::kSft}, {"grpo", ObjectiveKind::kGrpo}});
constexpr auto kSharedTargets =
    std::to_array<Word<SharedTargets>>({{"sum", SharedTargets::kSum}, {"once", SharedTargets::kOnce}});

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

std::vector<std::string> shared_targets_names() {
  return all_words(kSharedTargets);
}

SharedTargets parse_shared_targets(const std::string& name) {
  return parse_word(kSharedTargets, "shared-targets", name);
}

std::string_view to_string(SharedTargets shared_targets) {
  return word_of(kSharedTargets, shared_targets);
}

void parse_normalize(const std::string& text, ObjectiveOptions* options) {
  if (text == "token") {
    options->normalize = Normalize::kToken;
  } else if (text == "sequence") {
    options->normalize = Normalize::kSequence;
  } else {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    ESPALIER_CHECK(!text.empty() && *end == '\0' && std::isfinite(value) && value > 0,
                   "normalize: expected token, sequence or a positive number, received `{}`", text);
    options->normalize = Normalize::kConstant;
    options->normalize_constant = value;
  }
}

std::string normalize_text(const ObjectiveOptions& options) {
  switch (options.normalize) {
    case Normalize::kToken:
      return "token";
    case Normalize::kSequence:
      return "sequence";
    case Normalize::kConstant:
      return fmt::format("{}", options.normalize_constant);
  }
  throw InternalError("no such way to normalize");
}

void check_objective_options(const ObjectiveOptions& options) {
  ESPALIER_CHECK(options.clip_low >= 0 && options.clip_low <= 1,
                 "clip-low: expected a number from 0 to 1, received {}", options.clip_low);
  ESPALIER_CHECK(options.clip_high >= 0 && std::isfinite(options.clip_high),
                 "clip-high: expected a finite number of at least 0, received {}", options.clip_high);
  ESPALIER_CHECK(options.normalize_constant > 0 && std::isfinite(options.normalize_constant),
                 "normalize: expected a finite number above 0, received {}", options.normalize_constant);
  for (const auto& [name, value] : {std::pair("router-aux-loss-coef", options.router_aux_loss_coef),
                                    std::pair("router-z-loss-coef", options.router_z_loss_coef)}) {
    ESPALIER_CHECK(value >= 0 && std::isfinite(value),
                   "{}: expected a finite number of at least 0, received {}", name, value);
  }
}

}  // namespace espalier
