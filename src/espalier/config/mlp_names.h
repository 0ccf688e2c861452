// SPDX-License-Identifier: Apache-2.0
// Names of an MLP's linear maps in a checkpoint.
#pragma once

#include <string>

namespace espalier {

struct MlpNames {
  std::string gate = "gate_proj";
  std::string up = "up_proj";  // "": gate and up are one matrix, `gate`, whose first half of rows is gate
  std::string down = "down_proj";

  bool fused() const { return up.empty(); }

  bool operator==(const MlpNames&) const = default;
};

}  // namespace espalier
