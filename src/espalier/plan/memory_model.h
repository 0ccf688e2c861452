// Bytes of tensors in a training step, from counts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "espalier/plan/cost_model.h"
#include "espalier/plan/load.h"

namespace espalier {

/// Bytes per loss term.
struct TermBytes {
  int64_t batch = 0;    // in the batch: coefficient, indices and the like
  int64_t graph = 0;    // kept from the objective's forward pass for its backward pass
  int64_t running = 0;  // beside these while the objective is computed
};

struct MemoryModel {
  ModelShape shape;
  int64_t num_parameters = 0;
  bool query_key_norm = false;
  int64_t element_bytes = 4;  // of weights and activations
  int64_t operand_bytes = 4;  // of the same in matrix products, for which they may be widened
  int64_t sum_bytes = 4;      // of gradient sums, norms and attention statistics: float32 at least
  int64_t optimizer_bytes_per_parameter = 0;  // moments and master weights
  TermBytes term = {};
  int64_t logit_block_bytes = 16 << 20;  // of logits or their gradients, at most, that stand at once
  int64_t logit_blocks = 2;              // such blocks beside each other
  CheckpointActivations checkpoint_activations = CheckpointActivations::kNone;  // set from the plan
};

/// Bytes held throughout: weights, gradient sums, optimiser state.
double resident_bytes(const MemoryModel& model);

/// Bytes that a micro-batch holds while its descendants run: activations (or what checkpointing keeps of
/// them), and the gradients that descendants send to its context.
double held_bytes(const MemoryModel& model, const Load& load);

/// Bytes that a micro-batch needs at most while it runs itself, forward or backward, beside what is resident
/// and what its ancestors hold: its activations and context gradients, and what one layer or the LM head
/// needs for the moment. Where gradient sums are made first (has_sums is false: a step's first backward pass)
/// they are not resident, but grow layer by layer as the activations go.
double running_bytes(const MemoryModel& model, const Load& load, bool has_sums);

/// Bytes of the layers' weights where they stay widened for several micro-batches.
double widened_weight_bytes(const MemoryModel& model);

/// Peak bytes while each micro-batch runs: resident, widened weights if several run, held by its ancestors,
/// and running.
std::vector<double> peak_bytes(const MemoryModel& model, std::span<const Load> loads);

/// The largest of them; what is resident for an empty plan.
double plan_peak_bytes(const MemoryModel& model, std::span<const Load> loads);

}  // namespace espalier
