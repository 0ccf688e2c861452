// SPDX-License-Identifier: Apache-2.0
// The proof that training on trees equals plain per-trajectory training.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "espalier/base/error_ratio.h"
#include "espalier/data/trajectories.h"
#include "espalier/distributed/group.h"
#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"

namespace espalier {

struct VerifyOptions {
  std::filesystem::path model;
  std::filesystem::path adapter;  // its gradients are compared in place of those of the weights; "": none
  at::ScalarType dtype = at::kDouble;
  at::Device device = at::kCPU;       // for both sides and the float64 reference; opened (runtime/device.h)
  bool freeze_pad_embedding = false;  // Decoder::freeze_pad_embedding, on both sides
  ObjectiveOptions objective;
  std::vector<MixSource> mix{};  // if not empty, used in place of the objective
  PlanOptions plan;
  double max_error = 1e-12;  // float64: worst relative error of a parameter's gradient, and of the loss
  double max_error_ratio = kMaxErrorRatio;  // lower precision: error of the tree run over the reference's
  int64_t isolation_trials = 4;             // trajectories whose neighbours are changed
  uint64_t seed = 0;
  /// Ranks that train together: the tree run is that of all of them, each with its share of the trajectories,
  /// and each compares it with all trajectories one by one.
  const Group* group = &alone();
};

struct VerifyReport {
  std::string dtype;
  std::string device;
  double loss_rel_error = 0;      // |tree - reference| / ReferenceLoss::size, in dtype
  double grad_rel_error_max = 0;  // worst parameter: ||g - g_ref|| / max(||g_ref||, 1e-6 ||all g_ref||), in
                                  // dtype; 0 where g and g_ref are both at most 2^-48 ||all g_ref||
  std::string grad_rel_error_worst_parameter;
  double logprob_abs_error_max = 0;  // over all loss terms
  /// Lower precision only (else 0): worst parameter's error of the tree run against float64 over that of the
  /// per-trajectory run. Errors below the rounding of the dtype itself (unit roundoff / 2) count as that.
  double error_ratio_max = 0;
  double error_ratio_median = 0;
  std::string error_ratio_worst_parameter;
  bool isolation_bitwise = false;
  int64_t isolation_trials = 0;
  int64_t flat_tokens = 0;
  int64_t tree_tokens = 0;
  int64_t encoded_tokens = 0;
  double reference_loss = 0;
  int64_t pad_token_id = -1;  // DecoderConfig; -1 with an adapter, which trains no embedding
  bool freeze_pad_embedding = false;
  bool passed = false;
};

nlohmann::ordered_json to_json(const VerifyReport& report);

/// Receives the current phase and its progress in [0, 1].
using VerifyProgress = std::function<void(const char* phase, double fraction)>;

/// Computes one optimiser step over all trajectories both ways and compares them.
VerifyReport verify(const Trajectories& trajectories, const VerifyOptions& options,
                    const VerifyProgress& progress = {});

struct ReferenceLoss {
  double value = 0;
  /// Sum of |coefficient * l| over the terms; the value itself for sft. Relative errors of the loss are
  /// measured against it, because the terms of a policy gradient may cancel to almost 0.
  double size = 0;
};

/// The reference: each trajectory is run as a single sequence with ordinary causal attention, full logits and
/// log_softmax. It shares only the decoder's layers with the tree computation. The sources of a mix are
/// computed separately and weighted. Returns the loss, accumulates gradients and writes the log-probabilities
/// of loss terms (flat index).
ReferenceLoss per_trajectory_forward_backward(const Decoder& decoder, const Loss& loss,
                                              std::vector<double>* logprobs,
                                              const MicroBatchProgress& progress = {});

/// A micro-batch with all its ancestors, root first, and one root path through them. Batches are on the host.
struct PathBatches {
  std::vector<Batch> batches;
  std::vector<std::vector<int64_t>> paths;  // by batch: its tokens on the path
};

struct PathLogprobs {
  std::vector<at::Tensor> logprobs;  // by batch: of its edges; undefined if it has none
  std::vector<at::Tensor> routes;    // by batch: Batch::routes; undefined without routers
};

/// Runs the batches on the decoder's device.
PathLogprobs path_logprobs(const Decoder& decoder, const std::vector<Batch>& batches);

/// Changes every token outside the path to another id and returns whether the log-probabilities on the path
/// are bitwise identical to `before` = path_logprobs of the batches. All tokens keep their experts, because
/// the last bits of a row of a matrix product may depend on the number of rows.
bool isolated(const Decoder& decoder, const PathBatches& path, const PathLogprobs& before, uint64_t seed);

}  // namespace espalier
