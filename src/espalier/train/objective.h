// Objectives: what is minimised, as a function of per-trajectory terms.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "espalier/base/csr.h"
#include "espalier/data/trajectories.h"
#include "espalier/plan/memory_model.h"
#include "espalier/tree/forest.h"

namespace espalier {

enum class ObjectiveKind { kSft, kGrpo };
enum class SharedTargets { kSum, kOnce };
enum class Normalize { kToken, kSequence, kConstant };

struct ObjectiveOptions {
  ObjectiveKind kind = ObjectiveKind::kSft;
  SharedTargets shared_targets =
      SharedTargets::kSum;  // once: of equal edges, the first trajectory's term counts
  Normalize normalize = Normalize::kToken;
  double normalize_constant = 1;  // with Normalize::kConstant
  double clip_low = 0.2;          // grpo: the ratio is clipped to [1 - clip_low, 1 + clip_high]
  double clip_high = 0.2;
  bool scale_rewards = true;  // grpo from rewards: divide by the group's standard deviation
};

/// "sft" | "grpo", "sum" | "once", "token" | "sequence" | a positive number; each throws InputError
/// otherwise.
ObjectiveKind parse_objective(const std::string& name);
SharedTargets parse_shared_targets(const std::string& name);
void parse_normalize(const std::string& text, ObjectiveOptions* options);

/// One loss term of a trajectory: token `position` (>= 1) with its share of the loss.
struct Term {
  int64_t position;
  double coefficient;
};

/// The terms of one optimiser step: row k holds those of the k-th trajectory, ascending by position. The loss
/// of the step is sum over k, t of coefficient * l(k, t), with l = -log p (sft) or the clipped surrogate
/// (grpo); the coefficients contain weights and the normaliser, so micro-batches simply add up.
///   token:    w / (sum of all w);  sequence: w / (sum of the row's w * number of rows with loss);
///   constant: w / normalize_constant.
/// `rows` are the trajectories the forest was built from, in its order. Throws InputError when no term is
/// left.
Csr<Term> step_terms(const Trajectories& trajectories, std::span<const int64_t> rows, const Forest& forest,
                     const ObjectiveOptions& options);

/// Those of a row's terms that stand at `position` or later.
std::span<const Term> terms_from(std::span<const Term> terms, int64_t position);

/// step_terms where any row carries loss; otherwise all_terms, so that data without loss yet can be counted.
Csr<Term> step_terms_or_all(const Trajectories& trajectories, std::span<const int64_t> rows,
                            const Forest& forest, const ObjectiveOptions& options);

/// Every token of every row but the first, with coefficient 1.
Csr<Term> all_terms(const Trajectories& trajectories, std::span<const int64_t> rows);

/// Advantages of all trajectories for grpo. A row's own advantages win; otherwise they come from its reward:
/// (reward - mean of its group) / (standard deviation of its group + 1e-6), with the n - 1 standard deviation
/// (DeepSeekMath, 2024, section 4.1.2), 0 in a group of one; without the division when scale_rewards is off
/// (Dr. GRPO, 2025). Groups are those of the whole file. Throws InputError naming a row that has neither.
class Advantages {
 public:
  Advantages() = default;
  Advantages(const Trajectories& trajectories, bool scale_rewards);

  double at(int64_t row, int64_t position) const;

 private:
  const Trajectories* trajectories_ = nullptr;
  std::vector<double> from_reward_;  // [R], or empty when every row has its own
};

/// Inputs of the loss per term, M terms, float64: what the trajectories say of each.
struct TermTensors {
  at::Tensor coefficient;  // [M]
  at::Tensor advantage;    // [M], grpo only
  at::Tensor old_logprob;  // [M], grpo only; 0 where absent
  at::Tensor has_old;      // [M] bool, grpo only
};

/// Scalars on the device of the terms: reading one waits for it.
struct ObjectiveValue {
  at::Tensor loss;  // float64: the sum over the terms
  // Of grpo; undefined for sft.
  at::Tensor clipped_terms;    // int64: terms whose clipped side was the smaller one
  at::Tensor ratio_sum;        // float64: sum of the ratios
  at::Tensor mismatch_kl_sum;  // float64: sum of r - 1 - log r (Schulman's k3)
};

/// Loss of M terms from their log-probabilities [M] (float64, differentiable). Nothing is read from the
/// device.
///   sft:  coefficient * -log p
///   grpo: coefficient * -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log p - old log p), the
///   old
///         one being stopgrad(log p) where absent (Schulman et al., PPO, 2017, equation 7).
ObjectiveValue objective_value(const ObjectiveOptions& options, const at::Tensor& logprobs,
                               const TermTensors& terms);

/// What a term takes on the way: in Batch, in objective_value, and in its backward pass.
TermBytes term_bytes(ObjectiveKind kind);

}  // namespace espalier
