// SPDX-License-Identifier: Apache-2.0
// Linear recurrences, with the delta rule or without: what gated_delta_rule and ssm_scan compute. Formulas:
// docs/math.md, "Linear recurrences on trees".
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "espalier/ops/chunk_scan/chunk_scan.h"
#include "espalier/ops/kernels/cpu/recurrence/recurrence.h"

namespace espalier::detail {

/// The inputs of a recurrence, float32 or float64. H a multiple of K: head h reads q and k of head h / (H /
/// K).
struct RecurrenceInputs {
  bool delta;           // the delta rule (recurrence_math.h)
  double scale;         // of q
  at::Tensor q, k;      // [T, K, Dk]
  at::Tensor v;         // [T, H, Dv]
  at::Tensor g;         // [T, H]
  at::Tensor beta;      // [T, H]; undefined without the delta rule
  at::Tensor contexts;  // [N, H, Dk, Dv] or undefined
};

/// By the kernels of kernels/cpu/recurrence/recurrence.h.
class CpuRecurrence {
 public:
  /// Throws with prefix `op` on invalid prev, ends or chunk_size.
  CpuRecurrence(const char* op, const RecurrenceInputs& inputs, const ScanPaths& paths);

  /// out [T, H, Dv] and the states at the ends [E, H, Dk, Dv].
  std::pair<at::Tensor, at::Tensor> forward() const;

  /// Gradients of the inputs, undefined for undefined inputs. One of the arguments may be undefined.
  RecurrenceInputs backward(const at::Tensor& grad_out, const at::Tensor& grad_ends) const;

 private:
  RecurrenceInputs in_;
  int64_t num_ends_;
  RecurrenceForest forest_;
};

/// The same composed of ATen operators, for any device.
class ComposedRecurrence {
 public:
  ComposedRecurrence(const char* op, const RecurrenceInputs& inputs, const ScanPaths& paths);
  std::pair<at::Tensor, at::Tensor> forward() const;
  RecurrenceInputs backward(const at::Tensor& grad_out, const at::Tensor& grad_ends) const;

 private:
  RecurrenceInputs in_;
  ChunkScan scan_;
  at::Tensor first_;  // [1 + N, H, Dk, Dv]: the initial states of level 0
};

}  // namespace espalier::detail
