// SPDX-License-Identifier: Apache-2.0
// Which implementations of tree_attention have proven themselves on this process's GPU.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "espalier/ops/attention/cuda.h"

namespace espalier {

/// From here on attention_kind chooses among these, the fastest first, and masked; ESPALIER_ATTENTION may
/// still name another one. Without a value, as at the start: among all but hopper. No other thread may
/// compute meanwhile. Returns what was set before.
std::optional<std::vector<AttentionKind>> set_proven_attention(
    std::optional<std::vector<AttentionKind>> kinds);

/// "hopper", "ampere", "varlen" or "masked"; nothing of another name.
std::optional<AttentionKind> attention_kind_named(std::string_view name);

}  // namespace espalier
