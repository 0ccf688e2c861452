// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/gspo.h"

#include <ATen/ATen.h>

namespace espalier {

PolicyGradient::Surrogate Gspo::surrogate(const PolicyTerms& terms) const {
  // Every trajectory among `units` has terms: others are never read.
  const at::Tensor sums = sum_by_trajectory(terms.coefficient * terms.log_ratio, terms.units);
  const at::Tensor weights = sum_by_trajectory(terms.coefficient, terms.units);
  const at::Tensor ratio = (sums / weights).exp().index_select(0, terms.units.trajectory);
  const at::Tensor plain = ratio * terms.advantage;
  const at::Tensor clipped = ratio.clamp(1 - options().clip_low, 1 + options().clip_high) * terms.advantage;
  return {.value = at::minimum(plain, clipped),
          .ratio = ratio.detach(),
          .is_clipped = clipped.detach().lt(plain.detach())};
}

at::Tensor Gspo::plain_surrogate(const at::Tensor&, const at::Tensor& log_ratio,
                                 const TermTensors& terms) const {
  const at::Tensor advantage = terms.columns[0];
  const at::Tensor shares = terms.coefficient / terms.coefficient.sum();
  const at::Tensor ratio = at::exp((shares * log_ratio).sum());
  const at::Tensor bounded = at::clamp(ratio, 1 - options().clip_low, 1 + options().clip_high);
  return at::minimum(ratio * advantage, bounded * advantage);
}

TermBytes Gspo::term_bytes() const {
  TermBytes bytes = PolicyGradient::term_bytes();
  bytes.graph += kTermIndexBytes;  // the trajectory of a term
  bytes.running += kTermRealBytes;
  return bytes;
}

}  // namespace espalier
