// SPDX-License-Identifier: Apache-2.0
// Schedules of fused attention, kept from one call to the next: all layers of a micro-batch have one forest.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/ops/kernels/cuda/attention/tree_attention.h"

namespace espalier::fused {

/// What a schedule follows from.
struct ScheduleSource {
  at::Tensor subtree_end;  // as the operator was given it
  std::vector<ContextRectangle> rectangles;
  cuda::AttentionKernels kernels;
  bool backward;
  bool deterministic;
  int32_t num_heads;
  int32_t num_key_heads;
  int32_t head_dim;
  void* stream;  // that its kernels run on
};

struct KeptSchedules {
  at::Tensor memory;
  bool filled;
};

/// `bytes` of memory on the device of subtree_end for schedules of `source`: those of an earlier call with
/// the same source, while that subtree_end lives and has not been written to, or new memory, which the caller
/// fills on the stream before anybody else asks. Of the sources asked for last some are kept. `reusable`:
/// whether calls may share the memory at all. For any thread.
KeptSchedules schedules_for(const ScheduleSource& source, int64_t bytes, bool reusable);

}  // namespace espalier::fused
