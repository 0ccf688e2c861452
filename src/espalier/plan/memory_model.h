// SPDX-License-Identifier: Apache-2.0
// Predicts the bytes of tensors in a training step from counts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/cost_model.h"
#include "espalier/plan/loss_work.h"

namespace espalier {

/// Plans must not depend on the number of threads, so the work space of all CPU threads but one is ignored: a
/// few hundred kilobytes each.
struct MemoryModel {
  ModelCost cost;
  int64_t num_parameters = 0;
  int64_t element_bytes = 4;  // of weights and activations
  int64_t operand_bytes = 4;  // of these as operands of matrix products, which may upcast them
  int64_t packed_bytes = 0;   // of these in the packed operand of a product; 0: products do not pack
  int64_t sum_bytes = 4;      // of gradient sums, norms and attention statistics: float32 at least
  double optimizer_bytes_per_parameter = 0;  // moments and master weights of trained parameters
  // Per loss term: in the batch; saved for the objective's backward pass; temporary while the objective is
  // computed.
  int64_t term_batch_bytes = 0, term_graph_bytes = 0, term_running_bytes = 0;
  int64_t logit_block_bytes = 16 << 20;  // most bytes of one block of logits or of their gradients
  int64_t logit_blocks = 2;              // such blocks in memory at the same time
  // Per element of the LM head: bytes of its gradient before it is added to the sum, and of the upcast head,
  // if the head is upcast before it is multiplied (entropies).
  int64_t head_gradient_bytes = 0, head_upcast_bytes = 0;
  int64_t context_parallel = 1;   // ranks that compute every micro-batch together, each an equal part
  bool whole_last_layer = false;  // the last layer's MLP works on all tokens, not on logit rows only
  CheckpointActivations checkpoint_activations = CheckpointActivations::kNone;  // set from the plan
};

/// Parameters with gradients: all, or the adapters with ModelCost::frozen.
double trained_parameters(const MemoryModel& model);

/// Bytes held throughout a step: weights, and gradient sums and optimiser state of the trained parameters
/// (the adapters with ModelCost::frozen).
double resident_bytes(const MemoryModel& model);

/// Bytes that a micro-batch holds while its descendants run: its activations (or those that checkpointing
/// keeps) and the gradients that descendants add to its context.
double held_bytes(const MemoryModel& model, const Load& load);

/// Peak bytes of a micro-batch while it runs, forward or backward, without resident bytes and those that its
/// ancestors hold: its activations and context gradients, and the temporary tensors of one layer or of the LM
/// head. has_sums is false for the first backward pass of a step, which allocates the gradient sums layer by
/// layer while it frees activations.
double running_bytes(const MemoryModel& model, const Load& load, bool has_sums);

/// Bytes of the layers' upcast weights, which stay in memory when a step has several micro-batches.
double upcast_weight_bytes(const MemoryModel& model);

/// Peak bytes while each micro-batch runs: resident bytes, upcast weights if the step has several
/// micro-batches, bytes held by its ancestors, and its own.
std::vector<double> peak_bytes(const MemoryModel& model, std::span<const Load> loads);

/// The largest of peak_bytes. For an empty plan, resident_bytes.
double plan_peak_bytes(const MemoryModel& model, std::span<const Load> loads);

}  // namespace espalier
