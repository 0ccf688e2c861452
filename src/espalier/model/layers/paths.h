// SPDX-License-Identifier: Apache-2.0
// The tree structure of tokens, as arguments of recurrent operators.
#pragma once

#include <ATen/core/Tensor.h>

#include "espalier/model/node_structure.h"

namespace espalier {

/// Copies the structure, because the graph outlives the sequence.
struct Paths {
  at::Tensor prev;  // [T] int32: NodeStructure::prev
  at::Tensor ends;  // [C] int64: the last token of each of NodeStructure::cuts

  explicit Paths(const NodeStructure& nodes);
};

}  // namespace espalier
