// SPDX-License-Identifier: Apache-2.0
// Cache of schedules of fused attention, since all layers of a micro-batch have the same forest.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/ops/kernels/cuda/attention/tree_attention.h"

namespace espalier::fused {

/// The inputs of a schedule.
struct ScheduleSource {
  at::Tensor subtree_end;  // as passed to the operator
  std::vector<ContextRectangle> rectangles;
  bool backward;
  bool deterministic;
  int32_t num_heads;
  int32_t num_key_heads;
  int32_t head_dim;
  void* stream;  // stream of its kernels
};

struct KeptSchedules {
  at::Tensor memory;
  bool filled;
};

/// `bytes` of memory on the device of subtree_end for schedules of `source`: the memory of an earlier call
/// with the same source, if its subtree_end is still alive and unmodified, otherwise new memory, which the
/// caller must fill on the stream. Keeps a few recently used entries. `reusable`: whether memory may be
/// shared between calls. Thread-safe.
KeptSchedules schedules_for(const ScheduleSource& source, int64_t bytes, bool reusable);

}  // namespace espalier::fused
