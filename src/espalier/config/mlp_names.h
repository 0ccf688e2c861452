// SPDX-License-Identifier: Apache-2.0
// Names of an MLP's linear maps in a checkpoint.
#pragma once

#include <string>

namespace espalier {

/// An MLP is down(activation(gate(x)) * up(x)), or without a gate down(relu(up(x))^2).
struct MlpNames {
  std::string gate = "gate_proj";  // "": none
  std::string up = "up_proj";      // "": gate and up are one matrix, `gate`, whose first half of rows is gate
  std::string down = "down_proj";

  bool fused() const { return up.empty(); }
  bool gated() const { return !gate.empty(); }

  bool operator==(const MlpNames&) const = default;
};

}  // namespace espalier
