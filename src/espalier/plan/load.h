// SPDX-License-Identifier: Apache-2.0
// Counts of a micro-batch that determine its cost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/context.h"
#include "espalier/plan/plan.h"

namespace espalier {

struct Load {
  int64_t tokens = 0;
  int64_t pairs = 0;        // visible (query, key) pairs, keys in context included
  int64_t logit_rows = 0;   // tokens that reach the LM head
  int64_t terms = 0;        // loss terms that read its log-probabilities
  int64_t mask_blocks = 0;  // dense blocks of the mask: a triangle per run, a rectangle per run with
                            // descendants and per context block
  int64_t parent = -1;      // micro-batch whose context is inherited
  int64_t cuts = 0;         // runs that other micro-batches continue, reading the context
  std::vector<int64_t> window_pairs = {};  // pairs within each of ModelCost::sliding_windows

  bool has_readers() const { return cuts > 0; }
};

/// The loads of a plan's micro-batches, as if every token carried loss: every token is a logit row, with one
/// term for every trajectory that it belongs to. `windows`: ModelCost::sliding_windows.
std::vector<Load> loads_of(std::span<const MicroBatch> micro_batches, std::span<const int64_t> windows = {});

/// Visible pairs within a sliding window of `size` consecutive queries on a root path, the first of them at
/// `position`.
int64_t pairs_in_window(int64_t position, int64_t size, int64_t window);

/// By micro-batch and window: the visible pairs, keys in context included.
std::vector<std::vector<int64_t>> window_pairs(const ContextIndex& index, std::span<const int64_t> windows);

/// Sets the cuts of all loads, counting only micro-batches that run (`runs`, by micro-batch).
void count_cuts(std::span<const MicroBatch> micro_batches, const std::vector<bool>& runs,
                std::vector<Load>* loads);

}  // namespace espalier
