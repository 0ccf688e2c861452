// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/gspo.h"

#include <ATen/ATen.h>

namespace espalier {

PolicyGradient::Surrogate Gspo::surrogate(const PolicyTerms& terms) const {
  // Every trajectory in `units` has terms, so no weight that is read is 0.
  const at::Tensor& trajectory = terms.units.trajectory;
  const at::Tensor weights = sum_by_trajectory(terms.coefficient, terms.units);
  const at::Tensor shares = terms.coefficient / weights.index_select(0, trajectory);
  const at::Tensor mean = sum_by_trajectory(shares * terms.log_ratio, terms.units);
  return clipped_surrogate(terms, mean.index_select(0, trajectory));
}

at::Tensor Gspo::plain_surrogate(const at::Tensor&, const at::Tensor& log_ratio,
                                 const TermTensors& terms) const {
  const at::Tensor shares = terms.coefficient / terms.coefficient.sum();
  return plain_clipped_surrogate(terms.columns[0], (shares * log_ratio).sum());
}

TermBytes Gspo::term_bytes() const {
  TermBytes bytes = PolicyGradient::term_bytes();
  bytes.graph += kTermIndexBytes + kTermRealBytes;  // the trajectory of a term, and its share
  bytes.running += kTermRealBytes;
  return bytes;
}

}  // namespace espalier
