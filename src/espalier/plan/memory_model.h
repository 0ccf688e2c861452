// SPDX-License-Identifier: Apache-2.0
// Bytes of tensors in a training step, from counts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/cost_model.h"
#include "espalier/plan/load.h"

namespace espalier {

/// Plans do not depend on the number of threads, so the work space of every CPU thread but one is left out: a
/// tile of an operator each, some hundred kilobytes.
struct MemoryModel {
  ModelCost cost;
  int64_t num_parameters = 0;
  int64_t element_bytes = 4;  // of weights and activations
  int64_t operand_bytes = 4;  // of the same as operands of matrix products, where they may be upcast
  int64_t packed_bytes = 0;   // of the same in the packed operand of a product; 0: products do not pack
  int64_t sum_bytes = 4;      // of gradient sums, norms and attention statistics: float32 at least
  int64_t optimizer_bytes_per_parameter = 0;  // moments and master weights of what is trained
  // Of a loss term: in the batch; kept from the objective's forward pass for its backward pass; in addition,
  // while the objective is computed.
  int64_t term_batch_bytes = 0, term_graph_bytes = 0, term_running_bytes = 0;
  int64_t logit_block_bytes = 16 << 20;  // most bytes of one block of logits or of their gradients
  int64_t logit_blocks = 2;              // such blocks in memory at the same time
  // Of an element of the LM head: bytes of its gradient before it is added to the sum, and of the head
  // upcast, where the head is not multiplied as it is (entropies).
  int64_t head_gradient_bytes = 0, head_upcast_bytes = 0;
  bool whole_last_layer = false;  // the last layer's MLP works on all tokens, not on logit rows only
  CheckpointActivations checkpoint_activations = CheckpointActivations::kNone;  // set from the plan
};

/// Bytes held throughout: weights, gradient sums, optimiser state. Where adapters are trained alone
/// (ModelCost::frozen) the latter two are theirs.
double resident_bytes(const MemoryModel& model);

/// Bytes that a micro-batch holds while its descendants run: its activations (or what checkpointing keeps of
/// them) and the gradients that descendants add to its context.
double held_bytes(const MemoryModel& model, const Load& load);

/// The most bytes that a micro-batch needs while it runs, forward or backward, in addition to what is
/// resident and to what its ancestors hold: its activations and context gradients, and the temporary tensors
/// of one layer or of the LM head. has_sums is false for the first backward pass of a step. The gradient sums
/// do not exist before that pass: they are allocated layer by layer while the activations are freed.
double running_bytes(const MemoryModel& model, const Load& load, bool has_sums);

/// Bytes of the layers' upcast weights, which stay in memory when a step has several micro-batches.
double upcast_weight_bytes(const MemoryModel& model);

/// Peak bytes while each micro-batch runs: what is resident, upcast weights if the step has several
/// micro-batches, what its ancestors hold, and what it needs itself.
std::vector<double> peak_bytes(const MemoryModel& model, std::span<const Load> loads);

/// The largest of peak_bytes. For an empty plan, what is resident.
double plan_peak_bytes(const MemoryModel& model, std::span<const Load> loads);

}  // namespace espalier
