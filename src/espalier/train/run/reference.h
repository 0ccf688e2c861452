// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of a reference model, computed before a run begins.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <functional>
#include <string>

#include "espalier/config/config.h"
#include "espalier/data/trajectories.h"
#include "espalier/engine/engine.h"
#include "espalier/objective/options.h"
#include "espalier/plan/planner.h"

namespace espalier {

/// A reference model, or a teacher, and how it is run.
struct Reference {
  std::filesystem::path model;  // a Hugging Face folder
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;  // open
  PlanOptions plan{};
};

/// Throws InputError where the objective reads no `ref_logprobs`, the reference has another vocabulary than
/// the policy, or a row has `ref_logprobs` of its own: which of the two is meant would be a guess, and two
/// ways of computing the same are never equal bit for bit. `where`: the files of the rows, for the message.
void check_reference(const Reference& reference, const DecoderConfig& policy,
                     const ObjectiveOptions& objective, const Trajectories& trajectories,
                     const std::string& where);

/// What is known of a computation that is kept in a file.
struct KeptReference {
  std::filesystem::path file;  // a safetensors file: F32 [N] (F64 for float64), with hashes
  std::string
      trained_hash{};  // of the column (data/content_hash.h) that the run's checkpoints were trained on
  MicroBatchProgress progress{};
  std::function<void(const std::string&)> note{};  // of a file that is not taken, and why
};

/// Sets `ref_logprobs` of every token with loss, 0 elsewhere, by one forward pass of the reference over the
/// trees of all rows. They are kept in `kept.file`, and taken from there when its hashes say that they are of
/// the same weights, config.json, tokens, loss weights, routes and dtype, and are whole; a file that is not
/// is replaced. The reference is freed before this returns. Returns whether they were taken from the file.
/// Throws InputError, and leaves the file as it is, where a trained_hash is given and they are others.
bool add_reference_logprobs(const Reference& reference, const KeptReference& kept,
                            Trajectories* trajectories);

}  // namespace espalier
