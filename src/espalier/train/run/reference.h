// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of a reference model, computed before training.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <functional>
#include <string>

#include "espalier/config/config.h"
#include "espalier/data/trajectories.h"
#include "espalier/distributed/group.h"
#include "espalier/engine/engine.h"
#include "espalier/objective/options.h"
#include "espalier/plan/planner.h"

namespace espalier {

/// A reference model or teacher, and the settings it runs with.
struct Reference {
  std::filesystem::path model;  // a Hugging Face folder
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;  // open
  PlanOptions plan{};
};

/// Throws InputError if the objective reads no `ref_logprobs`, the vocabularies of reference and policy
/// differ, or a row already has `ref_logprobs`, which would be ambiguous. `where`: the files of the rows, for
/// the message.
void check_reference(const Reference& reference, const DecoderConfig& policy,
                     const ObjectiveOptions& objective, const Trajectories& trajectories,
                     const std::string& where);

/// A file that caches the log-probabilities.
struct KeptReference {
  std::filesystem::path file;  // a safetensors file: F32 [N] (F64 for float64), with hashes
  std::string trained_hash{};  // hash of the column (content_hashes) used by existing checkpoints; "": none
  MicroBatchProgress progress{};
  std::function<void(const std::string&)> note{};  // called with the reason if the file is not used
};

/// Sets `ref_logprobs` of every token with loss, 0 elsewhere, by one forward pass of the reference over the
/// trees of all rows. They are cached in `kept.file`, and read from there if it is intact and its hashes
/// match weights, config.json, tokens, loss weights, routes and dtype; otherwise it is replaced. Frees the
/// reference model before returning. Returns whether they were read from the file. Throws InputError, without
/// changing the file, if trained_hash is given and differs. Ranks divide the pass as those of
/// compute_logprobs do; the first writes the file, which all read.
bool add_reference_logprobs(const Reference& reference, const KeptReference& kept, Trajectories* trajectories,
                            const Group& group = alone());

}  // namespace espalier
