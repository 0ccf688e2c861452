// SPDX-License-Identifier: Apache-2.0
#include "espalier/objective/grpo.h"

#include <ATen/ATen.h>

namespace espalier {

PolicyGradient::Surrogate Grpo::surrogate(const PolicyTerms& terms) const {
  return clipped_surrogate(terms, terms.log_ratio);
}

at::Tensor Grpo::plain_surrogate(const at::Tensor&, const at::Tensor& log_ratio,
                                 const TermTensors& terms) const {
  return plain_clipped_surrogate(terms.columns[0], log_ratio);
}

}  // namespace espalier
