// SPDX-License-Identifier: Apache-2.0
// The fields of a row, and the names that other programs give them.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace espalier {

enum class Field {
  kInputIds,
  kLossMask,
  kLossWeights,
  kLogprobs,
  kRefLogprobs,
  kRefTopkIds,
  kRefTopkLogprobs,
  kAdvantages,
  kAdvantage,
  kReward,
  kTurnRewards,
  kGroupId,
  kTrajectoryId,
  kPairId,
  kChosen,
  kRoutedExperts,
  kTemperature,
  kTopK,
  kTopP,
};
inline constexpr size_t kNumFields = 19;

/// A name of a field.
struct FieldName {
  std::string_view name;
  Field field;
};

/// All names, grouped by field; the first of each field is its own name in docs/data-format.md, the others
/// are aliases. `labels` differ from masks: -100 means no loss, and other entries are the token itself.
inline constexpr auto kFieldNames = std::to_array<FieldName>({
    {"input_ids", Field::kInputIds},
    {"loss_mask", Field::kLossMask},
    {"response_mask", Field::kLossMask},
    {"completion_mask", Field::kLossMask},
    {"assistant_masks", Field::kLossMask},
    {"labels", Field::kLossMask},
    {"loss_weights", Field::kLossWeights},
    {"logprobs", Field::kLogprobs},
    {"old_log_probs", Field::kLogprobs},
    {"rollout_log_probs", Field::kLogprobs},
    {"ref_logprobs", Field::kRefLogprobs},
    {"ref_log_prob", Field::kRefLogprobs},
    {"ref_log_probs", Field::kRefLogprobs},
    {"ref_topk_ids", Field::kRefTopkIds},
    {"ref_topk_logprobs", Field::kRefTopkLogprobs},
    {"advantages", Field::kAdvantages},
    {"advantage", Field::kAdvantage},
    {"reward", Field::kReward},
    {"turn_rewards", Field::kTurnRewards},
    {"group_id", Field::kGroupId},
    {"trajectory_id", Field::kTrajectoryId},
    {"pair_id", Field::kPairId},
    {"chosen", Field::kChosen},
    {"routed_experts", Field::kRoutedExperts},
    {"temperature", Field::kTemperature},
    {"top_k", Field::kTopK},
    {"top_p", Field::kTopP},
});
inline constexpr size_t kNumFieldNames = kFieldNames.size();
inline constexpr std::string_view kLabels = "labels";
inline constexpr int64_t kNoLabel = -100;  // of `labels`: this token carries no loss

/// The index of a name in kFieldNames.
inline std::optional<size_t> find_field_name(std::string_view name) {
  for (size_t i = 0; i < kNumFieldNames; ++i) {
    if (kFieldNames[i].name == name) return i;
  }
  return std::nullopt;
}

/// The field's own name, not an alias.
constexpr std::string_view name_of(Field field) {
  for (const FieldName& entry : kFieldNames) {
    if (entry.field == field) return entry.name;
  }
  return {};
}

}  // namespace espalier
