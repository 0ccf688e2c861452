// SPDX-License-Identifier: Apache-2.0
// What the cost of a micro-batch depends on.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/plan.h"

namespace espalier {

struct Load {
  int64_t tokens = 0;
  int64_t pairs = 0;         // visible (query, key) pairs, keys in context included
  int64_t logit_rows = 0;    // tokens that reach the LM head
  int64_t terms = 0;         // loss terms that read its log-probabilities
  int64_t mask_blocks = 0;   // dense blocks of the mask: a triangle per run, a rectangle per run with
                             // descendants and per stretch of context
  int64_t parent = -1;       // micro-batch whose context is inherited
  bool has_readers = false;  // other micro-batches read its context
};

/// The loads of a plan's micro-batches. It is not known here which tokens carry loss, so every token is
/// counted as a logit row, with one term for every trajectory that it belongs to.
std::vector<Load> loads_of(std::span<const MicroBatch> micro_batches);

}  // namespace espalier
