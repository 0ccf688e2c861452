// SPDX-License-Identifier: Apache-2.0
// Optimisers with master weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <vector>

#include "espalier/base/safetensors.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"
#include "espalier/train/flags.h"

namespace espalier {

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double weight_decay = 0;  // for matrices; norms and biases are never decayed
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double max_grad_norm = 1;  // 0: off
};

/// Bytes of moments and master weights per element of a parameter of this dtype.
int64_t optimizer_bytes(OptimizerKind kind, at::ScalarType dtype);

/// Throws InputError naming an option that is not finite or out of its range: betas in [0, 1), eps above 0,
/// the others 0 or more.
void check_optimizer_options(const OptimizerOptions& options);

enum class SchedulerKind { kConstant, kLinear, kCosine };

/// Factor on the learning rate at step (from 0) of `steps`: rises linearly over the first warmup_steps ((step
/// + 1) / (warmup_steps + 1)), then is constant at 1, or falls linearly or as half a cosine to 0 at `steps`.
double schedule_factor(SchedulerKind kind, int64_t step, int64_t steps, int64_t warmup_steps);

/// AdamW (Loshchilov and Hutter, 2019; LibTorch's fused operator) or plain SGD (p -= lr (g + weight_decay
/// p)). bfloat16 models are updated through float32 master weights. The state lives on the decoder's device;
/// saved files do not depend on it.
class Optimizer {
 public:
  Optimizer(const Decoder& decoder, const OptimizerOptions& options);

  /// Settings of the next updates, checked by who changes them; the kind stays.
  OptimizerOptions& options() { return options_; }

  /// L2 norm of the decoder's gradients, summed in float64. Synchronises the device.
  double gradient_norm() const;

  /// Clips the gradients, whose norm is `norm`, to max_grad_norm (torch.nn.utils.clip_grad_norm_) and updates
  /// the weights. Throws NonFiniteError, before any change, if the norm is not finite or so large that the
  /// update or AdamW's second moments would overflow.
  void update(double learning_rate, double norm);

  /// "" if all state is finite; otherwise the name of a tensor that is not, and its values.
  std::string nonfinite_state() const;

  /// A copy of the state in host memory, for `decoder`, a copy of the decoder.
  Optimizer copy_for(const Decoder& decoder) const;

  /// State by name: `master.NAME` (bfloat16 models), `exp_avg.NAME`, `exp_avg_sq.NAME`, `step`. Throws
  /// NonFiniteError if values are not finite.
  void save(const std::filesystem::path& file) const;
  void load(const std::filesystem::path& file);

 private:
  struct Named {
    std::string name;
    at::Tensor tensor;
  };
  std::vector<Named> state() const;
  void check_update(double learning_rate, double norm) const;
  void round_masters() const;  // bfloat16 models: writes rounded masters to the weights

  const Decoder* decoder_;
  OptimizerOptions options_;
  std::vector<at::Tensor> masters_;  // the parameters themselves unless bfloat16
  std::vector<at::Tensor> exp_avgs_, exp_avg_sqs_;
  at::Tensor steps_done_;  // scalar, float32 (exact to 2^24 steps), shared by all parameters
};

}  // namespace espalier
