// SPDX-License-Identifier: Apache-2.0
// How tokens branch, as the operators of recurrent layers are given it.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/node_structure.h"

namespace espalier {

/// Copies, because operators outlive the sequence whose tokens these are.
struct Paths {
  at::Tensor prev;  // [T] int32: NodeStructure::prev
  at::Tensor ends;  // [C] int64: the last token of each of NodeStructure::cuts

  explicit Paths(const NodeStructure& nodes);
};

}  // namespace espalier
