// SPDX-License-Identifier: Apache-2.0
// Optimisers with master weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <vector>

#include "espalier/distributed/group.h"
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

/// Bytes of moments and master weights per element of a trained parameter of this dtype, on each of so many
/// ranks.
double optimizer_bytes(OptimizerKind kind, at::ScalarType dtype, int64_t ranks = 1);

/// Throws InputError naming an option that is not finite or out of its range: betas in [0, 1), eps above 0,
/// the others 0 or more.
void check_optimizer_options(const OptimizerOptions& options);

enum class SchedulerKind { kConstant, kLinear, kCosine };

/// Factor on the learning rate at step (from 0) of `steps`: rises linearly over the first warmup_steps ((step
/// + 1) / (warmup_steps + 1)), then is constant at 1, or falls linearly or as half a cosine to 0 at `steps`.
double schedule_factor(SchedulerKind kind, int64_t step, int64_t steps, int64_t warmup_steps);

/// The state of an optimiser by name: `master.NAME` (bfloat16 models), `exp_avg.NAME`, `exp_avg_sq.NAME`,
/// `step`.
using OptimizerState = std::vector<Parameter>;

/// Throws NonFiniteError if values are not finite.
void save_state(const OptimizerState& state, const std::filesystem::path& file);

/// AdamW (Loshchilov and Hutter, 2019; LibTorch's fused operator) or plain SGD (p -= lr (g + weight_decay
/// p)). bfloat16 models are updated through float32 master weights. The state lives on the decoder's device;
/// saved files do not depend on it. Each rank has the state of its part of every parameter (Group::part), and
/// updates that (ZeRO stage 1: Rajbhandari et al., "ZeRO", 2020).
class Optimizer {
 public:
  Optimizer(const Decoder& decoder, const OptimizerOptions& options, const Group& group = alone());

  /// Settings of the next updates, checked by who changes them; the kind stays.
  OptimizerOptions& options() { return options_; }

  /// L2 norm of this rank's part of the decoder's gradients, summed in float64. Synchronises the device.
  double gradient_norm() const;

  /// Clips the gradients, whose norm over all ranks is `norm`, to max_grad_norm
  /// (torch.nn.utils.clip_grad_norm_) and updates this rank's part of the weights. Throws NonFiniteError,
  /// before any change, if the norm is not finite or so large that the update or AdamW's second moments would
  /// overflow, or if AdamW's eps is 0 in the dtype of the update.
  void update(double learning_rate, double norm);

  /// In host memory the state of this rank's parts, each as [N] (one process: in its shape), with `step` on
  /// the first; with `gathers` the whole state, on the first rank alone, and that is a collective. The next
  /// update may change it.
  OptimizerState state(bool gathers = false) const;

  /// Takes this rank's part of saved state from `file`, or from those that ranks have written in its place
  /// (model/weights/rank_files.h), and reads no more. Throws NonFiniteError, naming a tensor, if not all of
  /// it is finite.
  void load(const std::filesystem::path& file);

 private:
  struct Divided {
    std::string name;
    at::Tensor part;
    at::IntArrayRef shape;  // of the whole
  };
  std::vector<Divided> divided_state() const;
  std::vector<at::Tensor> gradients() const;  // this rank's parts; undefined where they are empty
  void check_update(double learning_rate, double norm) const;
  void round_masters() const;  // bfloat16 models: writes rounded masters to the weights

  const Decoder* decoder_;
  const Group* group_;
  OptimizerOptions options_;
  // Parts of parameters, and of the same shapes:
  std::vector<at::Tensor> masters_;  // the parameters themselves unless bfloat16
  std::vector<at::Tensor> exp_avgs_, exp_avg_sqs_;
  at::Tensor steps_done_;  // scalar, float32 (exact to 2^24 steps), shared by all parameters
};

}  // namespace espalier
