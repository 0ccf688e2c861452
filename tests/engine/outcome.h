// SPDX-License-Identifier: Apache-2.0
// A step computed one way or the other, and how far two of them are apart.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "espalier/engine/engine.h"
#include "espalier/model/decoder.h"
#include "espalier/verify/verify.h"

namespace espalier::testing {

/// Relative, of what two orders of adding make of one step in float64.
inline constexpr double kTolerance = 1e-12;
/// Of models with recurrent layers. These divide by the size of their output (Gated DeltaNet by the lengths
/// of queries and keys as well), and a few of some thousand random forests have one that is almost 0.
inline constexpr double kToleranceWithNorms = 1e-11;

struct Outcome {
  double loss = 0;
  double loss_size = 0;               // of the reference: ReferenceLoss::size
  std::vector<at::Tensor> gradients;  // float64, in the order of the decoder's parameters
  std::vector<double> logprobs;       // flat index; 0 where no term is
};

/// Every trajectory on its own: the truth.
Outcome reference_outcome(const Decoder& decoder, const Trajectories& trajectories,
                          const ObjectiveOptions& objective);

Outcome reference_outcome(const Decoder& decoder, const Loss& loss);

/// The step on its plan, as training runs it.
Outcome tree_outcome(const Decoder& decoder, const Trajectories& trajectories, const Step& step,
                     const ObjectiveOptions& objective);
Outcome tree_outcome(const Decoder& decoder, const Step& step, const Loss& loss);

/// The same from batches that a test may have spoilt. `logprobs` is left empty.
Outcome batch_outcome(const Decoder& decoder, const std::vector<Batch>& batches,
                      const ObjectiveOptions& objective);

std::vector<Batch> make_batches(const Trajectories& trajectories, const Step& step,
                                const ObjectiveOptions& objective);

/// Worst over the parameters of ||g - g_ref|| / max(||g_ref||, 1e-6 ||all g_ref||). Infinite where not
/// finite.
double gradient_error(const Outcome& outcome, const Outcome& reference);

/// How far rounding alone moves gradients: gradient_error of the reference with weights that differ by 2^-52,
/// relative, up or down at random. It is large where the gradients of trajectories cancel.
double gradient_rounding(const Decoder& decoder, const Trajectories& trajectories,
                         const ObjectiveOptions& objective, const Outcome& reference);

/// |loss - loss_ref| / size of loss_ref.
double loss_error(const Outcome& outcome, const Outcome& reference);

/// Largest absolute difference of log-probabilities.
double logprob_error(const Outcome& outcome, const Outcome& reference);

}  // namespace espalier::testing
