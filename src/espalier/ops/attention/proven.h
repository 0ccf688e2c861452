// SPDX-License-Identifier: Apache-2.0
// The implementations of tree_attention that have passed the checks on this process's GPU.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "espalier/ops/attention/cuda.h"

namespace espalier {

/// Restricts attention_kind to these, fastest first, and masked; ESPALIER_ATTENTION may still name another
/// one. nullopt, the initial value: all but hopper. Must not be called while other threads compute. Returns
/// the previous value.
std::optional<std::vector<AttentionKind>> set_proven_attention(
    std::optional<std::vector<AttentionKind>> kinds);

/// "hopper", "ampere", "varlen" or "masked"; nullopt for other names.
std::optional<AttentionKind> attention_kind_named(std::string_view name);

}  // namespace espalier
