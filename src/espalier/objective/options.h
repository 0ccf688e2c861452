// SPDX-License-Identifier: Apache-2.0
// What the user chooses about the loss.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace espalier {

enum class ObjectiveKind { kSft, kGrpo };

/// The words for it, as flags and files have them: "sft", "grpo".
std::vector<std::string> objective_names();
ObjectiveKind parse_objective(const std::string& name);  // throws InputError
std::string_view to_string(ObjectiveKind kind);

enum class SharedTargets { kSum, kOnce };
enum class Normalize { kToken, kSequence, kConstant };

struct ObjectiveOptions {
  ObjectiveKind kind = ObjectiveKind::kSft;
  SharedTargets shared_targets =
      SharedTargets::kSum;  // once: of equal edges, the first trajectory's term counts
  Normalize normalize = Normalize::kToken;
  double normalize_constant = 1;  // with Normalize::kConstant
  double clip_low = 0.2;          // grpo: the ratio is clipped to [1 - clip_low, 1 + clip_high]
  double clip_high = 0.2;
  bool scale_rewards = true;  // advantages from rewards: divide by the group's standard deviation
  // Of a model with experts, coefficients of losses of its routers, which are added to the objective
  // (docs/math.md, "Mixture of experts").
  double router_aux_loss_coef = 0;
  double router_z_loss_coef = 0;

  bool has_router_losses() const { return router_aux_loss_coef != 0 || router_z_loss_coef != 0; }
};

/// "sum" | "once"; throws InputError otherwise.
SharedTargets parse_shared_targets(const std::string& name);
std::vector<std::string> shared_targets_names();
std::string_view to_string(SharedTargets shared_targets);

/// "token" | "sequence" | a positive number; throws InputError otherwise.
void parse_normalize(const std::string& text, ObjectiveOptions* options);
/// What parse_normalize reads back.
std::string normalize_text(const ObjectiveOptions& options);

/// Throws InputError naming an option that is not finite or out of its range: clip_low in [0, 1], clip_high 0
/// or more, normalize_constant above 0, coefficients of router losses 0 or more.
void check_objective_options(const ObjectiveOptions& options);

}  // namespace espalier
